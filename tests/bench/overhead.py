"""What HTTP, JSON and mapping add to a call, against FastAPI in the same run."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Iterator

from .client import Client
from .generators import Load
from .pairs import measure_pairs, spread
from .processes import Process
from .requests import pack, small_request
from .tables import Row

__all__ = ["measure_added", "measure_clients"]

ROUNDS, REQUESTS = 20, 150


def _rivals() -> dict[str, tuple[str, ...]]:
    """uvicorn as `pip install uvicorn` gives it, and with its `standard` extra."""
    found: dict[str, tuple[str, ...]] = {"FastAPI, uvicorn": ()}
    if all(importlib.util.find_spec(name) for name in ("httptools", "uvloop")):
        arguments = ("--http", "httptools", "--loop", "uvloop")
        found["FastAPI, uvicorn[standard]"] = arguments
    return found


def measure_added() -> Iterator[Row]:
    """One keep-alive client, an instant engine: medians of interleaved rounds."""
    with contextlib.ExitStack() as stack:
        servers = {"this server": stack.enter_context(Process("target"))}
        for name, arguments in _rivals().items():
            servers[name] = stack.enter_context(Process("rival", *arguments))
        clients = {name: Client(server.url) for name, server in servers.items()}
        for client in clients.values():
            _median_ms(client)
        rounds: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(ROUNDS):
            for name, client in clients.items():
                rounds[name].append(_median_ms(client))
    ours = statistics.median(rounds["this server"])
    yield Row("this server", f"{ours:.3f} ms", "", "")
    for name in _rivals():
        ratio = statistics.median(
            mine / other
            for mine, other in zip(rounds["this server"], rounds[name], strict=True)
        )
        p50 = statistics.median(rounds[name])
        goal = "<= 0.80" if name == "FastAPI, uvicorn" else ""
        yield Row(name, f"{p50:.3f} ms", f"{ratio:.2f}", goal)


def _median_ms(client: Client) -> float:
    request = pack(small_request())
    seconds = []
    for _ in range(REQUESTS):
        started = time.perf_counter()
        status, _ = client.ask(request)
        seconds.append(time.perf_counter() - started)
        if status != 200:
            raise RuntimeError(f"a good request got {status}")
    return statistics.median(seconds) * 1000


def measure_clients(seconds: float, pairs: int) -> Iterator[Row]:
    """16 clients, an engine of 20 ms: requests a second, of the 50 there are."""
    with Process("target", "--engine", "0.02") as server:
        found = measure_pairs(server, seconds, pairs, Load("good", clients=16))
    bare = statistics.median(found.quiet_rates)
    rate = statistics.median(
        quiet * ratio
        for quiet, ratio in zip(found.quiet_rates, found.throughputs, strict=True)
    )
    yield Row("of 50 a second", f"{rate:.2f} /s", f"{rate / 50:.3f}", ">= 0.97")
    ratio = spread(found.throughputs, 3)
    yield Row("of the bare loop", f"{bare:.2f} /s", ratio, "")
