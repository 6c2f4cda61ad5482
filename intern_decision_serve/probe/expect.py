"""What a caller relies on, as a file: recorded once, compared before each use.

A recorded file holds the server's version, pins, limits, the prompt's and the readout's
names, the hash of each answer to the fixed set, and latency ratios; never a time of its
own, since another machine's clock proves nothing. Each difference is one line that
names both sides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from .findings import Findings
from .fitting import OverLimits, answered, ask_fitting
from .foreign import to_json
from .results import answer_part
from .rows import canonical, digest
from .samples import FIXED_SET_VERSION, filler, fixed_set
from .session import SETTINGS, Probe, Reply
from .shapes import criteria, one_question

__all__ = ["NAME", "TITLE", "compare", "expect", "observe", "read_expected", "record"]

NAME = "expectation"
TITLE = "Expectation"

FORMAT = "intern-decision-serve expectation 1"
_TOLERANCE = 2.0  # a ratio may be so many times larger or smaller
_NAMES = ("prompt_version", "readout", "probability_status")
_RATIOS = {"long": "400 words over 40 words", "sixteen": "16 questions over 1"}
_ROUNDS = 7
_SECOND_LOOKS = 2  # at the ratios, before one is a difference
_LONG_WORDS = 400
_SHORT_WORDS = 40


def observe(probe: Probe) -> Reply:
    """Everything an expectation holds, as this server shows it now."""
    answers: Reply = {}
    names: Reply = {}
    probe.progress.step("expectation: the fixed questions")
    kept, left_out = answered(probe, fixed_set())
    for (name, path, _), reply in kept:
        answers[name] = {"sha256": digest(answer_part(reply)), "says": _says(reply)}
        if path == "/decide" and not names:
            names = {field: reply.get(field) for field in _NAMES}
    return {
        "format": FORMAT,
        "fixed_set": FIXED_SET_VERSION,
        "server_version": probe.health.get("version"),
        "pins": probe.health.get("model"),
        "limits": {
            name: probe.health[name] for name in SETTINGS if name in probe.health
        },
        "names": names,
        "answers": answers,
        "left_out": left_out,  # the fixed questions over the server's limits
        "ratios": _ratios(probe),
        "ratio_tolerance": _TOLERANCE,
    }


def _says(reply: Reply) -> Reply:
    """Each decision's top option and its probability, to name a difference with."""
    said: Reply = {}
    for one in reply.get("results", [reply]):
        one = one.get("combined", one) | {"id": one.get("id", "")}
        if "top" in one:
            said[one["id"]] = [one["top"], max(one["probabilities"])]
    for name, answer in reply.get("answers", {}).items():
        shares = answer["probabilities"]
        top = max(shares, key=shares.__getitem__)
        said[name] = [top, shares[top]]
    return said


def _ratios(probe: Probe) -> dict[str, float]:
    """Cost of length and of questions against the smallest call.

    The fastest of seven: neighbours on the machine only ever add time.
    """
    shapes = {
        "one": (one_question, _SHORT_WORDS),
        "long": (one_question, _LONG_WORDS),
        "sixteen": (criteria(16), _SHORT_WORDS),
    }
    fastest = dict.fromkeys(shapes, float("inf"))
    for number in range(_ROUNDS):
        for name, (build, words) in list(shapes.items()):
            probe.progress.step(f"expectation: timing round {number + 1} of {_ROUNDS}")
            try:
                answer = ask_fitting(probe, *build(filler(words, next(probe.numbers))))
            except OverLimits:
                del shapes[name]
                continue
            fastest[name] = min(fastest[name], answer.seconds)
    return {
        title: fastest[name] / fastest["one"]
        for name, title in _RATIOS.items()
        if name in shapes and "one" in shapes
    }


def record(probe: Probe, findings: Findings, path: Path) -> None:
    """Write what this server shows now."""
    observed = observe(probe)
    findings.facts["recorded"] = observed
    path.write_text(to_json(observed), "utf-8")
    findings.check(
        "recorded what to expect", True, f"{len(observed['answers'])} answers"
    )


def read_expected(path: Path) -> Reply:
    """A recorded file, whole enough to compare; ValueError for anything else."""
    try:
        expected = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(expected, dict) or expected.get("format") != FORMAT:
        raise ValueError(f"{path} is not an expectation of this probe")
    if expected.get("fixed_set") != FIXED_SET_VERSION:
        raise ValueError(f"{path} was recorded with another fixed set: record it again")
    wrong = next(_wrong_parts(expected), None)
    if wrong is not None:
        raise ValueError(f"{path}: {wrong}")
    return expected


def _wrong_parts(expected: Reply) -> Iterator[str]:
    """What `compare` could not read, so that a hand-edited file is told as one."""
    for part in ("pins", "limits", "names", "answers", "ratios"):
        may_be_null = part in ("pins", "limits", "names")
        if not isinstance(expected.get(part, 0), dict | None if may_be_null else dict):
            yield f"{part} must be an object"
            return
    for name, answer in expected["answers"].items():
        if not _is_answer(answer):
            yield f"answer {name} must hold sha256 and what it says"
    for name, ratio in expected["ratios"].items():
        if not _is_number(ratio) or not 0 < ratio < math.inf:
            yield f"ratio {name} must be a number over 0"
    tolerance = expected.get("ratio_tolerance", _TOLERANCE)
    if not _is_number(tolerance) or not 1 <= tolerance < math.inf:
        yield "ratio_tolerance must be a number from 1 on"


def _is_answer(answer: object) -> bool:
    if not isinstance(answer, dict) or not isinstance(answer.get("says"), dict):
        return False
    return isinstance(answer.get("sha256"), str) and all(
        isinstance(said, list) and len(said) == 2 and _is_number(said[1])
        for said in answer["says"].values()
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def expect(probe: Probe, findings: Findings, expected: Reply) -> list[str]:
    """Compare the server with a recorded file; the differences, one line each."""
    observed = observe(probe)
    for _ in range(_SECOND_LOOKS):  # a neighbour's work passes, a slower server stays
        if any(_compare_ratios(expected, observed["ratios"])):
            observed["ratios"] = _ratios(probe)
    differences = list(compare(expected, observed))
    findings.facts["observed"] = observed
    findings.facts["differences"] = differences
    findings.check(
        "the server is as recorded",
        not differences,
        f"{len(differences)} differences" if differences else "no difference",
    )
    if differences:
        findings.table(
            "Differences", ("difference",), [(line,) for line in differences]
        )
    return differences


def compare(expected: Reply, observed: Reply) -> Iterator[str]:
    """Name each difference that a caller should know of."""
    if "server_version" in expected:
        yield from _compare_values(
            "server",
            {"version": expected["server_version"]},
            {"version": observed.get("server_version")},
        )
    for part, word in (("pins", "pin"), ("limits", "limit"), ("names", "name")):
        yield from _compare_values(word, expected[part] or {}, observed[part] or {})
    yield from _compare_answers(expected["answers"], observed["answers"])
    yield from _compare_ratios(expected, observed["ratios"])


def _compare_ratios(expected: Reply, ratios: Reply) -> Iterator[str]:
    tolerance = float(expected.get("ratio_tolerance", _TOLERANCE))
    for name, ratio in expected["ratios"].items():
        now = ratios.get(name)
        if now is None or not 1 / tolerance <= now / ratio <= tolerance:
            shown = "not measured" if now is None else f"{now:.2f}"
            yield (
                f"latency ratio {name}: expected {ratio:.2f}, within a factor of "
                f"{tolerance:g}, is {shown}"
            )


def _compare_values(word: str, expected: Reply, observed: Reply) -> Iterator[str]:
    for name in [*expected, *(name for name in observed if name not in expected)]:
        before, now = (_shown(side, name) for side in (expected, observed))
        if before != now:
            yield f"{word} {name}: expected {before}, is {now}"


def _shown(side: Reply, name: str) -> str:
    return canonical(side[name]) if name in side else "absent"


def _compare_answers(expected: Reply, observed: Reply) -> Iterator[str]:
    for name, before in expected.items():
        now = observed.get(name)
        if now is None:
            yield f"answer {name}: not asked"
        elif now["sha256"] != before["sha256"]:
            yield f"answer {name}: {_what_changed(before['says'], now['says'])}"


def _what_changed(before: Reply, now: Reply) -> str:
    """The largest change a person can read, or that only other fields changed."""
    moved = [
        f"{name} was {top!r}, is {now[name][0]!r}"
        for name, (top, _) in before.items()
        if name in now and now[name][0] != top
    ]
    if moved:
        return "; ".join(moved)
    steps = [
        (abs(now[name][1] - share), name)
        for name, (_, share) in before.items()
        if name in now and now[name][1] != share
    ]
    if steps:
        step, name = max(steps)
        return f"no top moved, {name} changed most: its probability by {step:.3g}"
    return "same tops and probabilities, but its hash differs (tokens or prompt)"
