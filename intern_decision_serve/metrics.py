"""`GET /metrics`: finished requests counted, and what `/health` knows, for Prometheus.

    AccessLog.write(record) -> Tally.add(record)                once a finished request
    GET /metrics -> Metrics.render() -> Tally, Health.document()       once a scrape

It has a registry of its own, never the library's global one. It must never name a
prompt, an id or a path that a client made up, nor touch torch.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .accesslog import CLIENT_GONE, Record
from .errors import ServiceError
from .health import ENDPOINTS, Health

__all__ = ["CONTENT_TYPE", "ROUTES", "Metrics", "Tally"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ROUTES = (*ENDPOINTS, "/health", "/metrics", "/openapi.json", "/v1/models")
STATES = ("ok", "stopping", "engine_failed")
MIB = 2**20
PREFIX = "intern_decision_"

# Seconds. A short call takes 13 to 60 ms, the longest 200 ms; a request holds up to
# 64 calls, and waits behind 32 others.
BUCKETS = (
    *(0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0),
)


class _Histogram:
    """Counts by bucket; its owner's lock guards it."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*BUCKETS, "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        return HistogramMetricFamily(
            PREFIX + name, text, buckets=buckets, sum_value=self._sum
        )


class Tally:
    """What finished requests add up to; `add` runs beside calls, so it stays small."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A series that starts at its first event would hide that event from rate().
        self._requests = Counter({(route, 200): 0 for route in ROUTES})
        self._refused = Counter({kind.code: 0 for kind in _refusals()})
        self._input_tokens = 0
        self._queue, self._scoring = _Histogram(), _Histogram()

    def add(self, record: Record) -> None:
        """Count one finished request; from its handler thread."""
        route = record.path if record.path in ROUTES else "other"
        with self._lock:
            self._requests[route, record.status] += 1
            if record.status >= 400 and record.code in self._refused:
                self._refused[record.code] += 1
            if record.calls:
                self._input_tokens += record.input_tokens
                self._queue.observe(record.queued_seconds)
                self._scoring.observe(record.scoring_seconds)

    def families(self) -> list[Metric]:
        """Everything counted so far, at one moment."""
        requests = CounterMetricFamily(
            PREFIX + "requests",
            f"Finished requests; status {CLIENT_GONE} is a client that closed before "
            "its request was begun.",
            labels=("route", "status"),
        )
        refused = CounterMetricFamily(
            PREFIX + "refused", "Requests answered with an error.", labels=("reason",)
        )
        with self._lock:
            for (route, status), count in sorted(self._requests.items()):
                requests.add_metric((route, str(status)), count)
            for code, count in sorted(self._refused.items()):
                refused.add_metric((code,), count)
            return [
                requests,
                refused,
                CounterMetricFamily(
                    PREFIX + "input_tokens",
                    "Tokens of scored calls.",
                    value=self._input_tokens,
                ),
                self._queue.family(
                    "queue_seconds", "From the queue to the first call, if scored."
                ),
                self._scoring.family(
                    "scoring_seconds", "All calls of one scored request."
                ),
            ]


def _refusals() -> list[type[ServiceError]]:
    """Every error a client can be told; the list is closed."""
    return [ServiceError, *ServiceError.__subclasses__()]


class Metrics(Collector):
    """The text of one scrape; safe from any thread once the engine is loaded."""

    def __init__(self, tally: Tally, health: Health) -> None:
        self._tally = tally
        self._health = health
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Everything, in the text format that CONTENT_TYPE names."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every family; `render` calls it."""
        yield from self._tally.families()
        document = self._health.document()
        yield from _queue(document)
        yield _memory(document["memory"])
        yield from _infos(document)


def _queue(document: dict[str, Any]) -> Iterator[Metric]:
    queue = document["queue"]
    yield CounterMetricFamily(
        PREFIX + "calls", "Calls run on the engine, failed ones too.", queue["calls"]
    )
    yield CounterMetricFamily(
        PREFIX + "skipped_requests",
        "Requests dropped unscored because their client had closed.",
        document["requests"]["skipped"],
    )
    figures = {
        "admitted_requests": ("POSTs that hold a slot.", queue["admitted"]),
        "slots": ("POSTs that may hold one.", document["limits"]["max_queue"]),
        "accepting": ("Whether a POST would be admitted.", document["accepting"]),
        "running_call_seconds": (
            "Age of the running call; 0 if none runs.",
            queue["running_seconds"] or 0.0,
        ),
    }
    for name, (text, value) in figures.items():
        yield GaugeMetricFamily(PREFIX + name, text, value)
    state = GaugeMetricFamily(
        PREFIX + "engine_state", "1 for the state it is in.", labels=("state",)
    )
    for name in STATES:
        state.add_metric((name,), document["status"] == name)
    yield state


def _memory(mib: dict[str, float | None]) -> Metric:
    """The allocator after the last call; no series on the CPU."""
    family = GaugeMetricFamily(
        PREFIX + "memory_bytes",
        "CUDA allocator after the last call, which VRAM_CAP_GIB bounds.",
        labels=("kind",),
    )
    for name, value in mib.items():
        if value is not None:
            family.add_metric((name.removesuffix("_mib"),), value * MIB)
    return family


def _infos(document: dict[str, Any]) -> Iterator[Metric]:
    model = document["model"]
    build = {"version": document["version"]} | {
        label: str(model.get(key))
        for label, key in (
            ("model", "name"),
            ("revision", "revision"),
            ("device", "device"),
            ("torch", "torch_version"),
            ("transformers", "transformers_version"),
        )
    }
    yield InfoMetricFamily(PREFIX + "build", "What is serving.", build)
    kernels = InfoMetricFamily(
        PREFIX + "kernel",
        "The code bound to each fast kernel's name.",
        labels=("kernel",),
    )
    for name, bound in document["kernels"].items():
        kernels.add_metric(
            (name,), {key: str(value).lower() for key, value in bound.items()}
        )
    yield kernels
