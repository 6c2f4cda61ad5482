"""Pairs of windows: predict() beside a load, then alone, in the same process.

The generators are stopped (SIGSTOP) while predict() loops alone on the same inference
thread. The windows are short and take turns: what else the machine does meanwhile falls
out of a ratio that is the median over the pairs.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

from .generators import Load
from .processes import Process, Running, start_load

__all__ = ["Pairs", "measure_pairs", "spread"]

START_SECONDS = 1.0  # the generators are up by then
SETTLE_SECONDS = 0.15  # between a quiet window and a loaded one, and back
FOR_EVER = 3600.0


@dataclass(slots=True)
class Pairs:
    """The pairs of windows of one case, and what its load did in the loaded ones."""

    latencies: list[float] = field(default_factory=list)
    throughputs: list[float] = field(default_factory=list)
    quiet_rates: list[float] = field(default_factory=list)
    quiet_ms: list[float] = field(default_factory=list)
    loaded_seconds: float = 0.0
    loads: list[dict[str, Any]] = field(default_factory=list)


def measure_pairs(
    server: Process,
    seconds: float,
    pairs: int,
    stream: Load,
    *loads: Load,
    prompts: str = "small",
    elsewhere: str = "",
) -> Pairs:
    """Alternate windows of a stream of good requests and its loads with quiet ones.

    With `elsewhere`, the loads go to that URL: what they cost the machine alone.
    """
    running = [start_load(server.url, replace(stream, seconds=FOR_EVER))]
    try:
        for load in loads:
            url = elsewhere or server.url
            running.append(start_load(url, replace(load, seconds=FOR_EVER)))
        time.sleep(START_SECONDS)
        found = _take_turns(server, seconds, pairs, running, prompts)
        for one in running:
            one.resume()
            one.end()
        found.loads = [one.finish() for one in running]
        return found
    finally:
        for one in running:
            one.kill()


def _take_turns(
    server: Process, seconds: float, pairs: int, running: list[Running], prompts: str
) -> Pairs:
    found = Pairs(loaded_seconds=START_SECONDS)
    for _ in range(pairs):
        beside = _loaded_window(server, seconds, running)
        quiet = server.tell(bare=seconds, prompts=prompts)
        median_ms = beside["median_ms"] or float("inf")
        found.latencies.append(median_ms / quiet["median_ms"])
        found.throughputs.append(beside["calls_a_second"] / quiet["calls_a_second"])
        found.quiet_rates.append(quiet["calls_a_second"])
        found.quiet_ms.append(quiet["median_ms"])
        found.loaded_seconds += seconds + SETTLE_SECONDS
    return found


def _loaded_window(
    server: Process, seconds: float, running: list[Running]
) -> dict[str, Any]:
    for one in running:
        one.resume()
    time.sleep(SETTLE_SECONDS)
    server.tell(begin=0)
    time.sleep(seconds)
    result: dict[str, Any] = server.tell(end=0)
    for one in running:
        one.pause()
    time.sleep(SETTLE_SECONDS)
    return result


def spread(values: list[float], digits: int = 2) -> str:
    """The median and, where there are enough, the middle half of the pairs."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) < 4:
        return middle
    low, _, high = statistics.quantiles(values, n=4)
    return f"{middle} ({low:.{digits}f} to {high:.{digits}f})"
