"""One probing session: the options, the server's `/health`, and how a section asks.

It never decides what a good answer is: sections do. `ask` turns anything but a 200 with
a JSON object into `Unanswered`, which ends the section that asked, in words.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .client import Answer, Client, Tally
from .progress import Progress
from .rows import Row
from .samples import run_numbers
from .wire import Target

__all__ = ["SETTINGS", "Probe", "Reply", "Unanswered", "object_of"]

Reply = dict[str, Any]

SETTINGS = (  # in `/health`: what a server allows and how it works a request off
    "vram_cap_gib", "max_tokens", "max_decisions", "max_questions_per_call", "chunking",
    "workloads", "systemone", "endpoints", "limits",
)  # fmt: skip

_T = TypeVar("_T")


class Unanswered(Exception):
    """Raised when a question that had to be answered was not."""

    def __init__(self, path: str, answer: Answer) -> None:
        super().__init__(f"{path} answered {answer.instead}")
        self.answer = answer


def object_of(path: str, answer: Answer) -> Reply:
    """The JSON object of a 200; Unanswered for anything else."""
    if answer.status != 200 or not isinstance(answer.document, dict):
        raise Unanswered(path, answer)
    return answer.document


@dataclass(slots=True)
class Probe:
    """What every section works with; sections run one after another."""

    target: Target
    token: str
    options: argparse.Namespace
    health: Reply
    tally: Tally
    progress: Progress
    rows: tuple[Row, ...]
    rows_source: str
    scored: dict[str, Reply] = field(default_factory=dict)
    refused: dict[str, Answer] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=run_numbers)  # of fresh texts
    stopping: threading.Event = field(default_factory=threading.Event)
    _main: Client | None = None

    def connect(self) -> Client:
        """A new connection, for a thread of its own."""
        deadline: float = self.options.deadline
        return Client(self.target, self.token, self.tally, deadline=deadline)

    @property
    def client(self) -> Client:
        """The main thread's connection."""
        if self._main is None:
            self._main = self.connect()
        return self._main

    def close(self) -> None:
        """Drop the main thread's connection."""
        if self._main is not None:
            self._main.close()

    def ask(self, path: str, body: object) -> Reply:
        """The 200 answer to one POST."""
        return object_of(path, self.client.post(path, body))

    def ask_timed(self, path: str, body: object) -> tuple[Reply, float]:
        """The 200 answer to one POST and the seconds it took here."""
        answer = self.client.post(path, body)
        return object_of(path, answer), answer.seconds

    def read_health(self) -> Reply:
        """`/health` now."""
        return object_of("/health", self.client.get("/health"))

    def health_part(self, name: str) -> Reply:
        """One additive object of a fresh `/health`, {} where it is not reported."""
        part = self.read_health().get(name)
        return part if isinstance(part, dict) else {}

    def try_ask(self, path: str, body: object) -> Reply | Answer:
        """The 200 answer to one POST or the server's refusal; Unanswered for silence.

        Silence says nothing about what was asked: it ends the section.
        """
        answer = self.client.post(path, body)
        refused = answer.status not in (0, 200)
        return answer if refused else object_of(path, answer)

    def try_row(self, row: Row) -> Reply | None:
        """A row's `/decide` result, asked once a session; None for one in `refused`."""
        if row.id not in self.scored and row.id not in self.refused:
            answer = self.try_ask("/decide", row.request())
            if isinstance(answer, Answer):
                self.refused[row.id] = answer
            else:
                self.scored[row.id] = answer
        return self.scored.get(row.id)

    def at_once(self, work: Callable[[Client], _T], clients: int) -> list[_T]:
        """Run `work` on that many threads, a connection each; the first error wins."""

        connections = [self.connect() for _ in range(clients)]
        pool = ThreadPoolExecutor(clients)
        futures = [pool.submit(work, client) for client in connections]
        try:
            return [future.result() for future in futures]
        except BaseException:
            self.stopping.set()  # loops look at it between two requests
            for client in connections:
                client.abort()
            raise
        finally:
            pool.shutdown(wait=True)
            self.stopping.clear()
            for client in connections:
                client.close()

    def limit(self, name: str, otherwise: int) -> int:
        """A whole-number limit of `/health`, or what the contract gives as default."""
        more = self.health.get("limits")  # additive: what the contract leaves out
        value = {**(more if isinstance(more, dict) else {}), **self.health}.get(name)
        return value if isinstance(value, int) and value > 0 else otherwise

    def queue_places(self) -> int:
        """MAX_QUEUE: as told, as `/health` shows it, or the contract's default."""
        told: int | None = self.options.max_queue
        queue = self.health_part("queue")
        free, admitted = queue.get("slots_free"), queue.get("admitted")
        if told is not None:
            return told
        if isinstance(free, int) and isinstance(admitted, int):
            return free + admitted
        return self.limit("max_queue", 32)
