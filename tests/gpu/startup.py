"""Sections `cold`, `kept` and `bare`: load, warm-up, first requests, fixed answers."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from typing import Any

from served import Options
from shapes import fit, mixed, systemone

from intern_decision_serve.cli import OFFLINE
from intern_decision_serve.engine import load_engine

LENGTHS = (300, 1000, 4000, 8000)
REPEATS = 10
FIXED_ANSWERS = 40


def measure_startup(options: Options, *, with_ladder: bool = True) -> dict[str, Any]:
    """Load in this fresh process; time each stage and the first call at each length."""
    os.environ.update(OFFLINE)
    checkpoint = options.make()
    marks = [("start", time.perf_counter())]
    engine = load_engine(
        checkpoint.pins,
        checkpoint=checkpoint.path,
        device=options.device,
        vram_cap_gib=None,
        max_tokens=8192,
        release_slack_mib=512,
        keep_vision=False,
        allow_slow_kernels=True,
        warmup_tokens=None if with_ladder else (),
        cuda_graphs=0,
        cuda_graphs_mib=0,
        progress=lambda text: marks.append((text, time.perf_counter())),
    )
    marks.append(("ready", time.perf_counter()))
    stages = [
        {"stage": name, "seconds": round(later - at, 2)}
        for (name, at), (_, later) in zip(marks, marks[1:], strict=False)
    ]
    return {
        "seconds_to_ready": round(marks[-1][1] - marks[0][1], 2),
        "stages": stages,
        "warmup": engine.warmup,
        "kernels": engine.kernels,
        "model": engine.description,
        "memory": engine.memory(),
        "first_requests": [_first_request(engine, length) for length in LENGTHS],
        "answers_sha256": _hash_answers(engine),
    }


def _first_request(engine: Any, length: int) -> dict[str, Any]:
    """Time the first call of a length that no rung has, then its median."""

    def build(words: int) -> dict[str, Any]:
        body = systemone(length, words, 2)
        return {"state": body["state"], "questions": body["questions"]}

    request = fit(engine._count_tokens, build, length)
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        response, _ = engine.score(request)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    return {
        "tokens": response["usage"]["input_tokens"],
        "first_ms": round(seconds[0] * 1000, 1),
        "median_ms": round(median * 1000, 1),
        "ratio": round(seconds[0] / median, 2),
    }


def _hash_answers(engine: Any) -> str:
    """Hash the answers to fixed requests, to be compared across restarts."""
    digest = hashlib.sha256()
    for path, body in mixed(4 * FIXED_ANSWERS, 2500):
        if path == "/v1/systemone":
            response, _ = engine.score(body)
            digest.update(json.dumps(response["answers"]).encode())
    return digest.hexdigest()
