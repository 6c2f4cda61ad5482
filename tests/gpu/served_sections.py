"""Sections that measure the service in one process: answers, latency, memory, pace."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from client import run_client
from served import Options, Served
from shapes import CRITERIA, fit, mixed, shared, systemone

from intern_decision_serve import mapping, validation, warmup

ANSWERED = 240
SWAPPED = 40
SOAKED = 1000
SOAK_CLIENTS = 32
LATENCY_REPEATS = 30
LONG_TOKENS = (4000, 5000, 6389, 7869)
SHORT_TOKENS = (100, 300, 473, 750, 950)
Difference = str | None


def measure_answers(options: Options) -> dict[str, Any]:
    """HTTP answers against direct predict() calls; before and after the swap."""
    served = Served(options, KEEP_VISION="1", MAX_QUEUE="64")
    swap = served.on_inference_thread(_swap)
    served.recording.is_checking = True
    posts = mixed(ANSWERED, 2500)
    answers = run_client(served.url, served.token, posts, clients=8)["posts"]
    served.recording.is_checking = False
    statuses = [status for status, _, _ in answers]
    wrong = [
        difference
        for (path, body), (status, _, answer) in zip(posts, answers, strict=True)
        if status == 200
        and (difference := compare_answer(path, body, answer, served.recording.direct))
    ]
    return {
        "requests": len(posts),
        "status_200": statuses.count(200),
        "calls_checked": served.recording.checked,
        "http_differs_from_direct": len(wrong),
        "score_differs_from_direct_or_repeat": len(served.recording.differences),
        "first_differences": (wrong + served.recording.differences)[:3],
        "swap_requests": swap["requests"],
        "swap_differs": swap["differs"],
        "swap_freed_mib": swap["freed_mib"],
        "inference_threads": len(served.recording.threads),
    }


def _swap(engine: Any) -> dict[str, Any]:
    """Score with the tower, drop it as startup does, score again."""
    requests = [
        systemone(seed, words, 1 + seed % 16)
        for seed, words in zip(range(SWAPPED), (20, 200, 900, 2500) * 10, strict=True)
    ]
    before = [engine.score(request)[0] for request in requests]
    held = engine.memory()["allocated_mib"] or 0
    warmup.drop_vision(engine._torch, engine._forward.wrapped)
    engine._memory.release()
    after = [engine.score(request)[0] for request in requests]
    pairs = zip(before, after, strict=True)
    differs = [warmup.find_difference(old, new) for old, new in pairs]
    return {
        "requests": len(requests),
        "differs": sum(difference is not None for difference in differs),
        "freed_mib": round(held - (engine.memory()["allocated_mib"] or 0), 1),
    }


def compare_answer(
    path: str, body: dict[str, Any], answer: Any, direct: dict[str, Any]
) -> Difference:
    """Name where an HTTP answer is not what predict() gave for its calls."""
    if path == "/v1/systemone":
        request = {"state": body["state"], "questions": body["questions"]}
        expected = {**direct[json.dumps(request)], "model": answer["model"]}
        return warmup.find_difference(_plain(expected), answer)
    if path == "/decide":
        one = validation.parse_decide(body, max_decisions=64)
        calls = mapping.plan_calls(one.state, (one.decision,))
        results = answer["orderings"] if "orderings" in answer else [answer]
    else:
        many = validation.parse_shared(body, max_decisions=64)
        calls = mapping.plan_calls(many.state, many.decisions)
        results = answer["results"]
    for result in results:
        call = calls[result["call"]["index"]]
        native = direct[json.dumps(call.request)]["answers"][result["call"]["field"]]
        listed = [native["probabilities"][name] for name in result["option_ids"]]
        expected = {"native": native, "probabilities": listed}
        found = {name: result[name] for name in expected}
        difference = warmup.find_difference(_plain(expected), found)
        if difference is not None:
            return difference
    return None


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def measure_service(options: Options) -> dict[str, Any]:
    """Contract's latency shapes, then a soak."""
    served = Served(options, MAX_QUEUE="64")
    return {
        "latency": _measure_latency(served),
        "soak": _measure_soak(served),
        "inference_threads": len(served.recording.threads),
    }


def measure_throughput(options: Options) -> dict[str, Any]:
    """8 clients against the bare predict() loop."""
    served = Served(options, MAX_QUEUE="64")
    return {
        "long": _measure_throughput(served, LONG_TOKENS, each=12),
        "short": _measure_throughput(served, SHORT_TOKENS, each=60),
    }


def _measure_latency(served: Served) -> list[dict[str, Any]]:
    def binary_over(words: int, decisions: int) -> dict[str, Any]:
        body = shared(5, words, decisions, 2)
        for asked in body["decisions"]:
            asked["options"] = [
                {"id": name, "description": text} for name, text in CRITERIA.items()
            ]
        return body

    state = fit(served.count_tokens, lambda words: systemone(5, words, 1), 3900)
    words = len(state["state"]["log"].split())
    shapes = {
        "21 binary criteria, short state": binary_over(60, 21),
        "16 criteria, 3,900-token state": binary_over(words, 16),
    }
    rows = []
    for name, body in shapes.items():
        posts = [("/decide/shared", body)] * (LATENCY_REPEATS + 2)
        out = run_client(served.url, served.token, posts, clients=1)["posts"][2:]
        timings = [answer["timing"] for _, _, answer in out]
        total = statistics.median(timing["total_seconds"] for timing in timings)
        inside = statistics.median(timing["inference_seconds"] for timing in timings)
        wall = statistics.median(seconds for _, seconds, _ in out)
        rows.append(
            {
                "shape": name,
                "input_tokens": timings[0]["input_tokens"],
                "wall_ms": round(wall * 1000, 1),
                "server_ms": round(total * 1000, 1),
                "inference_ms": round(inside * 1000, 1),
                "share_outside_inference": round(1 - inside / total, 3),
                "share_outside_of_wall": round(1 - inside / wall, 3),
            }
        )
    return rows


def _measure_throughput(
    served: Served, lengths: tuple[int, ...], *, each: int
) -> dict[str, Any]:
    """8 clients against the bare predict() loop, twice, in turn, in this process."""
    bodies = []
    for place, tokens in enumerate(lengths):
        sized = fit(
            served.count_tokens,
            lambda words, place=place: systemone(place, words, 1 + place % 3),
            tokens,
        )
        words = len(sized["state"]["log"].split())
        bodies += [
            systemone(100 * place + n, words, 1 + place % 3) for n in range(each)
        ]
    order = sorted(range(len(bodies)), key=lambda n: n % each)
    bodies = [bodies[n] for n in order]

    def bare(engine: Any) -> tuple[float, list[Any]]:
        started = time.perf_counter()
        responses = [engine._decision_engine.predict(body) for body in bodies]
        return time.perf_counter() - started, [r["answers"] for r in responses]

    posts = [("/v1/systemone", body) for body in bodies]
    served.on_inference_thread(
        bare
    )  # what new lengths cost (cuDNN's plans) is neither's
    run_client(served.url, served.token, posts[:16], clients=8)
    loop, clients, differs = [], [], 0
    for _ in range(2):
        seconds, direct = served.on_inference_thread(bare)
        loop.append(len(bodies) / seconds)
        out = run_client(served.url, served.token, posts, clients=8)
        clients.append(len(bodies) / out["seconds"])
        answers = [answer.get("answers") for _, _, answer in out["posts"]]
        pairs = zip(_plain(direct), answers, strict=True)
        differs += sum(one != other for one, other in pairs)
    return {
        "tokens": list(lengths),
        "requests": len(bodies),
        "bare_per_second": [round(rate, 2) for rate in loop],
        "served_per_second": [round(rate, 2) for rate in clients],
        "ratio": round(statistics.mean(clients) / statistics.mean(loop), 3),
        "answers_differ": differs,
    }


def _measure_soak(served: Served) -> dict[str, Any]:
    """Memory before, after each quarter and at the end of 1,000 mixed requests."""
    posts = mixed(SOAKED, 2500)
    readings = [{"requests": 0, **served.memory()}]
    statuses: dict[str, int] = {}
    quarter = SOAKED // 4
    for start in range(0, SOAKED, quarter):
        part = posts[start : start + quarter]
        out = run_client(served.url, served.token, part, clients=SOAK_CLIENTS)
        for status, _, _ in out["posts"]:
            statuses[str(status)] = statuses.get(str(status), 0) + 1
        readings.append({"requests": start + quarter, **served.memory()})
    return {"clients": SOAK_CLIENTS, "statuses": statuses, "readings": readings}
