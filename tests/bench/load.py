"""predict() beside every kind of load, against its quiet loop in the same process."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from .generators import Load
from .pairs import Pairs, measure_pairs, spread
from .processes import Process
from .requests import BODIES
from .tables import Row

__all__ = ["measure_bodies", "measure_load", "measure_throughput", "start_target"]

_STREAM = Load("good", clients=2)
_CASES: list[tuple[str, str, Load, list[Load]]] = [
    ("the stream alone", "", _STREAM, []),
    (
        "1,000 attempted 401s/s over 8 connections",
        "<= 1.2",
        _STREAM,
        [Load("unauthorized", clients=8, rate=1000.0)],
    ),
    (
        "a hot loop of 429s from 8 clients",
        "<= 1.2",
        Load("good", clients=32),
        [Load("busy", clients=8)],
    ),
    (
        "/health 100 times a second",
        "<= 1.1",
        _STREAM,
        [Load("health", clients=1, rate=100.0)],
    ),
    ("/health as fast as 8 clients can", "", _STREAM, [Load("health", clients=8)]),
]
# What the pacing lets through, sent to a process that has nothing to do with the
# engine: what is left then is the machine's cores, not the interpreter's lock.
_CONTROLS = [
    ("110 401s/s", Load("unauthorized", clients=8, rate=110.0)),
    ("/health 100 times a second", Load("health", clients=1, rate=100.0)),
]


def start_target(directory: str, size: str, device: str, **options: str) -> Process:
    """The demo checkpoint on the real loader."""
    arguments = ["--engine", "demo", "--dir", directory]
    arguments += ["--size", size, "--device", device]
    for name, value in options.items():
        arguments += [f"--{name}", value]
    return Process("target", *arguments)


def _describe(found: Pairs) -> str:
    notes = f"throughput {statistics.median(found.throughputs):.2f}"
    for load in found.loads[1:]:
        answers = Counter(load["statuses"])
        rate = sum(answers.values()) / found.loaded_seconds
        counts = ", ".join(f"{n} x {s}" for s, n in sorted(answers.items()))
        share = load["cpu_seconds"] / found.loaded_seconds
        notes += f"; {rate:.0f} /s ({counts}), {share:.0%} of a core"
    return notes


def _row(name: str, goal: str, found: Pairs) -> Row:
    value = f"{statistics.median(found.quiet_ms):.1f} ms quiet"
    return Row(name, value, spread(found.latencies), goal, _describe(found))


def measure_load(server: Process, seconds: float, pairs: int) -> Iterator[Row]:
    """Issue 5's table: latency of predict() beside refusals and polls."""
    for name, goal, stream, loads in _CASES:
        yield _row(name, goal, measure_pairs(server, seconds, pairs, stream, *loads))
    with Process("target") as other:
        for name, load in _CONTROLS:
            found = measure_pairs(
                server, seconds, pairs, _STREAM, load, elsewhere=other.url
            )
            yield _row(f"control: {name} to another process", "", found)


def measure_bodies(
    server: Process, seconds: float, pairs: int, only: str = ""
) -> Iterator[Row]:
    """4 clients re-sending 1 MiB as fast as they can, shape by shape."""
    for body in BODIES:
        if only in body:
            load = Load("body", clients=4, body=body)
            found = measure_pairs(server, seconds, pairs, _STREAM, load)
            yield _row(f"4 clients: {body}", "<= 1.5", found)


def measure_throughput(
    server: Process, seconds: float, pairs: int, prompts: list[str], clients: int
) -> Iterator[Row]:
    """Good requests alone: calls a second against the bare loop's."""
    goals = {"small": ">= 0.97 (0.98 on a GPU)", "long": ">= 1.10 on a GPU"}
    for kind in prompts:
        stream = Load("good", clients=clients, body=kind)
        found = measure_pairs(server, seconds, pairs, stream, prompts=kind)
        latency = f"latency {statistics.median(found.latencies):.2f}"
        value = f"{statistics.median(found.quiet_ms):.1f} ms quiet"
        ratio = spread(found.throughputs, 3)
        yield Row(f"{clients} clients, {kind}", value, ratio, goals[kind], latency)
