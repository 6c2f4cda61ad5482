"""Sections `memory` and `floods`: the pool's bounds, and replay beside refusals."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

from replayed import Post, Replayed, sized
from served import Options, driver_mib
from shapes import Request, systemone

from intern_decision_serve import replay
from tests.bench.client import TOKEN as BENCH_TOKEN
from tests.bench.generators import Load
from tests.bench.processes import start_load
from tests.bench.requests import BODIES

REAL_SHAPES = 200
STREAM_SECONDS = 5.0
LONGEST_SECONDS = 60.0  # a load is ended when its stream is
EACH = 30
MIB = 2**20


def measure_memory(options: Options) -> dict[str, Any]:
    """200 shapes, each twice: graphs and pool within their bounds, the rest flat."""
    replay.MOST_CREDIT_SECONDS = 1e6  # captures are not rationed here
    served = Replayed(options, most=64)
    default = _fill(served, REAL_SHAPES)

    def narrow(engine: Any) -> None:
        if (replay := engine._forward.replay) is not None:
            replay.drop()
            engine._memory.release()
            replay._pool_bytes = 256 * MIB

    served.on_inference_thread(narrow)
    return {
        "1024_mib": default,
        "256_mib": _fill(served, REAL_SHAPES // 2),
        "status": served.ask("/health")[1]["status"],
    }


def _fill(served: Replayed, count: int) -> list[Request]:
    rows, most_pool, most_held = [], 0.0, 0
    for place in range(count):
        words = 15 + (place * 37) % 1900  # short and long in turn
        body = systemone(place, words, 1 + place % 16)

        def twice(engine: Any, body: Request = body) -> Any:
            request = {"state": body["state"], "questions": body["questions"]}
            for _ in range(2):
                engine.score(request)
            engine.after_answer()
            return engine.graphs or {"pool_mib": 0.0, "held": 0}

        graphs = served.on_inference_thread(twice)
        most_pool = max(most_pool, graphs["pool_mib"])
        most_held = max(most_held, graphs["held"])
        if (place + 1) % max(1, count // 5) == 0:
            memory = served.memory()
            keys = ("captures", "refusals", "evictions", "drops", "held", "pool_mib")
            rows.append(
                {
                    "shapes": place + 1,
                    **{key: graphs.get(key) for key in keys},
                    "most_pool_mib": most_pool,
                    "most_held": most_held,
                    "baseline_mib": memory["baseline_mib"],
                    "reserved_mib": memory["reserved_mib"],
                    "driver_mib": driver_mib(),
                }
            )
    return rows


def measure_floods(options: Options) -> dict[str, Any]:
    """The median of a replayed call beside each flood, against the stream alone."""
    served = Replayed(options, most=64, API_TOKEN=BENCH_TOKEN, MAX_QUEUE="32")
    served.token = BENCH_TOKEN
    posts = sized(served, 300, 1, EACH)
    for _ in range(3):
        served.post(posts[:4])
    not_json = next(iter(BODIES))
    cases = {  # load and clients of the stream; 32 fill the queue
        "1,000 401s a second": (Load("unauthorized", 8, 1000.0, LONGEST_SECONDS), 2),
        "429s from 8 clients": (Load("busy", 8, 0.0, LONGEST_SECONDS), 32),
        "/health 100 a second": (Load("health", 1, 100.0, LONGEST_SECONDS), 2),
        f"4 x 1 MiB {not_json}": (Load("body", 4, 0.0, LONGEST_SECONDS, not_json), 2),
    }
    rows = [
        {"load": name, **_beside(served, posts, load, clients)}
        for name, (load, clients) in cases.items()
    ]
    served.turn(on=False)
    name, (load, clients) = next(iter(cases.items()))
    eager = {"load": name, **_beside(served, posts, load, clients)}
    return {"replayed": rows, "eager": eager, "graphs": served.graphs()}


def _beside(served: Replayed, posts: list[Post], load: Load, clients: int) -> Request:
    hits = served.graphs().get("hits", 0)
    before = _stream(served, posts, clients)
    running = start_load(served.url, load)
    time.sleep(1.0)
    beside = _stream(served, posts, clients)
    running.end()
    counts = running.finish()
    running.kill()
    after = _stream(served, posts, clients)
    quiet = statistics.mean((before, after))
    return {
        "quiet_ms": [round(before * 1000, 2), round(after * 1000, 2)],
        "beside_ms": round(beside * 1000, 2),
        "ratio": round(beside / quiet, 3),
        "statuses": counts["statuses"],
        "a_second": round(sum(counts["statuses"].values()) / counts["seconds"]),
        "hits": served.graphs().get("hits", 0) - hits,
    }


def _stream(served: Replayed, posts: list[Post], clients: int) -> float:
    """The median seconds of a call while so many clients send for some seconds."""
    watch = served.watch
    watch.seconds = []
    ended = threading.Event()
    timer = threading.Timer(STREAM_SECONDS, ended.set)
    timer.start()
    while not ended.is_set():
        served.post(posts * (4 if clients < 8 else 8), clients=clients)
    return statistics.median(watch.seconds)
