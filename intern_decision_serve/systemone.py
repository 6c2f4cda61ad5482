"""The Jev surface: the request goes to predict() as it came, the answer is checked.

Pure. It never goes through `mapping`, never splits a request, and changes nothing of
the engine's response but `model` (Surface 1).
"""

from __future__ import annotations

from typing import Any

from .answers import check_answer, fail_as_scoring, read_answers
from .document import quote
from .errors import ScoringFailed
from .validation import SystemOneRequest

__all__ = ["build_answer", "engine_request"]


def engine_request(request: SystemOneRequest) -> dict[str, Any]:
    """Return the request for predict(): state and questions, nothing else."""
    return {"state": request.state, "questions": request.questions}


@fail_as_scoring
def build_answer(
    request: SystemOneRequest, response: dict[str, Any], model: str
) -> dict[str, Any]:
    """Return the engine's response with `model` as a string, or raise ScoringFailed.

    Every question must have its answer and every option its probability, all finite
    (Surface 10). Extra fields ride along; a missing `usage` is `{}`.
    """
    answers = read_answers(response, request.questions.keys())
    for name, question in request.questions.items():
        check_answer(answers[name], name, question["type"], _option_names(question))
        if question["type"] == "score":
            _check_score_count(answers[name], name, question)
    usage = response.get("usage")
    return {**response, "usage": {} if usage is None else usage, "model": model}


def _option_names(question: dict[str, Any]) -> list[str] | None:
    """The options the answer must have; how a score names them is the engine's."""
    if question["type"] == "choice":
        return list(question["criteria"])
    return ["no", "yes"] if question["type"] == "noul" else None


def _check_score_count(
    answer: dict[str, Any], name: str, question: dict[str, Any]
) -> None:
    if len(answer["probabilities"]) != len(question["criteria"]):
        raise ScoringFailed(
            f"the model's answer for {quote(name)} has other options than its question"
        )
