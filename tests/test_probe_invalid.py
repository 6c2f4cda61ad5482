"""Each rule is broken on each path it holds on, and what is accepted is named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import TOKEN, FakeServer, serving

from intern_decision_serve import probe
from intern_decision_serve.probe.invalid import invalid_requests

BROKEN = list(invalid_requests(max_tokens=100, max_decisions=20))


def rules(path: str) -> set[str]:
    return {rule for rule, at, _ in BROKEN if at == path}


def test_no_request_breaks_two_rules_or_one_twice() -> None:
    assert len({(rule, path) for rule, path, _ in BROKEN}) == len(BROKEN)
    bodies = Counter((path, body) for _, path, body in BROKEN)
    assert set(bodies.values()) == {1}


@pytest.mark.parametrize(
    "rule",
    [
        "a number as id", "a number as question", "no id", "no question", "no state",
        "a workload", "an empty string as state", "an empty array as options",
        "no options", "17 options", "two options with one id",
        "all orderings of 5 options",
    ],
)  # fmt: skip
def test_a_rule_of_decisions_is_tried_on_both_paths(rule: str) -> None:
    assert rule in rules("/decide")
    assert rule in rules("/decide/shared")


def shared(mend: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """Mend each decision of a shared request, as a lenient server would read it."""

    def apply(document: Any) -> None:
        for decision in document.get("decisions", []):
            if isinstance(decision, dict):
                mend(decision)

    return apply


def without_workload(document: Any) -> None:
    document.pop("workload", None)


def with_state(document: Any) -> None:
    document["state"] = document.get("state") or "x"


def string_id(document: Any) -> None:
    if isinstance(document.get("id"), int):
        document["id"] = str(document["id"])


def with_id(decision: Any) -> None:
    decision.setdefault("id", "d")


def string_question(decision: Any) -> None:
    if isinstance(decision.get("question"), int):
        decision["question"] = str(decision["question"])


def with_options(decision: Any) -> None:
    if decision.get("options") == []:
        decision["options"] = [{"id": o, "description": ""} for o in "ab"]


def with_criteria(document: Any) -> None:
    for question in document["questions"].values():
        if question["type"] == "score" and not isinstance(
            question.get("criteria"), list
        ):
            question["criteria"] = ["cold", "hot"]


def choice_object(document: Any) -> None:
    for question in document["questions"].values():
        if question["type"] == "choice" and isinstance(question.get("criteria"), list):
            question["criteria"] = {name: name for name in question["criteria"]}


@pytest.mark.parametrize(
    ("path", "mend", "accepted"),
    [
        ("/decide", string_id, ["a number as id"]),
        ("/decide", string_question, ["a number as question"]),
        ("/decide/shared", without_workload, ["a workload", "a workload that is no"]),
        ("/decide/shared", with_state, ["no state", "an empty string as state"]),
        ("/decide/shared", shared(with_id), ["no id"]),
        ("/decide/shared", shared(with_options), ["an empty array as options"]),
        ("/v1/systemone", with_criteria, ["a score without criteria"]),
        ("/v1/systemone", choice_object, ["a choice with an array as criteria"]),
    ],
)
def test_what_a_lenient_server_accepts_is_named(
    path: str,
    mend: Callable[[Any], None],
    accepted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    answer = FakeServer.answer

    def lenient(self: FakeServer, at: str, document: Any) -> dict[str, Any]:
        if at == path and isinstance(document, dict):
            with_suppressed(mend, document)
        return answer(self, at, document)

    monkeypatch.setattr(FakeServer, "answer", lenient)
    with serving() as fake:
        assert probe.main([fake.url, "--sections", "limits"]) == 1
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    [check] = [
        check
        for check in document["sections"][0]["checks"]
        if check["outcome"] == "fail"
    ]
    assert check["rule"] == "422 for each rule"
    for rule in accepted:
        assert rule in check["seen"]
    assert f"on {path}: got 200" in check["seen"]


def with_suppressed(mend: Callable[[Any], None], document: Any) -> None:
    try:
        mend(document)
    except (KeyError, TypeError, AttributeError):
        pass  # broken otherwise: the fake refuses it
