"""Stand-ins for what the tests must not need: the model, torch, a device."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["PROMPT_SHA256", "WAIT", "FakeEngine", "fake_predict"]

TEMPERATURE = 1.99241824
PROMPT_SHA256 = "5" * 64
KERNEL = {
    "implementation": "fla.ops.chunk_gated_delta_rule",
    "package": "fla-core",
    "version": "0.5.2",
    "fast": True,
}
WAIT = 20  # seconds until a test that hangs fails; nothing waits so long when well


class FakeEngine:
    """The engine's surface for the worker and the handlers, with hooks for tests.

    A cleared `gate` holds every call inside `score`; `script` is what the next calls
    raise (None: they answer); `predict` makes the answers. It records the thread and
    the request of every call, and how many were ever inside at once.
    """

    longest_token = 16

    def __init__(self) -> None:
        self.description: dict[str, Any] = {"name": "Fake", "revision": "0" * 40}
        self.kernels: dict[str, Any] = {"chunk_gated_delta_rule": dict(KERNEL)}
        self.warmup: dict[str, Any] = {"settle_calls": 2, "rungs": []}
        self.graphs: dict[str, Any] | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.script: deque[BaseException | None] = deque()
        self.predict: Callable[[dict[str, Any]], dict[str, Any]] = fake_predict
        self.refusal: BaseException | None = None
        self.records: list[tuple[int, dict[str, Any]]] = []
        self.most_inside = 0
        self.loaded_on = threading.get_ident()
        self._entered = threading.Semaphore(0)
        self._inside = 0

    def score(
        self, request: dict[str, Any], prepared: Any = None
    ) -> tuple[dict[str, Any], str]:
        """Answer, or raise what the script says, once the gate is open."""
        self._inside += 1
        self.most_inside = max(self.most_inside, self._inside)
        self.records.append((threading.get_ident(), request))
        self._entered.release()
        try:
            assert self.gate.wait(WAIT)
            failure = self.script.popleft() if self.script else None
            if failure is not None:
                raise failure
            return self.predict(request), PROMPT_SHA256
        finally:
            self._inside -= 1

    def wait_for_call(self) -> None:
        """Return once one more call than was waited for has begun."""
        assert self._entered.acquire(timeout=WAIT)

    def validate(self, request: dict[str, Any]) -> None:
        """Raise `refusal`, as the pinned validate_request would."""
        if self.refusal is not None:
            raise self.refusal

    def prepare(self, request: dict[str, Any]) -> None:
        """Nothing is encoded ahead."""

    def memory(self) -> dict[str, Any]:
        """No card."""
        return {"baseline_mib": 1, "allocated_mib": 2, "reserved_mib": 3, "peak_mib": 4}

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The requests scored so far, in order."""
        return [request for _, request in self.records]


def fake_predict(request: dict[str, Any]) -> dict[str, Any]:
    """Answer as the pinned predict() does, shape for shape; numbers from a hash.

    The same question over the same state gets the same answer whatever else is asked
    in the call, so tests can compare a request with its parts. Validates nothing.
    """
    text = json.dumps(request, ensure_ascii=True)
    count = len(request["questions"])
    answers = {
        field: _fake_answer(request["state"], question)
        for field, question in request["questions"].items()
    }
    return {
        "answers": answers,
        "usage": {
            "input_tokens": len(text),
            "output_tokens": count,
            "decision_count": count,
        },
        "timing": {"inference_ms": 10.5 + count},
        "calibration": {"method": "temperature-scaling", "temperature": TEMPERATURE},
        "model": "Intern-Decision-4B",
        "backend": "hf",
    }


def _fake_answer(state: Any, question: dict[str, Any]) -> dict[str, Any]:
    kind, criteria = question["type"], question.get("criteria")
    if kind == "noul":
        values = ["no", "yes"]
    elif isinstance(criteria, list):
        values = [str(place) for place in range(len(criteria))]
    else:
        values = list(criteria or {})
    weights = [_weigh(state, question, place) for place in range(len(values))]
    probabilities = {
        value: weight / sum(weights)
        for value, weight in zip(values, weights, strict=True)
    }
    decision = min(probabilities, key=lambda value: (-probabilities[value], value))
    answer: dict[str, Any] = {
        "type": kind,
        "probabilities": probabilities,
        "confidence": probabilities[decision],
        "source": "local",
        "decision": decision,
    }
    if kind == "choice":
        return {**answer, "choice": decision}
    if kind == "noul":
        return {**answer, "noul": probabilities["yes"]}
    texts = criteria if isinstance(criteria, list) else list((criteria or {}).values())
    expected = sum(float(value) * p for value, p in probabilities.items())
    return {
        **answer,
        "score": expected,
        "legend": dict(zip(values, texts, strict=True)),
    }


def _weigh(state: Any, question: dict[str, Any], place: int) -> int:
    digest = hashlib.sha256(json.dumps([state, question, place]).encode()).digest()
    return 1 + int.from_bytes(digest[:4], "big")
