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
    one: Sequence[str],
    two: Sequence[str],
    path: str,
    body: Any,
    *,
    clients: int,
    seconds: float,
    repeats: int = 3,
) -> dict[str, float]:
    """Medians of alternating windows, and how many times one is two."""
    rates: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(repeats):
        for name, hosts in (("one", one), ("two", two)):
            rates[name].append(measure_rate(hosts, path, body, clients, seconds))
    first, second = (statistics.median(rates[name]) for name in ("one", "two"))
    return {"one_per_second": first, "two_per_second": second, "ratio": second / first}
