"""The served engine with replay, watched: compared with eager calls, timed, toggled."""

from __future__ import annotations

import copy
import json
import random
import time
from typing import Any

from client import run_client
from served import Options, Served
from served_sections import compare_answer
from shapes import Request, decide, fit, shared, systemone

from intern_decision_serve.warmup import find_difference

Post = tuple[str, Request]


class Watch:
    """Between worker and engine: times each call and compares it with an eager one."""

    def __init__(self, served: Served) -> None:
        self.recording = served.recording
        self.engine = served.recording.engine
        self.is_checking = False
        self.direct: dict[str, Any] = {}
        self.differences: list[str] = []
        self.checked = 0
        self.shapes: set[tuple[int, int]] = set()
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def score(self, request: Request, prepared: Any = None) -> tuple[Any, str]:
        """Score; then predict() the same request on the model itself."""
        if "run" in request:
            scored: tuple[Any, str] = self.recording.score(request, prepared)
            return scored
        started = time.perf_counter()
        scored = self.engine.score(request, prepared)
        if "field 0" in request["questions"]:  # not the calls of a flood
            self.seconds.append(time.perf_counter() - started)
        if self.is_checking:
            with self.engine._forward.eager():
                direct = self.engine._decision_engine.predict(request)
            difference = find_difference(direct, scored[0])
            if difference is not None:
                self.differences.append(difference)
            self.direct[json.dumps(request)] = direct
            fields = len(request["questions"])
            self.shapes.add((direct["usage"]["input_tokens"], fields))
            self.checked += 1
        return scored


class Replayed(Served):
    """A service with graphs; `watch` sits where the worker has its engine."""

    def __init__(self, options: Options, *, most: int, **settings: str) -> None:
        ladder = "256,1024,2048" if options.device == "cuda" else "0"
        defaults = {"MAX_QUEUE": "64", "WARMUP_TOKENS": ladder}
        super().__init__(options, CUDA_GRAPHS=str(most), **{**defaults, **settings})
        self.watch = Watch(self)
        self.service.worker.engine = self.watch

    def turn(self, *, on: bool) -> None:
        """Let calls be replayed, or send all of them to the model."""

        def switch(engine: Any) -> None:
            engine._forward.is_eager = not on

        self.on_inference_thread(switch)

    def graphs(self) -> dict[str, Any]:
        """The counters as `/health` shows them."""
        return self.ask("/health")[1]["cuda_graphs"] or {}

    def post(self, posts: list[Post], *, clients: int = 1) -> list[Any]:
        """Send all from another process; status, seconds, answer of each."""
        out: list[Any] = run_client(self.url, self.token, posts, clients=clients)[
            "posts"
        ]
        return out

    def check(self, name: str, posts: list[Post], *, clients: int = 4) -> Request:
        """Send all and compare every answer with the model's own, bit for bit."""
        watch, before = self.watch, self.graphs()
        watch.is_checking, watch.checked = True, 0
        watch.differences, watch.shapes = [], set()
        answers = self.post(posts, clients=clients)
        watch.is_checking = False
        after = self.graphs()
        over_http = [
            difference
            for (path, body), (status, _, answer) in zip(posts, answers, strict=True)
            if status == 200
            and (difference := compare_answer(path, body, answer, watch.direct))
        ]
        counted = ("hits", "captures", "refusals", "evictions", "drops")
        return {
            "pass": name,
            "requests": len(posts),
            "status_200": sum(status == 200 for status, _, _ in answers),
            "calls": watch.checked,
            "shapes": len(watch.shapes),
            "differ_from_eager": len(watch.differences),
            "differ_over_http": len(over_http),
            **{key: after.get(key, 0) - before.get(key, 0) for key in counted},
            "held": after.get("held"),
            "pool_mib": after.get("pool_mib"),
            "first_differences": (watch.differences + over_http)[:2],
        }


def sized(served: Served, tokens: int, fields: int, count: int) -> list[Post]:
    """So many bodies of one shape: this many tokens, or just under."""
    body = fit(served.count_tokens, lambda words: systemone(5, words, fields), tokens)
    return [("/v1/systemone", vary(body, n)) for n in range(count)]


def vary(body: Request, seed: int) -> Request:
    """The same words of the state in another order: other tokens, the same number."""
    body = copy.deepcopy(body)
    text = body["state"] if isinstance(body["state"], str) else body["state"]["log"]
    first, *middle, last = text.split()
    random.Random(seed).shuffle(middle)
    text = " ".join((first, *middle, last))
    if isinstance(body["state"], str):
        body["state"] = text
    else:
        body["state"]["log"] = text
    return body


def bases(count: int) -> list[Post]:
    """So many request shapes over all endpoints, of some 100 to 2,500 tokens."""
    sizes = (20, 45, 80, 130, 200, 300, 450, 700, 1000, 1400)
    made: list[Post] = []
    for place in range(count):
        words = sizes[(place // 4) % len(sizes)] + place
        kind = place % 4
        if kind == 0:
            made.append(("/decide", decide(place, words, 2 + place % 9, "none")))
        elif kind == 1:
            made.append(("/decide", decide(place, words, 3, "rotations")))
        elif kind == 2:
            made.append(("/decide/shared", shared(place, words, 2 + place % 15, 3)))
        else:
            made.append(("/v1/systemone", systemone(place, words, 1 + place % 7)))
    return made


def recurring(made: list[Post], count: int, *, grouped: bool = False) -> list[Post]:
    """So many requests over these shapes, in turn or shape after shape."""
    places = [n % len(made) for n in range(count)]
    if grouped:
        places.sort()
    return [(made[place][0], vary(made[place][1], n)) for n, place in enumerate(places)]
