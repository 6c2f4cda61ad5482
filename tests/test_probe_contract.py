"""An answer that is not the contract's is named, whatever it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import TOKEN, FakeServer, serving

from intern_decision_serve import probe
from intern_decision_serve.probe.contract import answer_problems

Spoil = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


def failures(url: str, section: str) -> dict[str, str]:
    always = ["--seconds", "0.02", "--repeats", "1", "--sections", section]
    probe.main([url, *always])
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    return {
        check["rule"]: check["seen"]
        for found in document["sections"]
        for check in found["checks"]
        if check["outcome"] == "fail"
    }


def spoiled(
    monkeypatch: pytest.MonkeyPatch, path: str, spoil: Spoil, only: str = ""
) -> None:
    """Change what the fake answers on a path, where `only` is in the request."""
    answer = FakeServer.answer

    def changed(self: FakeServer, at: str, document: object) -> dict[str, Any]:
        body = answer(self, at, document)
        if at == path and only in json.dumps(document):
            spoil(body)
        return body

    monkeypatch.setattr(FakeServer, "answer", changed)


def drop_question(body: dict[str, Any]) -> None:
    del body["answers"]["heat"]


def set_type(body: dict[str, Any]) -> None:
    body["answers"]["heat"]["type"] = "noul"


def set_shares(body: dict[str, Any]) -> None:
    body["answers"]["act"]["probabilities"] = {"close": 7.0, "wait": 0, "call": 0}
    body["answers"]["act"]["choice"] = "close"


def set_choice(body: dict[str, Any]) -> None:
    answer = body["answers"]["act"]
    shares = answer["probabilities"]
    answer["choice"] = min(shares, key=shares.__getitem__)


def drop_share(body: dict[str, Any]) -> None:
    del body["answers"]["heat"]["probabilities"]["0"]


def set_noul(body: dict[str, Any]) -> None:
    body["answers"]["alarm"]["noul"] = 1.5


def set_model(body: dict[str, Any]) -> None:
    body["model"] = {"name": "Fake"}


def drop_usage(body: dict[str, Any]) -> None:
    del body["usage"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_question, "answers ['act', 'alarm'] to questions"),
        (set_type, "heat: type is 'noul', not 'score'"),
        (set_shares, "act: probabilities sum to 7.0"),
        (set_choice, "act: choice is not the most probable"),
        (drop_share, "heat: the probabilities are not its criteria's"),
        (set_noul, "alarm: noul is 1.5"),
        (set_model, "model is {'name': 'Fake'}, not 'Fake@ffff"),
        (drop_usage, "it has another shape: KeyError: 'usage'"),
    ],
)
def test_a_wrong_systemone_answer_is_named(
    spoil: Spoil, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(monkeypatch, "/v1/systemone", spoil)
    with serving() as fake:
        found = failures(fake.url, "repeat")
    assert list(found) == ["every answer is the contract's"]
    assert found["every answer is the contract's"].startswith(
        "systemone, 3 questions: "
    )
    assert words in found["every answer is the contract's"]


def each_result(name: str, value: object) -> Spoil:
    def spoil(body: dict[str, Any]) -> None:
        for result in body.get("orderings", body.get("results", [body])):
            result[name] = value

    return spoil


CONTROL = {
    "every result is the contract's",
    "every rotated row's result is the contract's",
}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", {"name": "Fake", "revision": "e" * 40}, "model is not /health's"),
        ("prompt_sha256", "the prompt", "prompt_sha256 is no sha256"),
        ("calibration", None, "calibration is None"),
        ("readout", "", "readout is ''"),
        ("prompt_version", None, "prompt_version is None"),
        ("model", None, "model is None"),
    ],
)
def test_a_result_that_names_nothing_or_another_is_named(
    name: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(monkeypatch, "/decide", each_result(name, value))
    with serving() as fake:
        found = failures(fake.url, "control")
    assert set(found) == CONTROL
    assert all(words in seen for seen in found.values())


def test_one_prompt_sha256_for_every_prompt_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoiled(monkeypatch, "/decide", each_result("prompt_sha256", "a" * 64))
    with serving() as fake:
        found = failures(fake.url, "control")
    [(rule, seen)] = found.items()
    assert rule == "every rotated row's result is the contract's"
    assert "prompt_sha256 is that of the row as it was" in seen


def test_the_answers_of_the_negative_control_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # "help with using it" stands first only where the descriptions are rotated
    first = '"options": [{"id": "refund", "description": "help'
    spoiled(monkeypatch, "/decide", each_result("top", []), first)
    with serving() as fake:
        found = failures(fake.url, "control")
    assert found == {
        "every rotated row's result is the contract's": (
            "built-in-01: top is not native's choice"
        )
    }


def shift_combined(body: dict[str, Any]) -> None:
    for result in body.get("results", [body]):
        if "combined" in result:
            result["combined"]["probabilities"].reverse()


@pytest.mark.parametrize(
    ("path", "only", "rule"),
    [
        (
            "/decide/shared",
            "rotations",
            "a mixed request is answered as the contract says",
        ),
        (
            "/decide",
            '"all"',
            "all gives every permutation, combined as the contract says",
        ),
    ],
)
def test_a_wrong_average_is_named_everywhere(
    path: str, only: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(monkeypatch, path, shift_combined, only)
    with serving() as fake:
        found = failures(fake.url, "orderings")
    assert list(found) == [rule]
    assert "combined.probabilities are not" in found[rule]


def swap_orderings(body: dict[str, Any]) -> None:
    body["orderings"][1] = body["orderings"][0]


def test_all_that_repeats_an_ordering_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, "/decide", swap_orderings, '"all"')
    with serving() as fake:
        found = failures(fake.url, "orderings")
    assert list(found.values()) == ["built-in-03: the 24 orderings are not the all"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "stopping"}, "status is 'stopping', not 'ok'"),
        ({"max_questions_per_call": 64}, "max_questions_per_call is 64, not 16"),
        ({"workloads": ["x"]}, "workloads is ['x'], not []"),
        ({"chunking": None}, "chunking is None"),
    ],
)
def test_a_health_that_is_not_the_contracts_is_named(
    change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = FakeServer.health
    monkeypatch.setattr(FakeServer, "health", lambda self: health(self) | change)
    with serving() as fake:
        assert failures(fake.url, "limits") == {"/health is the contract's": words}


def test_more_server_seconds_than_there_were_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoiled(monkeypatch, "/decide", each_result("total_seconds", 50))
    with serving() as fake:
        found = failures(fake.url, "latency")
    assert set(found) == {
        f"the server's seconds are within this side's: {title}"
        for title in (
            "by prompt length, one question",
            "by clients asking at once, one short question",
        )
    }


@pytest.mark.parametrize("reply", [{}, {"results": None}, {"results": [{}]}])
def test_an_answer_of_another_shape_is_a_problem(reply: dict[str, Any]) -> None:
    body: dict[str, object] = {
        "state": "s",
        "decisions": [{"id": "d", "question": "q", "options": []}],
    }
    for path in ("/decide", "/decide/shared", "/v1/systemone"):
        sent = body if path == "/decide/shared" else {**body, "id": "d", "options": []}
        assert answer_problems(path, sent, reply, None)
