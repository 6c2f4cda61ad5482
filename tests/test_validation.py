"""The 422 rules: strict JSON under bounds, then SemIf's rules field by field."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from intern_decision_serve.errors import InvalidRequest
from intern_decision_serve.validation import (
    DecideRequest,
    Decision,
    Option,
    SharedRequest,
    SystemOneRequest,
    count_orderings,
    parse_decide,
    parse_json,
    parse_shared,
    parse_systemone,
    rendered_size,
)

# No test may fail because the machine was busy.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

MAX_VALUES = 4 * 8192
OPTIONS = [{"id": "a", "description": "one"}, {"id": "b", "description": "two"}]


def make_decision(**changes: Any) -> dict[str, Any]:
    return {"id": "d", "question": "Which?", "options": OPTIONS, **changes}


def make_options(count: int) -> list[dict[str, Any]]:
    return [{"id": f"o{i}", "description": f"text {i}"} for i in range(count)]


def decide(document: object, max_decisions: int = 64) -> DecideRequest:
    return parse_decide(document, max_decisions=max_decisions)


def shared(document: object, max_decisions: int = 64) -> SharedRequest:
    return parse_shared(document, max_decisions=max_decisions)


def refusal(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        call(*args, **kwargs)
    assert (caught.value.status, caught.value.code) == (422, "invalid_request")
    assert len(caught.value.message) < 400
    return caught.value.message


def refused_json(body: bytes, max_values: int = MAX_VALUES) -> str:
    return refusal(parse_json, body, max_values=max_values)


# --- bytes -> JSON ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty, not JSON"),
        (b"\xef\xbb\xbf{}", "the body starts with a byte order mark"),
        (b'{"a":"\xff"}', "the body is not UTF-8: invalid start byte at byte 6"),
        (b'"\xed\xa0\xbd"', "the body is not UTF-8: invalid continuation byte"),
        ('{"a":1}'.encode("utf-16"), "the body is not UTF-8: invalid start byte"),
        ('{"a":1}'.encode("utf-16-le"), "the body is not JSON: Expecting property"),
        (b"   ", "the body is not JSON: Expecting value (character 3)"),
        (b"{}{}", "the body is not JSON: Extra data (character 2)"),
        (b'{"a":1', "the body is not JSON: "),
        (b"[1,]", "the body is not JSON: "),
        (b"'a'", "the body is not JSON: Expecting value (character 0)"),
        (b'"a\nb"', "the body is not JSON: Invalid control character at"),
        (b'"\\x"', "the body is not JSON: Invalid \\escape"),
        (b"[" * 200, "the body is nested over 100 levels"),
        (b"]" * 101 + b"[" * 101, "the body is not JSON: Expecting value"),
        (b"[" * 101 + b"]" * 500, "the body is not JSON: brackets do not match"),
        (b"[NaN]", "the body holds NaN, which is not JSON"),
        (b"[-Infinity]", "the body holds -Infinity, which is not JSON"),
        (b"Infinity", "the body holds Infinity, which is not JSON"),
        (b"1e400", "the body holds a number too large for a float"),
        (b"[-1e400]", "the body holds a number too large for a float"),
        (b"9" * 400 + b".5", "the body holds a number too large for a float"),
        (b"9" * 4301, "the body holds an integer of over 4300 digits"),
        (b"[-" + b"9" * 4301 + b"]", "the body holds an integer of over 4300 digits"),
        (b'{"a":1,"a":1}', "the body repeats the key 'a'"),
        (b'[{"x":{"b":1,"c":2,"\\u0062":3}}]', "the body repeats the key 'b'"),
        (b'"\\ud83d"', "the body holds a lone surrogate escape"),
        (b'"\\uDE00"', "the body holds a lone surrogate escape"),
        (b'"\\ud83d\\\\\\ude00"', "the body holds a lone surrogate escape"),
        (b'"\\ud83dx\\ude00"', "the body holds a lone surrogate escape"),
        (b'"\\ud83d\\ud83d\\ude00"', "the body holds a lone surrogate escape"),
        (b'"\\ud83d\\ude00\\ude00"', "the body holds a lone surrogate escape"),
        (b'{"a":{"\\ud83d":1}}', "the body holds a lone surrogate escape"),
    ],
)
def test_malformed_json_is_refused(body: bytes, message: str) -> None:
    assert refused_json(body).startswith(message)


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b' {"a" : [1, 2.5, -0, true, null, "x"]}\n',
        b'"\\ud83d\\ude00 \\uD83D\\uDE00"',
        b'"\\\\ud83d and \\\\\\\\ud83d"',
        b'{"\\ud83d\\ude00":1}',
        '"é 😀"'.encode(),
        b'"\\u0000"',
        b"9" * 4300,
        b"-" + b"9" * 4300,
        b"1e308",
        b'{"a":{"a":1},"b":{"a":1}}',
        b'"' + b"[" * 500 + b'\\"' + b"{" * 500 + b'"',
        b'"' + b"," * 50_000 + b'"',
    ],
)
def test_plain_json_is_accepted(body: bytes) -> None:
    assert parse_json(body, max_values=MAX_VALUES) == json.loads(body)


def test_a_long_key_is_cut_in_the_message() -> None:
    key = "k" * 5000
    body = f'{{"{key}":1,"{key}":2}}'.encode()
    assert refused_json(body) == f"the body repeats the key '{'k' * 60}'..."


def test_a_surrogate_key_can_be_named_in_a_message() -> None:
    message = refused_json(b'{"\\ud83d":1,"\\ud83d":2}')
    assert message == r"the body repeats the key '\ud83d'"
    message.encode()


@pytest.mark.parametrize("pair", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_nesting_of_100_passes_and_101_is_refused(pair: tuple[str, str]) -> None:
    opened, closed = pair
    levels = opened.count("[") + opened.count("{")
    fits = opened * (100 // levels) + "1" + closed * (100 // levels)
    assert parse_json(fits.encode(), max_values=MAX_VALUES) == json.loads(fits)
    assert refused_json(f"[{fits}]".encode()) == "the body is nested over 100 levels"


def test_the_depth_is_measured_not_the_number_of_brackets() -> None:
    siblings = b"[" + b"[]," * 200
    fits = siblings + b"[" * 99 + b"]" * 99 + b"]"
    assert parse_json(fits, max_values=MAX_VALUES) == json.loads(fits)
    deeper = siblings + b"[" * 100 + b"]" * 100 + b"]"
    assert refused_json(deeper) == "the body is nested over 100 levels"


def test_many_shallow_brackets_pass() -> None:
    body = json.dumps([[] for _ in range(5000)] + ["]" * 300, '"[{'])
    assert parse_json(body.encode(), max_values=MAX_VALUES) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 20_000 + b"]" * 20_000,
        b"[" * 20_000,
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b'{"state":"' + b'\\"' * 500 + b'",' + b'"a":[' * 20_000,
    ],
)
def test_deep_nesting_is_never_a_recursion_error(body: bytes) -> None:
    assert refused_json(body) == "the body is nested over 100 levels"


@pytest.mark.parametrize(
    "unit", [b"[],", b"{},", b"0,", b'"",', b'"\\"",', b'{"":""},']
)
def test_more_values_than_a_call_could_hold_are_refused(unit: bytes) -> None:
    body = b"[" + unit * 40_000 + b"0]"
    message = "the body holds too many values; at most 32768 are allowed"
    assert refused_json(body) == message


def test_the_bound_on_values_counts_containers_and_commas() -> None:
    body = b'[1,{"a":2,"b":[3,"x,[,{"]}]'  # 3 containers, 3 commas
    assert parse_json(body, max_values=6) == json.loads(body)
    assert refused_json(body, 5).startswith("the body holds too many values; at most 5")


def test_keys_and_strings_do_not_count_twice() -> None:
    body = json.dumps({f"key {i}": "a,b" for i in range(10)}).encode()
    assert parse_json(body, max_values=10) == json.loads(body)
    assert refused_json(body, 9).startswith("the body holds too many values; at most 9")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)

fragments = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\\\", b'"a"', b'"b":', b"1"]
    + [b"\\ud83d", b"\\ude00", b"ud800", b"NaN", b"1e999", b" ", b"\xff", b"\xc3\xa9"]
)


def accept(body: bytes) -> tuple[bool, Any]:
    try:
        return True, parse_json(body, max_values=1000)
    except InvalidRequest:
        return False, None


@given(st.binary() | st.lists(fragments).map(b"".join))
def test_arbitrary_bytes_raise_nothing_but_invalid_request(body: bytes) -> None:
    accepted, document = accept(body)
    if accepted:
        assert document == json.loads(body)
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


@given(json_values, st.booleans())
def test_every_document_of_finite_json_is_read_as_json_loads_reads_it(
    value: Any, ascii_only: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert accept(body) == (True, json.loads(body))


@given(st.lists(st.sampled_from([r"\ud83d", r"\ude00", r"\\", "x", r"\n", "ud83d"])))
def test_surrogates_are_refused_exactly_when_utf8_cannot_carry_them(
    parts: list[str],
) -> None:
    body = '"' + "".join(parts) + '"'
    try:
        json.loads(body).encode()
    except UnicodeEncodeError:
        assert not accept(body.encode())[0]
    else:
        assert accept(body.encode())[0]


# --- rules of both /decide endpoints ----------------------------------------------


def test_a_decide_request_is_read_as_written() -> None:
    document = {"state": {"k": 1}, "extra": 1, **make_decision(orderings="rotations")}
    options = (Option("a", "one"), Option("b", "two"))
    assert decide(document) == DecideRequest(
        {"k": 1}, Decision("d", "Which?", options, "rotations")
    )


def test_a_shared_request_keeps_request_order() -> None:
    document = {"state": " ", "decisions": [make_decision(id=i) for i in "zay"]}
    request = shared(document)
    assert request.state == " "
    assert [decision.id for decision in request.decisions] == ["z", "a", "y"]
    assert {decision.orderings for decision in request.decisions} == {"none"}


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": None},
        {"orderings": None},
        {"id": "<decision>"},
        {"id": "x\ny"},
        {"id": " ", "question": " "},
        {"options": [{"id": "", "description": ""}, {"id": " ", "description": ""}]},
        {"options": make_options(16)},
        {"unknown": object()},
        {"images": []},
    ],
)
def test_what_semif_allowed_is_allowed(changes: dict[str, Any]) -> None:
    decide({"state": "s", **make_decision(**changes)})


STATE_RULE = "state must be a nonempty string, object or array"
NONEMPTY_QUESTION = "question must be a nonempty string"

BAD_STATES = [
    ("", STATE_RULE),
    ({}, STATE_RULE),
    ([], STATE_RULE),
    (None, STATE_RULE),
    (0, STATE_RULE),
    (1, STATE_RULE),
    (1.5, STATE_RULE),
    (False, STATE_RULE),
    (True, STATE_RULE),
]

BAD_DECISIONS: list[tuple[dict[str, Any], str]] = [
    ({"id": ""}, "id must be a nonempty string"),
    ({"id": None}, "id must be a nonempty string"),
    ({"id": 7}, "id must be a nonempty string"),
    ({"question": ""}, NONEMPTY_QUESTION),
    ({"question": None}, NONEMPTY_QUESTION),
    ({"question": ["Which?"]}, NONEMPTY_QUESTION),
    ({"options": None}, "options must be an array"),
    ({"options": {"a": "one"}}, "options must be an array"),
    ({"options": []}, "options holds 0 options; 2 to 16 are allowed"),
    ({"options": OPTIONS[:1]}, "options holds 1 options; 2 to 16 are allowed"),
    ({"options": make_options(17)}, "options holds 17 options; 2 to 16 are allowed"),
    ({"options": [OPTIONS[0], "b"]}, "options[1] must be an object"),
    (
        {"options": [OPTIONS[0], {"id": 1, "description": "x"}]},
        "options[1].id must be a string",
    ),
    (
        {"options": [{"description": "x"}, OPTIONS[1]]},
        "options[0].id must be a string",
    ),
    ({"options": [{"id": "x"}, OPTIONS[1]]}, "options[0].description must be a string"),
    (
        {"options": [OPTIONS[0], {"id": "x", "description": None}]},
        "options[1].description must be a string",
    ),
    (
        {"options": [OPTIONS[0], {"id": "x", "description": {"k": 1}}]},
        "options[1].description must be a string",
    ),
    (
        {"options": [*OPTIONS, {"id": "a", "description": "three"}]},
        "options[2].id repeats options[0].id",
    ),
    ({"orderings": "ALL"}, "orderings must be none, rotations or all"),
    ({"orderings": ""}, "orderings must be none, rotations or all"),
    ({"orderings": True}, "orderings must be none, rotations or all"),
    ({"orderings": []}, "orderings must be none, rotations or all"),
    ({"orderings": {}}, "orderings must be none, rotations or all"),
    (
        {"options": make_options(5), "orderings": "all"},
        "orderings may be all only up to 4 options",
    ),
]


@pytest.mark.parametrize("document", [None, [], "x", 1, True])
@pytest.mark.parametrize("parse", [decide, shared, parse_systemone])
def test_a_body_that_is_no_object_is_refused(
    parse: Callable[[object], object], document: object
) -> None:
    assert refusal(parse, document) == "the body must be an object"


@pytest.mark.parametrize(("state", "message"), BAD_STATES)
def test_an_empty_or_scalar_state_is_refused_everywhere(
    state: object, message: str
) -> None:
    question = {"type": "noul", "instructions": "?"}
    for parse, rest in (
        (decide, make_decision()),
        (shared, {"decisions": [make_decision()]}),
        (parse_systemone, {"questions": {"q": question}}),
    ):
        assert refusal(parse, {"state": state, **rest}) == message
        assert refusal(parse, rest) == STATE_RULE


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400"])
def test_a_non_finite_state_is_refused(number: bytes) -> None:
    body = b'{"state":{"x":[%s]},"id":"d"}' % number
    assert refused_json(body).startswith("the body holds ")


@pytest.mark.parametrize(("changes", "message"), BAD_DECISIONS)
def test_a_bad_decision_is_refused_by_decide(
    changes: dict[str, Any], message: str
) -> None:
    assert refusal(decide, {"state": "s", **make_decision(**changes)}) == message


@pytest.mark.parametrize(("changes", "message"), BAD_DECISIONS)
def test_a_bad_decision_is_refused_by_shared_with_its_path(
    changes: dict[str, Any], message: str
) -> None:
    decisions = [make_decision(id="first"), make_decision(**changes)]
    message = "decisions[1]." + message.replace("repeats ", "repeats decisions[1].")
    assert refusal(shared, {"state": "s", "decisions": decisions}) == message


@pytest.mark.parametrize("workload", ["wyrd", "", 0, False, {}, []])
def test_any_workload_but_null_is_refused(workload: object) -> None:
    message = "workload is not supported: there is no workload table"
    plain = {"state": "s", "workload": workload, **make_decision()}
    several = {"state": "s", "workload": workload, "decisions": [make_decision()]}
    assert refusal(decide, plain) == message
    assert refusal(shared, several) == message


def test_duplicate_decision_ids_are_refused() -> None:
    decisions = [make_decision(id=name) for name in ("x", "y", "x")]
    message = refusal(shared, {"state": "s", "decisions": decisions})
    assert message == "decisions[2].id repeats decisions[0].id"


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        (None, "decisions must be an array"),
        ({"d": 1}, "decisions must be an array"),
        (["x"], "decisions[0] must be an object"),
        ([], "0 decisions to score; a request may score 1 to 64 orderings"),
        ([0] * 65, "65 decisions to score; a request may score 1 to 64 orderings"),
    ],
)
def test_a_bad_list_of_decisions_is_refused(decisions: object, message: str) -> None:
    assert refusal(shared, {"state": "s", "decisions": decisions}) == message


# --- orderings are counted, not built ---------------------------------------------


@pytest.mark.parametrize(
    ("orderings", "options", "count"),
    [("none", 16, 1), ("rotations", 16, 16), ("all", 2, 2), ("all", 4, 24)],
)
def test_orderings_are_counted(orderings: str, options: int, count: int) -> None:
    document = make_decision(orderings=orderings, options=make_options(options))
    assert count_orderings(decide({"state": "s", **document}).decision) == count


def test_sixteen_factorial_orderings_are_counted_not_built() -> None:
    options = tuple(Option(str(i), "") for i in range(16))
    assert count_orderings(Decision("d", "?", options, "all")) == math.factorial(16)
    document = make_decision(orderings="all", options=make_options(16))
    message = refusal(decide, {"state": "s", **document})
    assert message == "orderings may be all only up to 4 options"


def test_orderings_count_toward_the_cap() -> None:
    every = make_decision(orderings="all", options=make_options(4))
    decisions = [dict(every, id=f"d{i}") for i in range(3)]
    document = {"state": "s", "decisions": decisions}
    assert len(shared(document, 72).decisions) == 3
    message = "72 orderings to score; a request may score 1 to 71 orderings"
    assert refusal(shared, document, 71) == message
    message = "24 orderings to score; a request may score 1 to 23 orderings"
    assert refusal(decide, {"state": "s", **every}, 23) == message


# --- /v1/systemone ----------------------------------------------------------------


def make_questions(count: int) -> dict[str, Any]:
    return {f"n{i}": {"type": "noul", "instructions": "?"} for i in range(count)}


def test_a_systemone_request_passes_through_untouched() -> None:
    questions = {
        "c": {"type": "choice", "instructions": None, "criteria": {"a": None, "b": 1}},
        "s": {"type": "score", "criteria": ["low", "high"], "extra": True},
        "": {"type": "noul", "instructions": "x\nq2: y"},
    }
    document = {"state": ["s"], "questions": questions, "model": {"any": 1}, "x": 2}
    before = copy.deepcopy(document)
    request = parse_systemone(document)
    assert request == SystemOneRequest(["s"], questions)
    assert request.questions is questions
    assert document == before


def test_workload_and_max_decisions_are_not_of_systemone() -> None:
    document = {"state": "s", "workload": "w", "questions": make_questions(16)}
    assert len(parse_systemone(document).questions) == 16


@pytest.mark.parametrize("name", ["images", "assets"])
@pytest.mark.parametrize("value", [None, [], {}, "", ["/etc/hostname"], "x", False])
def test_images_are_refused_whatever_their_value(name: str, value: object) -> None:
    document = {"state": "s", "questions": make_questions(1), name: value}
    assert refusal(parse_systemone, document) == "images not supported"


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        (None, "questions must be an object"),
        ([], "questions must be an object"),
        ({}, "questions holds 0 questions; 1 to 16 are allowed"),
        (make_questions(17), "questions holds 17 questions; 1 to 16 are allowed"),
        ({"q": None}, "questions['q'] must be an object"),
        ({"q": "noul"}, "questions['q'] must be an object"),
        ({"q": {}}, "questions['q'].type must be choice, score or noul"),
        ({"q": {"type": "Noul"}}, "questions['q'].type must be choice, score or noul"),
        ({"q": {"type": ["noul"]}}, "questions['q'].type must be choice, score or"),
        ({"q": {"type": {}}}, "questions['q'].type must be choice, score or noul"),
        ({"q" * 999: 1}, f"questions['{'q' * 60}'...] must be an object"),
    ],
)
def test_bad_questions_are_refused(questions: object, message: str) -> None:
    document = {"state": "s", "questions": questions}
    assert refusal(parse_systemone, document).startswith(message)


@pytest.mark.parametrize("value", ["1.1e300", "-1.7976931348623157e308"])
def test_score_values_whose_expectation_may_overflow_are_refused(value: str) -> None:
    question = {"type": "score", "criteria": {"0": "low", value: "high"}}
    message = "questions['q'].criteria holds a value over 1e+300"
    document = {"state": "s", "questions": {"q": question}}
    assert refusal(parse_systemone, document) == message


@pytest.mark.parametrize(
    "criteria", [{"1e300": "", "-1e300": ""}, {"inf": ""}, {"x": ""}, ["x"], 7, None]
)
def test_all_other_score_criteria_are_left_to_the_engine(criteria: object) -> None:
    questions = {"q": {"type": "score", "criteria": criteria}}
    document = {"state": "s", "questions": questions}
    assert parse_systemone(document).questions == questions


# --- the rendered size -------------------------------------------------------------

states = json_values.filter(lambda v: isinstance(v, str | list | dict) and bool(v))


@given(states)
def test_rendered_size_is_a_lower_bound(state: Any) -> None:
    assert rendered_size(state) <= len(json.dumps(state, indent=2, ensure_ascii=False))


@pytest.mark.parametrize(
    "state", ["text", [1, "x", [True, {"a": {"bc": "d"}}]], {"a": [[["x"]]], "b": 1}]
)
def test_rendered_size_counts_indentation_exactly(state: Any) -> None:
    rendered = json.dumps(state, indent=2, ensure_ascii=False)
    slack = 3 if "true" in rendered else 0  # a scalar counts as one character
    assert rendered_size(state) == len(rendered) - slack


@pytest.mark.parametrize("value", [0, 7, -9, 10, 2**31, 10**4299, -(10**4300) + 1])
def test_rendered_size_counts_nearly_all_digits_of_an_integer(value: int) -> None:
    digits = len(str(value))
    assert digits - 2 - digits // 200 <= rendered_size([value]) - 6 <= digits


def test_rendered_size_sees_what_deep_nesting_blows_up() -> None:
    state: Any = [0] * 1000
    for _ in range(90):
        state = [state]
    assert rendered_size(state) == len(json.dumps(state, indent=2)) > 180_000
