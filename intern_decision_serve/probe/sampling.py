"""Timed samples of one request shape, one client or several, under a time budget.

The clock is this side's; the server's own seconds are set beside it. An answer that is
not a 200 is not a sample: it is counted and shown next to them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .client import Answer, Client
from .rows import Document
from .session import Probe
from .shapes import call_tokens, server_seconds
from .statistics import percentile, summary

__all__ = ["HealthSample", "HealthWatch", "Point", "sample", "sample_at_once"]

_FEWEST = 3
_CLOCK_SHARE, _CLOCK_SECONDS = 1.05, 0.05
_WATCH_SECONDS = 0.05
_PATIENCE_SECONDS = 5.0

Make = Callable[[], tuple[str, Document]]  # another request at each call


@dataclass(slots=True)
class Point:
    """The samples of one shape; seconds, `tokens` of the longest call."""

    label: str
    tokens: int = 0
    wall: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    elapsed: float = 0.0

    def add(self, answer: Answer) -> None:
        """Take one answer: a sample, or a refusal by its name."""
        if answer.status == 200 and isinstance(answer.document, dict):
            self.wall.append(answer.seconds)
            self.server.append(server_seconds(answer.document))
            self.tokens = call_tokens(answer.document)
        else:
            self.refused[answer.named] = self.refused.get(answer.named, 0) + 1

    def merge(self, other: Point) -> None:
        """Take another thread's samples of the same shape."""
        self.wall += other.wall
        self.server += other.server
        self.tokens = max(self.tokens, other.tokens)
        for name, count in other.refused.items():
            self.refused[name] = self.refused.get(name, 0) + count

    @property
    def queue_share(self) -> float | None:
        """The share of the wall time in which the server was not scoring this."""
        wall = sum(self.wall)
        return 1 - sum(self.server) / wall if wall else None

    @property
    def excess(self) -> float:
        """Most seconds the server told beyond the wall time; two clocks may differ."""
        pairs = zip(self.wall, self.server, strict=True)
        over = [told - wall * _CLOCK_SHARE - _CLOCK_SECONDS for wall, told in pairs]
        negative = [-told for told in self.server]
        return max([0.0, *over, *negative])

    @property
    def per_second(self) -> float:
        """Answers a second over the whole time the point took."""
        return len(self.wall) / self.elapsed if self.elapsed else 0.0

    def facts(self) -> dict[str, object]:
        """The point for the JSON report, in milliseconds."""
        return {
            "label": self.label,
            "tokens": self.tokens,
            "wall_ms": _milliseconds(summary(self.wall)),
            "server_ms": _milliseconds(summary(self.server)),
            "queue_share": self.queue_share,
            "per_second": self.per_second,
            "not_200": self.refused,
        }

    def cells(self) -> tuple[object, ...]:
        """Samples, wall p50, p95, p99, server p50, queue share, other answers."""
        wall = summary(self.wall)
        share = self.queue_share
        return (
            wall["samples"],
            *(_shown(wall[name]) for name in ("p50", "p95", "p99")),
            _shown(percentile(self.server, 0.5) if self.server else None),
            None if share is None else f"{share:.0%}",
            ", ".join(f"{n} x {name}" for name, n in self.refused.items()) or "0",
        )


CELLS = ("samples", "p50 ms", "p95 ms", "p99 ms", "server p50 ms", "queue share",
         "not 200")  # fmt: skip
__all__ += ["CELLS"]


def _shown(seconds: float | int | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.1f}"


def _milliseconds(
    facts: dict[str, float | int | None],
) -> dict[str, float | int | None]:
    return {
        name: value if name == "samples" or value is None else value * 1000
        for name, value in facts.items()
    }


def sample(probe: Probe, point: Point, make: Make, seconds: float) -> None:
    """Ask on one connection until the time or the sample count is used up."""
    _loop(probe, probe.client, point, make, seconds, probe.options.samples)


def sample_at_once(
    probe: Probe, whole: Point, make: Make, seconds: float, clients: int
) -> None:
    """Ask on several connections at once; the samples stay, however it ends."""
    parts: list[Point] = []

    def work(client: Client) -> None:
        point = Point(whole.label)
        parts.append(point)
        _loop(probe, client, point, make, seconds, probe.options.samples)

    started = time.monotonic()
    try:
        probe.at_once(work, clients)
    finally:
        for point in parts:
            whole.merge(point)
        whole.elapsed = time.monotonic() - started


def _loop(
    probe: Probe, client: Client, point: Point, make: Make, seconds: float, most: int
) -> None:
    started = time.monotonic()
    asked = 0
    while asked < most and not probe.stopping.is_set():
        if asked >= _FEWEST and time.monotonic() - started >= seconds:
            break
        path, body = make()
        answer = client.post(path, body)
        if probe.stopping.is_set():
            break  # it was cut off: that says nothing about the server
        point.add(answer)
        asked += 1
    point.elapsed = time.monotonic() - started


@dataclass(frozen=True, slots=True)
class HealthSample:
    """One look at `/health`: when, how long it took, and the queue it showed."""

    at: float
    seconds: float
    admitted: int | None


class HealthWatch:
    """Looks at `/health` on a thread of its own while something else goes on."""

    def __init__(self, probe: Probe) -> None:
        self._client = probe.connect()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._started = time.monotonic()
        self.samples: list[HealthSample] = []
        self.refused = 0

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE_SECONDS)
        self._client.abort()
        self._client.close()

    @property
    def now(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self._started

    def _watch(self) -> None:
        self._look()
        while not self._stop.wait(_WATCH_SECONDS):
            self._look()

    def _look(self) -> None:
        at = self.now
        answer = self._client.get("/health")
        if answer.status != 200 or not isinstance(answer.document, dict):
            self.refused += 1
            return
        queue = answer.document.get("queue")
        admitted = queue.get("admitted") if isinstance(queue, dict) else None
        self.samples.append(HealthSample(at, answer.seconds, admitted))
