"""Whether a whole answer is the contract's for the body that was sent; pure.

Each problem is a phrase; an answer of another shape is a problem, never an exception.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .averaging import averaged_problems, count_orderings
from .foreign import MISREAD
from .results import QUESTIONS_PER_CALL, call_of, problems
from .rows import Document
from .session import Reply

__all__ = ["answer_problems", "health_problems"]

_SUM_CLOSE = 1e-3  # the engine's own answers; it tells how it rounds them nowhere


def answer_problems(
    path: str, body: Document, reply: Reply, model: object
) -> list[str]:
    """What is wrong with a 200; `model` is `/health`'s, None where it has none."""
    try:
        if path == "/v1/systemone":
            return list(_systemone_problems(body, reply, model))
        if path == "/decide":
            return _results_problems([body], [reply], model)
        decisions = body["decisions"]
        assert isinstance(decisions, list)
        return _results_problems(decisions, reply["results"], model)
    except MISREAD as error:
        return [f"it has another shape: {type(error).__name__}: {error}"]


def _results_problems(
    decisions: list[Document], results: list[Reply], model: object
) -> list[str]:
    if len(results) != len(decisions):
        return [f"{len(results)} results for {len(decisions)} decisions"]
    found = []
    calls = _calls_of([count_orderings(decision) for decision in decisions])
    for place, (decision, result) in enumerate(zip(decisions, results, strict=True)):
        many = decision.get("orderings") in ("rotations", "all")
        judge = averaged_problems if many else problems
        texts = judge(decision, result, model=model)
        if not texts:
            said = [one["call"] for one in (result["orderings"] if many else [result])]
            wanted = calls[place]
            texts = [] if said == wanted else [f"call is {said}, not {wanted}"]
        found += [f"{decision['id']}: {text}" for text in texts]
    return found


def _calls_of(counts: list[int]) -> list[list[Document]]:
    """Each decision's calls, one per ordering, by waves and the packing rule."""
    calls: list[list[Document]] = [[] for _ in counts]
    before = 0
    for wave in range(max(counts, default=0)):
        places = [place for place, count in enumerate(counts) if count > wave]
        for number, place in enumerate(places):
            call = call_of(number, len(places))
            index = before + number // QUESTIONS_PER_CALL
            calls[place].append({**call, "index": index})
        before += math.ceil(len(places) / QUESTIONS_PER_CALL)
    return calls


def _systemone_problems(body: Document, reply: Reply, model: object) -> Iterator[str]:
    questions, answers = body["questions"], reply["answers"]
    assert isinstance(questions, dict)
    if set(answers) != set(questions):
        yield f"answers {sorted(answers)} to questions {sorted(questions)}"
    if not isinstance(reply["usage"], dict):
        yield "usage is no object"
    if isinstance(model, dict):
        named = f"{model.get('name')}@{model.get('revision')}"
        if reply["model"] != named:
            yield f"model is {reply['model']!r}, not {named!r}"
    elif not isinstance(reply["model"], str):
        yield "model is no string"
    for name in set(questions) & set(answers):
        texts = _native_problems(questions[name], answers[name])
        yield from (f"{name}: {text}" for text in texts)


def _native_problems(question: Document, answer: Reply) -> Iterator[str]:
    """One answer of the engine's own to one question."""
    kind = str(question["type"])
    if answer["type"] != kind:
        yield f"type is {answer['type']!r}, not {kind!r}"
        return
    criteria = question.get("criteria")
    shares = answer.get("probabilities")
    if kind == "noul":
        if not 0 <= answer["noul"] <= 1:
            yield f"noul is {answer['noul']}"
        if shares is None:  # the contract tells of none
            return
    elif kind == "choice":
        if set(shares or {}) != set(criteria if isinstance(criteria, dict) else ()):
            yield "the probabilities are not its criteria's"
        elif shares and shares.get(answer["choice"]) != max(shares.values()):
            yield "choice is not the most probable"
    elif not math.isfinite(answer["score"]):
        yield f"score is {answer['score']}"
    elif len(shares or {}) != len(
        criteria if isinstance(criteria, list | dict) else ()
    ):
        yield "the probabilities are not its criteria's"
    values = list((shares or {}).values())
    if not all(value >= 0 for value in values) or not math.isclose(
        math.fsum(values), 1, abs_tol=_SUM_CLOSE
    ):
        yield f"probabilities sum to {math.fsum(values)}"


def health_problems(health: Reply) -> list[str]:
    """What the contract says of `/health` of a server that serves."""
    found = []
    for name, wanted in (
        ("status", "ok"),
        ("max_questions_per_call", QUESTIONS_PER_CALL),
        ("workloads", []),
    ):
        if health.get(name) != wanted:
            found.append(f"{name} is {health.get(name)!r}, not {wanted!r}")
    for name in ("max_tokens", "max_decisions"):
        value = health.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found.append(f"{name} is {value!r}")
    if "vram_cap_gib" not in health:
        found.append("vram_cap_gib is not there")
    empty = [name for name in ("chunking", "model") if not health.get(name)]
    return found + [f"{name} is {health.get(name)!r}" for name in empty]
