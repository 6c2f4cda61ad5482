"""One request on its way to the inference thread and back.

A handler thread makes a job and waits; the inference thread claims it and settles
it. Whoever claims a job decides its fate, once. It must never score anything.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ClientGone", "Job", "Result", "Scored"]

GONE_CHECK_SECONDS = 0.1  # how often a waiting handler looks at its client's socket

Scored = tuple[dict[str, Any], str]  # predict()'s response, prompt_sha256


class ClientGone(Exception):
    """Raised in the handler when its client closed before or between its calls."""


@dataclass(frozen=True, slots=True)
class Result:
    """One request's calls, scored, parallel to its requests; no queueing in seconds."""

    scored: tuple[Scored, ...]
    queued_seconds: float
    scoring_seconds: float


@dataclass(slots=True)
class Job:
    """The calls of one request, with its private reply queue.

    `requests` are predict() requests in call order; `prepared` is empty or parallel to
    them: callables giving what the encoder made ready, or None.
    """

    requests: tuple[dict[str, Any], ...]
    is_gone: Callable[[], bool]
    prepared: tuple[Callable[[], Any], ...] = ()
    submitted_at: float = field(default_factory=time.monotonic)
    on_given_up: Callable[[], None] = lambda: None
    _claim: threading.Lock = field(default_factory=threading.Lock)
    _reply: queue.SimpleQueue[Result | BaseException] = field(
        default_factory=queue.SimpleQueue
    )

    def claim(self) -> bool:
        """Whether the caller may decide this job's fate; true once, for one thread."""
        return self._claim.acquire(blocking=False)

    def settle(self, outcome: Result | BaseException) -> None:
        """Hand the outcome to the waiting handler."""
        self._reply.put(outcome)

    def wait(self) -> Result:
        """Block the handler until settled; raises what the inference thread met.

        A client that closes while the job is queued frees its place at once.
        """
        while True:
            try:
                outcome = self._reply.get(timeout=GONE_CHECK_SECONDS)
            except queue.Empty:
                if self.is_gone() and self.claim():
                    self._give_up()
                    raise ClientGone from None
                continue
            if isinstance(outcome, Result):
                return outcome
            try:
                raise outcome
            finally:
                del outcome  # its traceback holds this frame: no cycle, no leak

    def _give_up(self) -> None:
        """Hold nothing of the request while the job still stands in the queue.

        Clients that come and go during one long call would else fill the memory.
        """
        self.requests, self.prepared = (), ()
        self.is_gone = _always
        self.on_given_up()


def _always() -> bool:
    return True
