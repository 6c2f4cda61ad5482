"""What replay.py measures, section by section."""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import time
from typing import Any

from replayed import Post, Replayed, bases, recurring, vary
from served import Options, driver_mib
from shapes import Request, decide, fit, systemone

from intern_decision_serve import replay
from intern_decision_serve.errors import OutOfMemory
from tests.bench.client import TOKEN as BENCH_TOKEN
from tests.bench.generators import Load
from tests.bench.processes import start_load
from tests.bench.requests import BODIES

SHAPES = 40
REQUESTS = 500
RESTARTED = 120
REPEATED = 160
ROUNDS = 3
EACH = 30
ONCE = 80
REAL_SHAPES = 200
FLOOD_SECONDS = 6.0
MIB = 2**20


def measure_exact(options: Options) -> dict[str, Any]:
    """Every answer against the model's own: plain, evicting, after what fails."""
    served = Replayed(options, most=64)
    made = bases(SHAPES)
    posts = recurring(made, REQUESTS)
    rows = [served.check("the first 120", posts[:RESTARTED])]
    answers = _hash_answers(served)
    rows.append(served.check("the rest of 500", posts[RESTARTED:]))
    _bound(served, most=8)
    grouped = recurring(made, REPEATED, grouped=True)
    rows.append(served.check("at most 8 graphs", grouped, clients=1))
    _bound(served, most=64)
    rows.append(served.check("refilled", recurring(made, REPEATED)))
    exhausted = [_exhaust(served, tokens) for tokens in (4000, 8000)]
    rows.append(served.check("after an OOM", recurring(made, REPEATED)))
    broken = _break_capture(served)
    rows.append(served.check("after a broken capture", recurring(made, REPEATED)))
    return {
        "passes": rows,
        "out_of_memory": exhausted,
        "broken_capture": broken,
        "answers_sha256": answers,
        "inference_threads": len(served.recording.threads),
        "status": served.ask("/health")[1]["status"],
    }


def _bound(served: Replayed, *, most: int) -> None:
    def bound(engine: Any) -> None:
        if engine.replay is not None:
            engine.replay._most = most
            engine.replay.drop()

    served.on_inference_thread(bound)


def _hash_answers(served: Replayed) -> str:
    direct = served.watch.direct
    listed = [(request, direct[request]["answers"]) for request in sorted(direct)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _exhaust(served: Replayed, tokens: int) -> Request:
    """Ask for more than the card has left beside the graphs, once."""
    body = fit(served.count_tokens, lambda words: systemone(3, words, 1), tokens)
    request = {"state": body["state"], "questions": body["questions"]}

    def exhaust(engine: Any) -> Request:
        held = engine.graphs
        if held is None or not held["held"]:
            return {"tokens": tokens, "skipped": "no graphs are held"}
        cuda = engine._torch.cuda
        with engine._forward.eager():
            expected = engine._decision_engine.predict(request)["answers"]
        engine._memory.release()
        reserved, card = cuda.memory_reserved(), cuda.get_device_properties(0)
        cuda.set_per_process_memory_fraction((reserved + 32 * MIB) / card.total_memory)
        try:
            answers = engine.score(request)[0]["answers"]
            outcome = "scored" if answers == expected else "differs"
        except OutOfMemory:
            outcome = "503 out_of_memory"
        finally:
            cuda.set_per_process_memory_fraction(1.0)
        return {
            "tokens": tokens,
            "held_before": held["held"],
            "pool_mib_before": held["pool_mib"],
            "outcome": outcome,
            "held_after": engine.graphs["held"],
            "pool_mib_after": engine.graphs["pool_mib"],
        }

    result: Request = served.on_inference_thread(exhaust)
    served.post(recurring(bases(8), 24))  # something to drop for the next one
    return result


def _break_capture(served: Replayed) -> Request:
    """Read a value on the host inside a capture: CUDA breaks it off."""

    def plant(engine: Any) -> Any:
        cuda = engine._torch.cuda

        def read(module: Any, args: Any, kwargs: Any) -> None:
            if engine.graphs is not None and cuda.is_current_stream_capturing():
                kwargs["input_ids"].sum().item()

        model = engine._forward.wrapped
        return model.register_forward_pre_hook(read, with_kwargs=True)

    before = served.graphs()
    hook = served.on_inference_thread(plant)
    body = systemone(77, 333, 2)
    statuses = [status for status, _, _ in served.post([("/v1/systemone", body)] * 4)]
    served.on_inference_thread(lambda engine: hook.remove())
    after = served.graphs()
    served.on_inference_thread(lambda engine: engine._memory.release())
    return {
        "statuses": statuses,
        "refused": after.get("refusals", 0) - before.get("refusals", 0),
        "held_before": before.get("held"),
        "held_after": after.get("held"),
        "status": served.ask("/health")[1]["status"],
    }


def measure_restart(options: Options) -> dict[str, Any]:
    """The first requests of `exact` in a fresh process: equal, and the same answers."""
    served = Replayed(options, most=64)
    posts = recurring(bases(SHAPES), REQUESTS)[:RESTARTED]
    row = served.check("a fresh process", posts)
    return {"passes": [row], "answers_sha256": _hash_answers(served)}


def measure_speed(options: Options) -> dict[str, Any]:
    """With and without, in turn, in one process."""
    replay.LONGEST_TOKENS = 4096  # to see where replay stops winning
    replay.MOST_CREDIT_SECONDS = 1e6
    served = Replayed(options, most=64, CUDA_GRAPHS_MIB="8192")
    return {
        "http_medians": [
            _compare_http(served, name, posts)
            for name, posts in (
                ("300 tokens, 1 field", _sized(served, 300, 1)),
                ("750 tokens, 1 field", _sized(served, 750, 1)),
                ("750 tokens, 3 fields", _sized(served, 750, 3)),
            )
        ],
        "orderings": _compare_http(
            served,
            "/decide, orderings all, 24 calls",
            [("/decide", vary(decide(9, 120, 4, "all"), n)) for n in range(6)],
        ),
        "seen_once": _measure_once(served),
        "by_length": [
            _measure_length(served, tokens, fields)
            for tokens, fields in (
                (150, 1),
                (300, 1),
                (750, 1),
                (750, 3),
                (1000, 1),
                (1500, 1),
                (2000, 1),
                (2000, 16),
                (2500, 1),
                (3000, 1),
                (3500, 1),
                (4000, 1),
            )
        ],
        "graphs": served.graphs(),
    }


def _sized(served: Replayed, tokens: int, fields: int) -> list[Post]:
    body = fit(served.count_tokens, lambda words: systemone(5, words, fields), tokens)
    return [("/v1/systemone", vary(body, n)) for n in range(EACH)]


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


def _measure_once(served: Replayed) -> Request:
    """Shapes never seen: replay has to look, and does nothing."""
    ratios, hits = [], served.graphs().get("hits", 0)
    for fields in range(4, 4 + ROUNDS):
        posts = [
            ("/v1/systemone", systemone(n, 10 + 4 * n, fields)) for n in range(ONCE)
        ]
        medians = []
        for on in (None, False, True, False):  # the first round warms the shapes up
            served.turn(on=bool(on))
            out = served.post(posts)
            medians.append(statistics.median(taken for _, taken, _ in out))
        ratios.append(medians[2] / statistics.mean((medians[1], medians[3])))
    served.turn(on=True)
    return {
        "shapes": ONCE * ROUNDS,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
        "hits": served.graphs().get("hits", 0) - hits,
    }


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


def measure_memory(options: Options) -> dict[str, Any]:
    """200 shapes, each twice: graphs and pool within their bounds, the rest flat."""
    replay.MOST_CREDIT_SECONDS = 1e6  # captures are not rationed here
    served = Replayed(options, most=64)
    default = _fill(served, REAL_SHAPES)

    def narrow(engine: Any) -> None:
        if engine.replay is not None:
            engine.replay.drop()
            engine._memory.release()
            engine.replay._pool_bytes = 256 * MIB

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
            keys = ("captures", "refusals", "evictions", "held", "pool_mib")
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
    posts = _sized(served, 300, 1)
    for _ in range(3):
        served.post(posts[:4])
    unauthorized = Load("unauthorized", 8, 1000.0, FLOOD_SECONDS + 8)
    cases: list[tuple[str, list[Load], int]] = [
        ("1,000 401s a second", [unauthorized], 2),
        ("429s from 8 clients", [Load("busy", 8, 0.0, FLOOD_SECONDS + 8)], 32),
        ("/health 100 a second", [Load("health", 1, 100.0, FLOOD_SECONDS + 8)], 2),
        ("4 x 1 MiB not JSON", [_body_load()], 2),
    ]
    rows = [
        _beside(served, posts, name, loads, clients, on=True)
        for name, loads, clients in cases
    ]
    eager = _beside(served, posts, cases[0][0], cases[0][1], 2, on=False)
    return {"replayed": rows, "eager": eager, "graphs": served.graphs()}


def _body_load() -> Load:
    return Load("body", 4, 0.0, FLOOD_SECONDS + 8, next(iter(BODIES)))


def _beside(
    served: Replayed,
    posts: list[Post],
    name: str,
    loads: list[Load],
    clients: int,
    *,
    on: bool,
) -> Request:
    served.turn(on=on)
    before = _stream(served, posts, clients)
    running = start_load(served.url, *loads)
    time.sleep(1.0)
    beside = _stream(served, posts, clients)
    counts = [load.finish() for load in running]
    after = _stream(served, posts, clients)
    served.turn(on=True)
    quiet = statistics.mean((before, after))
    return {
        "load": name,
        "quiet_ms": round(quiet * 1000, 2),
        "beside_ms": round(beside * 1000, 2),
        "ratio": round(beside / quiet, 3),
        "statuses": counts[0]["statuses"],
        "a_second": round(counts[0]["requests_a_second"]),
    }


def _stream(served: Replayed, posts: list[Post], clients: int) -> float:
    """The median seconds of a call while so many clients send for some seconds."""
    watch = served.watch
    watch.seconds = []
    ended = threading.Event()
    timer = threading.Timer(FLOOD_SECONDS - 1, ended.set)
    timer.start()
    while not ended.is_set():
        served.post(posts * (4 if clients < 8 else 8), clients=clients)
    return statistics.median(watch.seconds)
