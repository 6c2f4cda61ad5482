"""The one inference thread: it loads the engine and runs every call (INV-2).

    handler thread                      inference thread
    submit(job) -> queue.Queue -------> claim, score call after call under the lock
    job.wait()  <- job's own reply <--- result, or the exception as a value

An exception is raised again in the handler thread. Nothing submitted is lost: every job
is answered with a result, its error, `ShuttingDown` or `EngineFailed`, or its client is
gone. It must never touch a request's content nor the engine from another thread.
"""

from __future__ import annotations

import logging
import math
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from .errors import (
    RESTART_SECONDS,
    EngineFailed,
    ScoringFailed,
    ServiceError,
    ShuttingDown,
)
from .jobs import ClientGone, Job, Result, Scored
from .pacing import Turns

__all__ = ["Engine", "Worker"]

_log = logging.getLogger(__name__)

RECENT_CALLS = 64
LONGEST_RETRY_SECONDS = 30


class Engine(Protocol):
    """What the inference thread needs of the engine."""

    def score(self, request: dict[str, Any], prepared: Any = None) -> Scored:
        """Score one call; raises a ServiceError."""

    def memory(self) -> dict[str, Any]:
        """Allocator figures in MiB; inference thread only."""


class Worker:
    """Owns the queue and the inference thread: loading, serving, stopping, lost."""

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        turns: Turns | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.turns = turns or Turns()
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self.engine: Any = None
        self.memory: dict[str, Any] = {}
        self.calls = 0
        self.skipped = 0
        self.running_since: float | None = None
        self.last_success_at: float | None = None
        self.is_stopping = False
        self.is_lost = False
        self._load = load
        self._on_lost = on_lost
        self._queue: queue.Queue[Job | None] = queue.Queue()
        self._submitting = threading.Lock()
        self._pending_calls = 0
        self._call_seconds: deque[float] = deque(maxlen=RECENT_CALLS)
        self._inference_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)

    def start(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Start the thread that loads the engine; tells when it loaded or failed."""
        self._on_ready = on_ready
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job from any thread; raises ShuttingDown or EngineFailed."""
        count = len(job.requests)
        job.on_given_up = lambda: self._count_pending(-count)
        with self._submitting:
            self.check_open()
            self._pending_calls += count
            self._queue.put(job)

    def _count_pending(self, calls: int) -> None:
        with self._submitting:
            self._pending_calls += calls

    def count_skipped(self) -> None:
        """Count a request dropped because its client had closed; from any thread."""
        with self._submitting:
            self.skipped += 1

    def check_open(self) -> None:
        """Raise what new work is told while nothing is scored any more."""
        if self.is_lost:
            raise EngineFailed("the engine is lost; the service restarts")
        if self.is_stopping:
            raise ShuttingDown("the service is stopping", retry_after=RESTART_SECONDS)

    def stop(self) -> None:
        """Take no more work; what is queued is still scored, then the thread ends."""
        with self._submitting:  # no job may be put behind the end mark
            if not self.is_stopping:
                self.is_stopping = True
                self._queue.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_scoring(self) -> bool:
        """Whether a call runs right now."""
        return self.running_since is not None

    @property
    def running_seconds(self) -> float | None:
        """Age of the running call in seconds, or None."""
        since = self.running_since
        return None if since is None else time.monotonic() - since

    @property
    def median_call_seconds(self) -> float | None:
        """Median of recent calls, or None before the first."""
        recent = list(self._call_seconds)
        return statistics.median(recent) if recent else None

    def estimate_wait(self, admitted: int) -> int:
        """Whole seconds until what is pending now should be scored; 1 to 30.

        Each of the `admitted` requests has one call at least, submitted yet or not.
        """
        calls = max(self._pending_calls, admitted)
        seconds = self.median_call_seconds or self.running_seconds or 0.0
        return min(max(1, math.ceil(calls * seconds)), LONGEST_RETRY_SECONDS)

    def _run(self) -> None:
        try:
            self.engine = self._load()
            self.memory = self.engine.memory()
        except BaseException as failure:  # handed to the thread that waits for ready
            self.failure = failure
            return
        finally:
            self.ready.set()
            self._on_ready()
        while (job := self._queue.get()) is not None:
            self._settle(job)
            job = None  # the last request's data must not outlive its answer
            is_serving = not self.is_lost and not self.is_stopping
            if is_serving and getattr(self.engine, "is_capture_due", False):
                self._use_gap()

    def _settle(self, job: Job) -> None:
        if not job.claim():
            self.count_skipped()
            return
        outcome = self._find_outcome(job)
        self._count_pending(-len(job.requests))
        job.settle(outcome)

    def _find_outcome(self, job: Job) -> Result | BaseException:
        """The result, or the exception without the frames it went through."""
        try:
            return self._score(job)
        except ClientGone:
            self.count_skipped()
            return ClientGone()
        except EngineFailed as failure:
            self._lose_engine(failure)
            return failure.with_traceback(None)
        except ServiceError as failure:
            self._read_memory()  # what an OOM left is what matters
            return failure.with_traceback(None)
        except BaseException:
            _log.exception("the inference thread met an unexpected failure")
            return ScoringFailed("scoring failed")

    def _score(self, job: Job) -> Result:
        """All calls of one job inside one hold of the lock (INV-2)."""
        scored: list[Scored] = []
        with self._inference_lock:
            if self.is_lost:
                self.check_open()  # nothing is scored on a lost context
            started = time.monotonic()
            for index, request in enumerate(job.requests):
                if job.is_gone():
                    raise ClientGone
                prepared = job.prepared[index]() if job.prepared else None
                scored.append(self._call(request, prepared))
            scoring_seconds = time.monotonic() - started
        return Result(tuple(scored), started - job.submitted_at, scoring_seconds)

    def _call(self, request: dict[str, Any], prepared: Any) -> Scored:
        with self.turns.call():
            started = self.running_since = time.monotonic()
            try:
                scored: Scored = self.engine.score(request, prepared)
            finally:
                self.running_since = None
                self.calls += 1
                self._call_seconds.append(time.monotonic() - started)
        self.last_success_at = time.monotonic()
        self._read_memory()
        return scored

    def _read_memory(self) -> None:
        try:
            self.memory = self.engine.memory()
        except Exception:  # counters must not cost an answer
            _log.exception("the allocator's counters cannot be read")

    def _use_gap(self) -> None:
        """Let the engine capture what recurs, as a call: others' Python keeps small."""
        with self._inference_lock, self.turns.call():
            self.running_since = time.monotonic()
            try:
                self.engine.after_answer()
                self._read_memory()
            except EngineFailed as failure:
                self._lose_engine(failure)
            except Exception:
                _log.exception("the inference thread met an unexpected failure")
            finally:
                self.running_since = None

    def _lose_engine(self, failure: EngineFailed) -> None:
        """From here on every job gets its `EngineFailed`; the process will end."""
        was_lost, self.is_lost = self.is_lost, True
        if not was_lost:
            _log.critical("the engine is lost: %s", failure.message)
            self._on_lost()
