"""One load as a process of its own: `python -m tests.bench.generators JSON`.

Prints what it did as one JSON line: answers by status, latencies, its share of a core.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .client import Client, build_request
from .requests import BODIES, PROMPTS, pack

__all__ = ["Load", "main"]


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, over how many connections, for how long; `rate` is for all."""

    kind: str
    clients: int = 1
    rate: float = 0.0  # attempts a second; 0 means as fast as it is answered
    seconds: float = 5.0
    body: str = ""  # a name of BODIES, or of PROMPTS for good requests

    def to_json(self, url: str) -> str:
        return json.dumps({"url": url, **asdict(self)})


def _requests(load: Load, client: int) -> Iterator[bytes]:
    if load.kind == "good":
        made = [pack(PROMPTS[load.body or "small"](client + i)) for i in range(8)]
    elif load.kind == "unauthorized":
        made = [build_request("/decide", b'{"a": 1}', token="no")]
    elif load.kind == "health":
        made = [build_request("/health")]
    elif load.kind == "busy":
        made = [pack(PROMPTS["small"](0))]
    else:
        made = [BODIES[load.body]()]
    while True:
        yield from made


class Generator:
    """The threads of one load and what they counted."""

    def __init__(self, url: str, load: Load) -> None:
        self._url, self._load = url, load
        self._statuses: Counter[int] = Counter()
        self._latencies: list[float] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def end(self, *_: object) -> None:
        """Send no more."""
        self._ended.set()

    def run(self) -> dict[str, Any]:
        """Send until the time is over; what happened."""
        started = time.monotonic()
        until = started + self._load.seconds
        threads = [
            threading.Thread(target=self._send, args=(i, until), daemon=True)
            for i in range(self._load.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # wake up for a SIGTERM that another thread got
                thread.join(0.2)
        seconds = time.monotonic() - started
        latencies = sorted(self._latencies) or [0.0]
        return {
            "statuses": dict(self._statuses),
            "p50_ms": statistics.median(latencies) * 1000,
            "p95_ms": latencies[int(len(latencies) * 0.95)] * 1000,
            "cpu_seconds": time.process_time(),
            "seconds": seconds,
        }

    def _send(self, index: int, until: float) -> None:
        client = Client(self._url)
        pause = self._pacer(index)
        for request in _requests(self._load, index):
            pause()
            started = time.monotonic()
            if started >= until or self._ended.is_set():
                break
            status, _ = client.ask(request)
            with self._lock:
                self._statuses[status] += 1
                self._latencies.append(time.monotonic() - started)
            if status in (0, 429) and self._load.kind == "good":
                time.sleep(0.05)
        client.close()

    def _pacer(self, index: int) -> Callable[[], None]:
        """Open loop: attempts are due at fixed times, late ones are not given up."""
        if not self._load.rate:
            return lambda: None
        interval = self._load.clients / self._load.rate
        due = time.monotonic() + interval * index / self._load.clients

        def pause() -> None:
            nonlocal due
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due + interval, time.monotonic() - 0.5)

        return pause


def main() -> None:
    """Run the load of the first argument."""
    settings = json.loads(sys.argv[1])
    url = settings.pop("url")
    generator = Generator(url, Load(**settings))
    signal.signal(signal.SIGTERM, generator.end)
    sys.stdout.write(json.dumps(generator.run()) + "\n")


if __name__ == "__main__":
    main()
