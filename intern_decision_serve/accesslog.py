"""One `key=value` line on stderr per request, and the counts by outcome.

Never a prompt, a token or a header value (but a short, plain request id). A flood of
refusals is summed up in one line a second instead of one line each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

__all__ = ["AccessLog", "Record"]

_log = logging.getLogger("intern_decision_serve.access")

REFUSAL_LINES_A_SECOND = 10
LONGEST_PATH = 64
CLIENT_GONE = 499  # counted and logged, never sent
MODEL_FAILURES = ("out_of_memory", "scoring_failed")  # each one is worth its line


@dataclass(slots=True)
class Record:
    """What one request's line says; times in seconds, sizes in bytes."""

    request_id: str = "-"
    method: str = "-"
    path: str = "-"
    status: int = 0
    code: str = ""
    total_seconds: float = 0.0
    queued_seconds: float = 0.0
    scoring_seconds: float = 0.0
    calls: int = 0
    input_tokens: int = 0
    sent_bytes: int = 0

    def line(self) -> str:
        """The line, without the time that logging puts before it."""
        path = quote(self.path[:LONGEST_PATH], safe="/%")
        return (
            f"id={self.request_id} method={self.method[:16]} path={path} "
            f"status={self.status} ms={self.total_seconds * 1000:.1f} "
            f"queued_ms={self.queued_seconds * 1000:.1f} "
            f"scoring_ms={self.scoring_seconds * 1000:.1f} calls={self.calls} "
            f"input_tokens={self.input_tokens} bytes={self.sent_bytes}"
        )


class AccessLog:
    """Writes the lines, sums up floods, and keeps the counts that `/health` shows."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._clock = clock
        self._observe = observe
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._summed: Counter[int] = Counter()
        self._window_from = clock()
        self._window_lines = 0

    def write(self, record: Record) -> None:
        """Count a finished request and log its line, or sum it up."""
        self._observe(record)
        refusal = record.status >= 400 and record.code not in MODEL_FAILURES
        with self._lock:
            self._outcomes[record.code or str(record.status)] += 1
            self._roll_window()
            self._window_lines += refusal
            if refusal and self._window_lines > REFUSAL_LINES_A_SECOND:
                self._summed[record.status] += 1
                return
        _log.info("%s", record.line())

    def roll(self) -> None:
        """Log what a flood that is over left summed up; from time to time."""
        with self._lock:
            self._roll_window()

    def flush(self) -> None:
        """Log what is still only summed up; at the end of the process."""
        with self._lock:
            self._sum_up()

    @property
    def outcomes(self) -> dict[str, int]:
        """Requests so far: `ok`, an error's code, or `client_gone` -> how many."""
        with self._lock:
            return dict(sorted(self._outcomes.items()))

    def _roll_window(self) -> None:
        now = self._clock()
        if now - self._window_from >= 1.0:
            self._sum_up()
            self._window_from, self._window_lines = now, 0

    def _sum_up(self) -> None:
        if self._summed:
            counts = " ".join(f"{key}={n}" for key, n in sorted(self._summed.items()))
            _log.info("summed_up=%d %s", sum(self._summed.values()), counts)
            self._summed.clear()
