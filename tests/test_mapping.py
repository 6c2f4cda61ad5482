"""semif-shaped decisions onto predict() calls, and its answers back, on a fake."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from fakes import fake_predict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from intern_decision_serve.errors import ScoringFailed
from intern_decision_serve.mapping import (
    Call,
    build_decide,
    build_shared,
    count_orderings,
    plan_calls,
)
from intern_decision_serve.validation import (
    DecideRequest,
    Decision,
    Option,
    SharedRequest,
)

# No test may fail because the machine was busy.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

STATE = {"ticket": "The invoice is wrong"}
LABELS = {
    "model": {"name": "m"},
    "prompt_version": "inference.py@c904e2c67ca0",
    "readout": "r",
    "probability_status": "s",
}
CALIBRATION = {"method": "temperature-scaling", "temperature": 1.99241824}

Predict = Callable[[dict[str, Any]], dict[str, Any]]


def make_decision(
    name: str = "d", options: str = "ab", orderings: str = "none"
) -> Decision:
    listed = tuple(Option(letter, f"text {letter}") for letter in options)
    return Decision(name, f"Which of {name}?", listed, orderings)


def make_plain(count: int) -> list[Decision]:
    return [make_decision(f"decision {i}") for i in range(count)]


def score(
    calls: tuple[Call, ...], predict: Predict = fake_predict
) -> list[tuple[dict[str, Any], str]]:
    return [(predict(call.request), f"sha of call {call.index}") for call in calls]


def decide(decision: Decision, predict: Predict = fake_predict) -> dict[str, Any]:
    calls = plan_calls(STATE, [decision])
    request = DecideRequest(STATE, decision)
    return build_decide(request, calls, score(calls, predict), LABELS, 1.5)


def share(decisions: list[Decision], predict: Predict = fake_predict) -> dict[str, Any]:
    calls = plan_calls(STATE, decisions)
    request = SharedRequest(STATE, tuple(decisions))
    return build_shared(request, calls, score(calls, predict), LABELS, 2.5)


def answer_with(probabilities: dict[str, float], top: str) -> dict[str, Any]:
    return {
        "type": "choice",
        "probabilities": probabilities,
        "confidence": probabilities[top],
        "source": "local",
        "decision": top,
        "choice": top,
    }


def predict_with(weigh: Callable[[str, int], float]) -> Predict:
    """A model whose p(option) is proportional to `weigh(id, place in the prompt)`."""

    def predict(request: dict[str, Any]) -> dict[str, Any]:
        response = fake_predict(request)
        for field, question in request["questions"].items():
            places = list(question["criteria"])
            weights = {key: weigh(key, places.index(key)) for key in places}
            total = math.fsum(weights.values())
            probabilities = {key: w / total for key, w in weights.items()}
            top = min(places, key=lambda key: (-probabilities[key], key))
            response["answers"][field] = answer_with(probabilities, top)
        return response

    return predict


# --- mapping ----------------------------------------------------------------------


def test_decide_sends_one_call_with_field_q_and_criteria_in_the_callers_order() -> None:
    [call] = plan_calls(STATE, [make_decision(options="zay")])
    expected = {
        "state": STATE,
        "questions": {
            "q": {
                "type": "choice",
                "instructions": "Which of d?",
                "criteria": {"z": "text z", "a": "text a", "y": "text y"},
            }
        },
    }
    assert json.dumps(call.request) == json.dumps(expected)
    assert call.index == 0


def test_shared_sends_q1_to_qn_over_the_shared_state() -> None:
    [call] = plan_calls(STATE, make_plain(3))
    assert call.request["state"] is STATE
    questions = call.request["questions"]
    assert list(questions) == ["q1", "q2", "q3"]
    assert [question["instructions"] for question in questions.values()] == [
        f"Which of decision {i}?" for i in range(3)
    ]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (1, [1]),
        (2, [2]),
        (16, [16]),
        (17, [16, 1]),
        (32, [16, 16]),
        (40, [16, 16, 8]),
        (64, [16] * 4),
    ],
)
def test_questions_are_packed_greedily_by_sixteen(count: int, sizes: list[int]) -> None:
    calls = plan_calls(STATE, make_plain(count))
    assert [len(call.request["questions"]) for call in calls] == sizes
    assert [call.index for call in calls] == list(range(len(sizes)))


def test_seventeen_questions_become_two_calls_and_the_last_is_q_of_call_1() -> None:
    results = share(make_plain(17))["results"]
    assert results[15]["call"] == {"index": 0, "field": "q16", "questions": 16}
    assert results[16]["call"] == {"index": 1, "field": "q", "questions": 1}


def test_forty_results_come_back_in_request_order_with_their_call_and_field() -> None:
    body = share(make_plain(40))
    results = body["results"]
    assert [each["id"] for each in results] == [f"decision {i}" for i in range(40)]
    assert [each["call"] for each in results] == [
        {"index": i // 16, "field": f"q{i % 16 + 1}", "questions": 16 if i < 32 else 8}
        for i in range(40)
    ]
    assert [each["prompt_sha256"] for each in results] == [
        f"sha of call {i // 16}" for i in range(40)
    ]


def test_decision_ids_never_appear_in_a_call() -> None:
    secret = "<decision> id-never-shown"
    options = (Option("a", "one"), Option("b", "two"))
    decisions = [
        Decision(f"{secret} {i}", "Which?", options, orderings)
        for i, orderings in enumerate(["none", "rotations", "all"])
    ]
    for call in plan_calls(STATE, decisions):
        assert "never-shown" not in json.dumps(call.request)


# --- results ----------------------------------------------------------------------


def test_a_plain_decide_result_is_the_whole_contract_body() -> None:
    native = answer_with({"b": 0.75, "a": 0.25}, "b")

    def predict(request: dict[str, Any]) -> dict[str, Any]:
        return {**fake_predict(request), "answers": {"q": native}}

    body = decide(make_decision(), predict)
    tokens = fake_predict(plan_calls(STATE, [make_decision()])[0].request)["usage"]
    expected = {
        "id": "d",
        "option_ids": ["a", "b"],
        "probabilities": [0.25, 0.75],
        "top": "b",
        "confidence": 0.75,
        "calibration": CALIBRATION,
        "native": native,
        "input_tokens": tokens["input_tokens"],
        "prompt_sha256": "sha of call 0",
        "prompt_version": "inference.py@c904e2c67ca0",
        "model": {"name": "m"},
        "readout": "r",
        "probability_status": "s",
        "call": {"index": 0, "field": "q", "questions": 1},
        "total_seconds": 1.5,
        "forward_seconds": 0.0115,
    }
    assert json.dumps(body) == json.dumps(expected)
    assert body["native"] is native


def test_a_shared_body_holds_plain_results_and_the_contract_timing() -> None:
    body = share(make_plain(18))
    calls = plan_calls(STATE, make_plain(18))
    assert list(body) == ["results", "timing"]
    assert "total_seconds" not in body["results"][0]
    assert "forward_seconds" not in body["results"][0]
    assert json.dumps(body["timing"]) == json.dumps(
        {
            "total_seconds": 2.5,
            "batch_size": 18,
            "calls": 2,
            "questions_per_call": [16, 2],
            "input_tokens": [
                fake_predict(call.request)["usage"]["input_tokens"] for call in calls
            ],
            "inference_seconds": (26.5 + 12.5) / 1000,
        }
    )


def test_every_number_is_passed_through_unchanged() -> None:
    decisions = make_plain(17)
    calls = plan_calls(STATE, decisions)
    scored = score(calls)
    before = copy.deepcopy(scored)
    request = SharedRequest(STATE, tuple(decisions))
    results = build_shared(request, calls, scored, LABELS, 0.0)["results"]
    assert scored == before
    for result in results:
        response, sha = scored[result["call"]["index"]]
        native = response["answers"][result["call"]["field"]]
        assert result["native"] is native
        assert result["top"] is native["choice"]
        assert result["confidence"] is native["confidence"]
        assert result["calibration"] is response["calibration"]
        assert result["input_tokens"] is response["usage"]["input_tokens"]
        assert result["prompt_sha256"] is sha
        assert (
            dict(zip(result["option_ids"], result["probabilities"], strict=True))
            == (native["probabilities"])
        )


# --- orderings --------------------------------------------------------------------

letters = st.integers(2, 16).map(lambda n: "ponmlkjihgfedcba"[:n])


def shown_orders(decision: Decision) -> list[str]:
    return [
        "".join(call.request["questions"]["q"]["criteria"])
        for call in plan_calls(STATE, [decision])
    ]


@given(letters)
def test_rotations_put_each_option_in_each_position_once(options: str) -> None:
    orders = shown_orders(make_decision(options=options, orderings="rotations"))
    assert orders[0] == options
    assert len(orders) == len(options)
    for place in range(len(options)):
        assert sorted(order[place] for order in orders) == sorted(options)


def test_rotations_shift_left_by_one() -> None:
    orders = shown_orders(make_decision(options="cab", orderings="rotations"))
    assert orders == ["cab", "abc", "bca"]


@pytest.mark.parametrize("options", ["ba", "cab", "dbca"])
def test_all_is_n_factorial_in_the_order_of_itertools(options: str) -> None:
    decision = make_decision(options=options, orderings="all")
    orders = shown_orders(decision)
    assert orders == ["".join(order) for order in permutations(options)]
    assert len(orders) == math.factorial(len(options)) == count_orderings(decision)


@given(st.lists(st.tuples(letters, st.sampled_from(["none", "rotations"]))))
def test_waves_never_repeat_a_decision_within_a_call(
    drawn: list[tuple[str, str]],
) -> None:
    decisions = [make_decision(str(i), *each) for i, each in enumerate(drawn)]
    calls = plan_calls(STATE, decisions)
    scored: list[tuple[int, int]] = []
    for call in calls:
        positions = [row.position for row in call.rows]
        assert positions == sorted(set(positions))
        assert len({row.wave for row in call.rows}) == 1
        scored += [(row.wave, row.position) for row in call.rows]
    assert scored == sorted(set(scored))
    assert len(scored) == sum(map(count_orderings, decisions))


def test_waves_restart_the_packing_and_the_fields() -> None:
    decisions = [*make_plain(16), make_decision("r", "abc", "rotations")]
    calls = plan_calls(STATE, decisions)
    assert [[row.wave for row in call.rows] for call in calls] == [
        [0] * 16,
        [0],
        [1],
        [2],
    ]
    assert [list(call.request["questions"]) for call in calls[1:]] == [["q"]] * 3


def test_a_mixed_request_keeps_plain_results_and_wave_0_equals_the_plain_request() -> (
    None
):
    plain = [make_decision(name, "abc") for name in "xyz"]
    mixed = [plain[0], make_decision("y", "abc", "all"), plain[2]]
    assert plan_calls(STATE, mixed)[0] == plan_calls(STATE, plain)[0]
    as_plain, as_mixed = share(plain), share(mixed)
    assert as_mixed["results"][0] == as_plain["results"][0]
    assert as_mixed["results"][2] == as_plain["results"][2]
    first = as_mixed["results"][1]["orderings"][0]
    assert first == {**as_plain["results"][1], "id": "y#o0"}
    assert as_mixed["timing"]["batch_size"] == 3 + 5
    assert as_mixed["timing"]["questions_per_call"] == [3, 1, 1, 1, 1, 1]


def test_an_averaged_result_is_the_whole_contract_body() -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        [first, _] = request["questions"]["q"]["criteria"]
        probabilities = {"a": 0.9, "b": 0.1} if first == "a" else {"a": 0.4, "b": 0.6}
        native = answer_with(probabilities, max(probabilities, key=probabilities.get))  # type: ignore[arg-type]
        return {**fake_predict(request), "answers": {"q": native}}

    body = decide(make_decision(orderings="rotations"), predict)
    orderings = body.pop("orderings")
    a, b = math.sqrt(0.9 * 0.4), math.sqrt(0.1 * 0.6)
    assert body == {
        "id": "d",
        "option_ids": ["a", "b"],
        "combined": {
            "method": "mean_log_probability",
            "orderings": 2,
            "probabilities": [
                pytest.approx(a / (a + b), rel=1e-15),
                pytest.approx(b / (a + b), rel=1e-15),
            ],
            "top": "a",
            "agreement": 0.5,
            "spread": {"a": {"min": 0.4, "max": 0.9}, "b": {"min": 0.1, "max": 0.6}},
        },
    }
    assert list(body["combined"]) == (
        ["method", "orderings", "probabilities", "top", "agreement", "spread"]
    )
    assert [each["id"] for each in orderings] == ["d#o0", "d#o1"]
    assert [each["option_ids"] for each in orderings] == [["a", "b"], ["b", "a"]]
    assert [each["probabilities"] for each in orderings] == [[0.9, 0.1], [0.6, 0.4]]
    assert [each["top"] for each in orderings] == ["a", "b"]
    assert [each["call"]["index"] for each in orderings] == [0, 1]
    assert [each["prompt_sha256"] for each in orderings] == (
        ["sha of call 0", "sha of call 1"]
    )


@given(letters, st.data())
def test_a_position_bias_cancels_exactly(options: str, data: st.DataObject) -> None:
    weight = st.floats(1e-6, 1e6)
    bias = data.draw(st.lists(weight, min_size=16, max_size=16))
    decision = make_decision(options=options, orderings="rotations")
    combined = decide(decision, predict_with(lambda key, place: bias[place]))
    probabilities = combined["combined"]["probabilities"]
    assert probabilities == [probabilities[0]] * len(options)
    assert math.isclose(probabilities[0], 1 / len(options))
    assert combined["combined"]["top"] == options[0]


@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4), st.data())
def test_a_position_bias_leaves_the_unbiased_probabilities(
    base: list[float], data: st.DataObject
) -> None:
    bias = data.draw(st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=4))
    weights = dict(zip("dbca", base, strict=True))
    for orderings in ("rotations", "all"):
        decision = make_decision(options="dbca", orderings=orderings)
        body = decide(decision, predict_with(lambda k, place: weights[k] * bias[place]))
        expected = [weight / sum(base) for weight in base]
        assert body["combined"]["probabilities"] == pytest.approx(expected, rel=1e-9)


def test_agreement_and_spread_are_computed_from_the_orderings() -> None:
    body = decide(make_decision(options="dbca", orderings="all"))
    combined, orderings = body["combined"], body["orderings"]
    tops = [each["top"] for each in orderings]
    assert combined["orderings"] == len(orderings) == 24
    assert combined["agreement"] == tops.count(combined["top"]) / 24
    for option, limits in combined["spread"].items():
        seen = [each["native"]["probabilities"][option] for each in orderings]
        assert limits == {"min": min(seen), "max": max(seen)}
    assert list(combined["spread"]) == ["d", "b", "c", "a"]
    assert math.isclose(sum(combined["probabilities"]), 1)


def test_a_probability_of_zero_is_floored_before_the_log() -> None:
    body = decide(
        make_decision(options="ab", orderings="rotations"),
        predict_with(lambda key, place: 1.0 if key == "b" else 0.0),
    )
    combined = body["combined"]["probabilities"]
    assert combined == pytest.approx([1e-300, 1.0], rel=1e-9, abs=0)
    assert body["combined"]["top"] == "b"
    assert body["combined"]["spread"]["a"] == {"min": 0.0, "max": 0.0}
    json.dumps(body, allow_nan=False)


def test_a_tie_is_the_models_per_ordering_and_the_callers_when_combined() -> None:
    """Deltas 13."""
    decision = make_decision(options="zab", orderings="rotations")
    body = decide(decision, predict_with(lambda key, place: 1.0))
    assert [each["top"] for each in body["orderings"]] == ["a", "a", "a"]
    assert body["combined"]["top"] == "z"
    assert body["combined"]["agreement"] == 0.0
    plain = decide(make_decision(options="zab"), predict_with(lambda *_: 1.0))
    assert plain["top"] == "a"


def test_a_number_is_the_models_also_where_it_could_be_derived() -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        native = answer_with({"a": 0.75, "b": 0.25}, "b") | {"confidence": 0.5}
        return {**fake_predict(request), "answers": {"q": native}}

    body = decide(make_decision(), predict)
    assert (body["top"], body["confidence"]) == ("b", 0.5)
    assert body["probabilities"] == [0.75, 0.25]


# --- what must be a 500 -----------------------------------------------------------


def drop(*path: str) -> Callable[[Any], None]:
    def spoil(response: Any) -> None:
        for key in path[:-1]:
            response = response[key]
        del response[path[-1]]

    return spoil


def put(value: object, *path: str) -> Callable[[Any], None]:
    def spoil(response: Any) -> None:
        for key in path[:-1]:
            response = response[key]
        response[path[-1]] = value

    return spoil


Q = ("answers", "q")
BROKEN = [
    drop("answers"),
    drop(*Q),
    drop(*Q, "type"),
    drop(*Q, "probabilities"),
    drop(*Q, "probabilities", "a"),
    drop(*Q, "choice"),
    drop(*Q, "confidence"),
    drop("usage"),
    drop("usage", "input_tokens"),
    drop("calibration"),
    drop("timing"),
    drop("timing", "inference_ms"),
    put(None, "answers"),
    put([], "answers"),
    put({}, "answers"),
    put({}, "answers", "q2"),
    put(None, *Q),
    put("a", *Q),
    put("noul", *Q, "type"),
    put([0.5, 0.5], *Q, "probabilities"),
    put(0.0, *Q, "probabilities", "c"),
    put("0.5", *Q, "probabilities", "a"),
    put(True, *Q, "probabilities", "a"),
    put(None, *Q, "probabilities", "a"),
    put(-0.1, *Q, "probabilities", "a"),
    put(math.nan, *Q, "probabilities", "a"),
    put(math.inf, *Q, "confidence"),
    put("high", *Q, "confidence"),
    put("c", *Q, "choice"),
    put(None, *Q, "choice"),
    put(["a"], *Q, "choice"),
    put({"deep": [1, (2, -math.inf)]}, *Q, "extra"),
    put({math.nan: 1}, *Q, "extra"),
    put(object(), *Q, "extra"),
    put(b"bytes", *Q, "extra"),
    put(math.nan, "calibration", "temperature"),
    put("T", "calibration"),
    put("12", "usage", "input_tokens"),
    put(True, "usage", "input_tokens"),
    put(12.0, "usage", "input_tokens"),
    put(None, "usage"),
    put("fast", "timing", "inference_ms"),
    put(math.nan, "timing", "inference_ms"),
    put(None, "timing"),
]


@pytest.mark.parametrize("spoil", BROKEN)
@pytest.mark.parametrize("ask", [decide, lambda d, p: share([d], p)])
def test_an_answer_that_does_not_fit_is_a_scoring_failure(
    ask: Callable[[Decision, Predict], object], spoil: Callable[[Any], None]
) -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        response = fake_predict(request)
        spoil(response)
        return response

    with pytest.raises(ScoringFailed) as caught:
        ask(make_decision(), predict)
    assert (caught.value.status, caught.value.code) == (500, "scoring_failed")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize("response", [None, [], "text", 7])
def test_a_response_that_is_no_object_is_a_scoring_failure(response: Any) -> None:
    with pytest.raises(ScoringFailed):
        decide(make_decision(), lambda request: response)


def test_an_answer_missing_an_option_id_names_the_field() -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        response = fake_predict(request)
        del response["answers"]["q2"]["probabilities"]["a"]
        return response

    with pytest.raises(ScoringFailed, match="answer for 'q2' has other options"):
        share(make_plain(2), predict)


def test_a_wave_that_lost_its_answer_fails_the_whole_request() -> None:
    seen: list[int] = []

    def predict(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(1)
        answer = fake_predict(request)
        return answer if len(seen) < 3 else {**answer, "answers": {}}

    with pytest.raises(ScoringFailed, match="the model gave no answer for 'q'"):
        decide(make_decision(options="abc", orderings="rotations"), predict)


def test_missing_scores_and_labels_are_scoring_failures_with_a_logged_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decision = make_decision()
    calls = plan_calls(STATE, [decision])
    request = DecideRequest(STATE, decision)
    shared = SharedRequest(STATE, (decision,))
    for build in (
        lambda: build_decide(request, calls, [], LABELS, 1.0),
        lambda: build_decide(request, calls, score(calls), {}, 1.0),
        lambda: build_shared(shared, calls, score(calls) * 2, LABELS, 1.0),
    ):
        caplog.clear()
        with pytest.raises(ScoringFailed) as caught:
            build()
        assert str(caught.value) == (
            "the response could not be built from the model's answer"
        )
        assert "Traceback" in caplog.text
