"""Stand-ins for what the tests must not need: the model, torch, a device."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["fake_predict"]

TEMPERATURE = 1.99241824


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
