"""Requests a second of a few hosts under clients that ask again at once.

For the scaling benchmarks; no test depends on how fast anything is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from demo_server import TOKEN

__all__ = ["compare", "measure_rate"]


class Rate:
    """Clients that ask again as soon as they are answered, for a window of time."""

    def __init__(self, hosts: Sequence[str], path: str, body: Any) -> None:
        self.statuses: Counter[int] = Counter()
        self._hosts = hosts
        self._path = path
        self._data = json.dumps(body)
        self._ends_at = 0.0
        self._lock = threading.Lock()

    def run(self, clients: int, seconds: float) -> float:
        """Answers a second that were 200; each client keeps to one of the hosts."""
        threads = [
            threading.Thread(
                target=self._work, args=(self._hosts[n % len(self._hosts)],)
            )
            for n in range(clients)
        ]
        started = time.monotonic()
        self._ends_at = started + seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.statuses[200] / (time.monotonic() - started)

    def _work(self, host: str) -> None:
        connection = http.client.HTTPConnection(host, timeout=300)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with contextlib.closing(connection):
            while time.monotonic() < self._ends_at:
                connection.request("POST", self._path, self._data, headers)
                answer = connection.getresponse()
                answer.read()
                with self._lock:
                    self.statuses[answer.status] += 1


def measure_rate(
    hosts: Sequence[str], path: str, body: Any, clients: int, seconds: float
) -> float:
    """One window; refuses one in which anything but 200 was answered."""
    rate = Rate(hosts, path, body)
    found = rate.run(clients, seconds)
    if set(rate.statuses) != {200}:
        raise RuntimeError(f"statuses: {dict(rate.statuses)}")
    return found


def compare(
    alone: Sequence[Sequence[str]],
    together: Sequence[str],
    path: str,
    body: Any,
    *,
    clients: int,
    seconds: float,
    repeats: int = 3,
) -> dict[str, Any]:
    """Medians of alternating windows: each alone, all of them, and their ratio.

    The ratio is to the mean of those alone, so it reads 2 for two that do not hinder
    each other, however unlike they are.
    """
    hosts = [*alone, together]
    rates: list[list[float]] = [[] for _ in hosts]
    for _ in range(repeats):
        for found, asked in zip(rates, hosts, strict=True):
            found.append(measure_rate(asked, path, body, clients, seconds))
    *each, both = map(statistics.median, rates)
    return {
        "alone_per_second": [round(rate, 2) for rate in each],
        "together_per_second": round(both, 2),
        "ratio": round(both / statistics.mean(each), 3),
    }
