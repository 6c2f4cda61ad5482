"""The Jev surface: the request straight through, the response checked and named."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from fakes import fake_predict

from intern_decision_serve.errors import ScoringFailed
from intern_decision_serve.pins import DEFAULT_MODEL, FAMILY
from intern_decision_serve.systemone import build_answer, engine_request
from intern_decision_serve.validation import SystemOneRequest, parse_systemone

SERVED_AS = "Intern-Decision-4B@0e5e6aa7d6d750e2b1504ba11a8136cb58aeb3cd"
QUESTIONS: dict[str, Any] = {
    "route": {
        "type": "choice",
        "instructions": "Where to?",
        "criteria": {"billing": "money", "support": None},
    },
    "urgent": {"type": "noul", "instructions": None},
    "tone": {"type": "score", "criteria": ["calm", "tense", "angry"]},
    "risk": {"type": "score", "criteria": {"1": "low", "5": "high"}, "extra": [1]},
}


def make_request(**questions: Any) -> SystemOneRequest:
    return SystemOneRequest({"text": "hello"}, questions or QUESTIONS)


def test_the_engine_gets_state_and_questions_and_nothing_else() -> None:
    document = {
        "state": ["s"],
        "model": "jev-latest",
        "questions": QUESTIONS,
        "stream": True,
    }
    sent = engine_request(parse_systemone(document))
    assert sent == {"state": ["s"], "questions": QUESTIONS}
    assert sent["questions"] is QUESTIONS
    assert sent["state"] is document["state"]


def test_question_names_reach_the_engine_and_are_never_mapped_to_fields() -> None:
    names = [f"name {i}" for i in range(16)]
    request = make_request(**dict.fromkeys(names, QUESTIONS["urgent"]))
    assert list(engine_request(request)["questions"]) == names


def test_the_response_is_the_engines_own_but_for_the_model() -> None:
    request = make_request()
    response = fake_predict(engine_request(request))
    before = copy.deepcopy(response)
    body = build_answer(request, response, FAMILY[DEFAULT_MODEL].served_as)
    assert body == {**before, "model": SERVED_AS}
    assert body["answers"] is response["answers"]
    assert response == before
    assert list(body) == list(before)


def test_extra_fields_ride_along() -> None:
    request = make_request()
    response = fake_predict(engine_request(request))
    response["price"] = {"cents": 0}
    response["answers"]["route"]["note"] = "kept"
    body = build_answer(request, response, "m@r")
    assert body["price"] == {"cents": 0}
    assert body["answers"]["route"]["note"] == "kept"
    assert [body["timing"], body["calibration"], body["backend"]] == [
        response["timing"],
        response["calibration"],
        "hf",
    ]


@pytest.mark.parametrize("reported", ["absent", None, {}])
def test_usage_is_an_empty_object_when_the_engine_reports_none(reported: Any) -> None:
    request = make_request()
    response = fake_predict(engine_request(request))
    del response["usage"]
    if reported != "absent":
        response["usage"] = reported
    assert build_answer(request, response, "m@r")["usage"] == {}


def test_more_than_the_sixteen_options_of_decide_are_served() -> None:
    criteria = {f"o{i}": f"text {i}" for i in range(62)}
    request = make_request(q={"type": "choice", "criteria": criteria})
    response = fake_predict(engine_request(request))
    body = build_answer(request, response, "m@r")
    assert list(body["answers"]["q"]["probabilities"]) == list(criteria)


Spoil = Callable[[dict[str, Any]], object]
ANSWER = "the model's answer for "
BROKEN: list[tuple[Spoil, str]] = [
    (lambda a: a.pop("urgent"), "the model gave no answer for 'urgent'"),
    (lambda a: a.clear(), "the model gave no answer for 'route'"),
    (
        lambda a: a.update(more=a["urgent"]),
        "the model answered a question that was not asked",
    ),
    (lambda a: a.update(urgent=None), f"{ANSWER}'urgent' is missing or not an object"),
    (
        lambda a: a["route"]["probabilities"].pop("support"),
        f"{ANSWER}'route' has other options than its question",
    ),
    (
        lambda a: a["route"]["probabilities"].update(sales=0.0),
        f"{ANSWER}'route' has other options than its question",
    ),
    (
        lambda a: a["urgent"]["probabilities"].pop("no"),
        f"{ANSWER}'urgent' has other options than its question",
    ),
    (
        lambda a: a["tone"]["probabilities"].pop("2"),
        f"{ANSWER}'tone' has other options than its question",
    ),
    (
        lambda a: a["risk"]["probabilities"].update({"9": 0.0}),
        f"{ANSWER}'risk' has other options than its question",
    ),
    (
        lambda a: a["route"].update(type="noul"),
        f"{ANSWER}'route' has another type than its question",
    ),
    (
        lambda a: a["route"].update(choice="sales"),
        f"{ANSWER}'route' chose something not offered",
    ),
    (lambda a: a["urgent"].pop("noul"), "the model's response has no number at 'noul'"),
    (
        lambda a: a["tone"].update(score="1"),
        "the model's response has no number at 'score'",
    ),
    (
        lambda a: a["tone"].update(score=math.nan),
        "the model's response holds a non-finite number",
    ),
    (
        lambda a: a["risk"]["legend"].update({"1": [{"x": math.inf}]}),
        "the model's response holds a non-finite number",
    ),
    (
        lambda a: a["risk"].update(extra=object()),
        "the model's response holds something not JSON",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN)
def test_an_answer_that_does_not_fit_is_a_scoring_failure(
    spoil: Spoil, message: str
) -> None:
    request = make_request()
    response = fake_predict(engine_request(request))
    spoil(response["answers"])
    with pytest.raises(ScoringFailed) as caught:
        build_answer(request, response, "m@r")
    assert caught.value.message == message
    assert (caught.value.status, caught.value.code) == (500, "scoring_failed")


@pytest.mark.parametrize(
    "change",
    [
        {"answers": None},
        {"answers": []},
        {"usage": {"input_tokens": math.nan}},
        {"timing": {"inference_ms": math.inf}},
        {"calibration": {"temperature": -math.inf}},
        {"anything": [math.nan]},
    ],
)
def test_a_broken_envelope_is_a_scoring_failure(change: dict[str, Any]) -> None:
    request = make_request()
    response = {**fake_predict(engine_request(request)), **change}
    with pytest.raises(ScoringFailed):
        build_answer(request, response, "m@r")


@pytest.mark.parametrize("response", [None, [], "x", {}])
def test_a_response_that_is_no_answer_is_a_scoring_failure(response: Any) -> None:
    with pytest.raises(ScoringFailed):
        build_answer(make_request(), response, "m@r")


def test_an_unexpected_failure_is_a_scoring_failure() -> None:
    response = fake_predict(engine_request(make_request(q=QUESTIONS["route"])))
    request = make_request(q={"type": "choice"})  # no criteria to compare with
    with pytest.raises(ScoringFailed, match="could not be built"):
        build_answer(request, response, "m@r")


def test_a_failure_message_never_repeats_a_long_name() -> None:
    request = make_request(**{"n" * 9999: QUESTIONS["urgent"]})
    with pytest.raises(ScoringFailed) as caught:
        build_answer(request, {"answers": {}}, "m@r")
    assert caught.value.message == f"the model gave no answer for '{'n' * 60}'..."


def test_the_answer_is_strict_json() -> None:
    request = make_request()
    response = fake_predict(engine_request(request))
    body = build_answer(request, response, "m@r")
    assert json.loads(json.dumps(body, allow_nan=False)) == body
