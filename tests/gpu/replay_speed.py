"""Sections `speed` and `once`: with and without replay, in turn, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from replayed import Post, Replayed, sized, vary
from sections import say
from served import Options
from shapes import Request, decide, fit, systemone

from intern_decision_serve import replay

ROUNDS = 3
EACH = 30
ONCE = 120
BATCH = 10  # shapes seen once are asked in batches: what drifts, drifts for both


def measure_speed(options: Options) -> dict[str, Any]:
    """With and without, in turn, in one process."""
    replay.LONGEST_TOKENS = 4096  # to see where replay stops winning
    replay.MOST_CREDIT_SECONDS = 1e6
    served = Replayed(options, most=64, CUDA_GRAPHS_MIB="8192")
    return {
        "http_medians": [
            _compare_http(served, name, posts)
            for name, posts in (
                ("300 tokens, 1 field", sized(served, 300, 1, EACH)),
                ("750 tokens, 1 field", sized(served, 750, 1, EACH)),
                ("750 tokens, 3 fields", sized(served, 750, 3, EACH)),
            )
        ],
        "orderings": _compare_http(
            served,
            "/decide, orderings all, 24 calls",
            [("/decide", vary(decide(9, 120, 4, "all"), n)) for n in range(6)],
        ),
        "by_length": [
            _measure_length(served, tokens, fields)
            for tokens, fields in (
                (300, 1),
                (750, 1),
                (750, 3),
                (1000, 1),
                (2000, 1),
                (2000, 16),
                (3000, 1),
                (4000, 1),
            )
        ],
        "graphs": served.graphs(),
    }


def _compare_http(served: Replayed, name: str, posts: list[Post]) -> Request:
    """One client, the same requests in turn with and without replay."""
    served.turn(on=True)
    for _ in range(3):  # capture every shape among them
        served.post(posts[:6])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    answers: dict[bool, list[Any]] = {True: [], False: []}
    before = served.graphs().get("hits", 0)
    for _ in range(ROUNDS):
        for on in (False, True):
            served.turn(on=on)
            out = served.post(posts)
            seconds[on] += [taken for _, taken, _ in out]
            answers[on] += [_strip(answer) for _, _, answer in out]
    served.turn(on=True)
    eager, replayed = (statistics.median(seconds[on]) * 1000 for on in (False, True))
    return {
        "shape": name,
        "eager_ms": round(eager, 1),
        "replayed_ms": round(replayed, 1),
        "ratio": round(replayed / eager, 3),
        "hits": served.graphs().get("hits", 0) - before,
        "answers_differ": sum(
            one != other
            for one, other in zip(answers[False], answers[True], strict=True)
        ),
    }


def _strip(answer: Any) -> Any:
    """An answer without its timings."""
    if isinstance(answer, dict):
        timed = ("timing", "total_seconds", "forward_seconds")
        return {key: _strip(value) for key, value in answer.items() if key not in timed}
    return [_strip(item) for item in answer] if isinstance(answer, list) else answer


def _measure_length(served: Replayed, tokens: int, fields: int) -> Request:
    """predict() and the share of it that is the forward, eager and replayed."""
    body = fit(served.count_tokens, lambda words: systemone(6, words, fields), tokens)
    request = {"state": body["state"], "questions": body["questions"]}

    def measure(engine: Any) -> Request:
        for _ in range(2):
            engine.score(request)
        started = time.perf_counter()
        engine.after_answer()
        capture = time.perf_counter() - started
        eager, replayed = [], []
        for _ in range(25):
            with engine._forward.eager():
                eager.append(engine.score(request)[0]["timing"]["inference_ms"])
            response, _ = engine.score(request)
            replayed.append(response["timing"]["inference_ms"])
        before, after = statistics.median(eager), statistics.median(replayed)
        return {
            "tokens": response["usage"]["input_tokens"],
            "fields": fields,
            "eager_ms": round(before, 1),
            "replayed_ms": round(after, 1),
            "ratio": round(after / before, 3),
            "capture_ms": round(capture * 1000),
            "pool_mib": (engine.graphs or {}).get("pool_mib"),
        }

    result: Request = served.on_inference_thread(measure)
    return result


def measure_once(options: Options) -> dict[str, Any]:
    """Shapes seen once: replay has to look, and does nothing.

    Each body is asked four times: once for what a new length costs anyway (cuDNN's
    plan), then once with replay and twice without, the one with it first, second or
    third in turn. A batch's ratio is that of medians: single calls are slow in spurts.
    """
    served = Replayed(options, most=64)
    ratios: list[float] = []
    all_seconds: dict[bool, list[float]] = {True: [], False: []}
    for number, batch in enumerate(_batch(_find_distinct(served, ONCE))):
        served.turn(on=False)
        served.post(batch)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for place in range(3):
            on = place == number % 3
            served.turn(on=on)
            seconds[on] += [taken for _, taken, _ in served.post(batch)]
        for on, taken in seconds.items():
            all_seconds[on] += taken
        looked, plain = (statistics.median(seconds[on]) for on in (True, False))
        ratios.append(looked / plain)
        say(f"batch {number}: {looked * 1000:.1f} ms, {ratios[-1]:.4f}")
    looked, plain = (statistics.median(all_seconds[on]) for on in (True, False))
    return {
        "shapes": ONCE,
        "ratio_of_medians": round(looked / plain, 3),
        "batch_ratio_quartiles": str(
            [round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4)]
        ),
        "graphs": served.graphs(),
    }


def _find_distinct(served: Replayed, count: int) -> list[Post]:
    """Bodies of which no two have the same tokens and fields."""
    found: dict[tuple[int, int], Post] = {}
    for seed in range(10 * count):
        fields = 1 + seed % 8
        body = systemone(seed, 10 + 3 * (seed % 97), fields)
        shape = (served.count_tokens(body), fields)
        found.setdefault(shape, ("/v1/systemone", body))
        if len(found) == count:
            break
    return list(found.values())


def _batch(posts: list[Post]) -> Iterator[list[Post]]:
    for start in range(0, len(posts), BATCH):
        yield posts[start : start + BATCH]
