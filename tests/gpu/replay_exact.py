"""Sections `exact` and `restart`: every answer against the model's own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from replayed import Replayed, bases, recurring
from served import Options
from shapes import Request, fit, systemone

from intern_decision_serve.errors import OutOfMemory

SHAPES = 40
REQUESTS = 500
RESTARTED = 120
REPEATED = 160
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
        replay = engine._forward.replay
        if replay is not None:
            replay._most = most
            replay.drop()

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
    """Read a value on the host inside a capture: CUDA breaks it off, replay ends."""

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
    served.on_inference_thread(lambda engine: engine.after_answer())  # credit or not
    served.on_inference_thread(lambda engine: hook.remove())
    served.on_inference_thread(lambda engine: engine._memory.release())
    health = served.ask("/health")[1]
    return {
        "statuses": statuses,
        "held_before": before.get("held"),
        "graphs_after": health["cuda_graphs"],
        "status": health["status"],
    }


def measure_restart(options: Options) -> dict[str, Any]:
    """The first requests of `exact` in a fresh process: equal, and the same answers."""
    served = Replayed(options, most=64)
    posts = recurring(bases(SHAPES), REQUESTS)[:RESTARTED]
    row = served.check("a fresh process", posts)
    return {"passes": [row], "answers_sha256": _hash_answers(served)}
