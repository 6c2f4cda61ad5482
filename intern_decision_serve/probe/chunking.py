"""More than 16 questions: packed by the rule, answered as if asked chunk by chunk."""

from __future__ import annotations

from .findings import Findings
from .fitting import OverLimits, ask_fitting
from .results import (
    QUESTIONS_PER_CALL,
    answer_part,
    call_of,
    in_short,
    problems,
)
from .rows import Document
from .samples import criterion, filler
from .session import Probe, Reply, object_of

__all__ = ["NAME", "TITLE", "measure"]

NAME = "chunking"
TITLE = "Chunking"

_QUESTIONS = 40
_FEWER = (24, 16, 8, 4, 2, 1)


def measure(probe: Probe, findings: Findings) -> None:
    """One request of 40 criteria against the same criteria asked 16 at a time."""
    state = filler(60)
    everything = [criterion(number) for number in range(_QUESTIONS)]
    asked = _ask_most(probe, state, everything)
    if asked is None:
        findings.skip("chunking", "no request fits the server's limits")
        return
    whole, count = asked
    decisions = everything[:count]
    findings.conditions = f"{count} binary criteria over one short state."
    results: list[Reply] = whole["results"]
    _check_order(findings, decisions, results)
    _check_calls(findings, results, whole["timing"])
    if count <= QUESTIONS_PER_CALL:
        seen = f"no more than {count} questions fit the server's limits"
        findings.skip("chunked is as asked chunk by chunk", seen)
        return
    parts: list[Reply] = []
    for start in range(0, count, QUESTIONS_PER_CALL):
        probe.progress.step(f"chunking: questions from {start + 1} on their own")
        chunk = decisions[start : start + QUESTIONS_PER_CALL]
        body: Document = {"state": state, "decisions": chunk}
        parts += probe.ask("/decide/shared", body)["results"]
    _check_same(findings, results, parts)


def _ask_most(
    probe: Probe, state: str, decisions: list[Document]
) -> tuple[Reply, int] | None:
    """The answer to as many of the decisions as fit the server, and how many."""
    most = min(len(decisions), probe.limit("max_decisions", 64))
    for count in (most, *(smaller for smaller in _FEWER if smaller < most)):
        probe.progress.step(f"chunking: {count} questions in one request")
        body: Document = {"state": state, "decisions": decisions[:count]}
        try:
            answer = ask_fitting(probe, "/decide/shared", body)
        except OverLimits:
            continue
        return object_of("/decide/shared", answer), count
    return None


def _check_order(
    findings: Findings, decisions: list[Document], results: list[Reply]
) -> None:
    if len(results) != len(decisions):
        seen = f"{len(results)} results for {len(decisions)} decisions"
        findings.check("results come back in request order", False, seen)
        return
    found = [
        f"decision {place}: {text}"
        for place, (decision, result) in enumerate(zip(decisions, results, strict=True))
        for text in problems(decision, result)
    ]
    seen = in_short(found) or f"{len(results)} results"
    findings.check("results come back in request order", not found, seen)


def _check_calls(findings: Findings, results: list[Reply], timing: Reply) -> None:
    """`call` and `timing` against the packing rule, worked out here."""
    count = len(results)
    wanted = [call_of(place, count) for place in range(count)]
    found = [
        f"decision {place} says {result['call']}, is in {call}"
        for place, (result, call) in enumerate(zip(results, wanted, strict=True))
        if result["call"] != call
    ]
    seen = in_short(found) or f"{count} results"
    findings.check("call says index, field and questions truly", not found, seen)
    starts = range(0, count, QUESTIONS_PER_CALL)
    sizes = [min(count - start, QUESTIONS_PER_CALL) for start in starts]
    tokens = [results[start]["input_tokens"] for start in starts]
    said = {
        name: timing.get(name)
        for name in ("batch_size", "calls", "questions_per_call", "input_tokens")
    }
    right = {
        "batch_size": count,
        "calls": len(sizes),
        "questions_per_call": sizes,
        "input_tokens": tokens,
    }
    findings.facts["timing"] = said
    seen = ", ".join(f"{name} {value}" for name, value in said.items())
    findings.check("timing counts the calls", said == right, seen)


def _check_same(findings: Findings, whole: list[Reply], parts: list[Reply]) -> None:
    """Everything but the call's place must be the same, bit for bit."""
    pairs = list(zip(whole, parts, strict=True))
    changed = [one["id"] for one, other in pairs if _answer(one) != _answer(other)]
    distinct = len({str(one["probabilities"]) for one in whole})
    findings.facts["compared"] = {
        "questions": len(pairs),
        "different": len(changed),
        "distinct_answers": distinct,
    }
    findings.check(
        "chunked is as asked chunk by chunk",
        not changed,
        in_short(map(str, changed))
        or f"{len(pairs)} answers identical, {distinct} distinct",
    )


def _answer(result: Reply) -> object:
    """A result without its place among calls: the index differs by construction."""
    call = {name: v for name, v in result["call"].items() if name != "index"}
    return answer_part({**result, "call": call})
