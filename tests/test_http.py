"""The whole surface over a real socket: bodies, headers, and every error's bytes."""

from __future__ import annotations

import gzip
import logging
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import pytest
from fakes import PROMPT_SHA256, fake_predict
from running import DECIDE, OPTIONS, PINS, SYSTEMONE, RunningService, make_shared
from wire import TOKEN, Answer, Wire, make_request, until

from intern_decision_serve import __version__
from intern_decision_serve.connection import Connection, Deadlines
from intern_decision_serve.errors import (
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    ScoringFailed,
)
from intern_decision_serve.exchange import Exchange
from intern_decision_serve.handlers import Reply
from intern_decision_serve.jobs import Job, Result
from intern_decision_serve.pins import CHUNKING, READOUT

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Start = Callable[..., RunningService]

POSTS = {
    "/decide": DECIDE,
    "/decide/shared": make_shared(2),
    "/v1/systemone": SYSTEMONE,
}
HEADER_NAMES = {
    "server",
    "date",
    "content-type",
    "content-length",
    "x-request-id",
    "x-typesafe-request-id",
    "connection",
}


def error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


# --- answers ------------------------------------------------------------------------


def test_decide_answers_one_whole_result(service: RunningService) -> None:
    answer = service.post("/decide", DECIDE)
    assert answer.status == 200
    criteria = {"a": "one", "b": "two"}
    question = {"type": "choice", "instructions": "Which?", "criteria": criteria}
    (scored,) = service.engine.requests
    assert scored == {"state": "s", "questions": {"q": question}}
    assert list(scored["questions"]["q"]["criteria"]) == ["a", "b"]
    response = fake_predict(scored)
    native = response["answers"]["q"]
    document = answer.json
    assert document.pop("total_seconds") >= 0
    assert document == {
        "id": "d",
        "option_ids": ["a", "b"],
        "probabilities": [native["probabilities"][option] for option in "ab"],
        "top": native["choice"],
        "confidence": native["confidence"],
        "calibration": response["calibration"],
        "native": native,
        "input_tokens": response["usage"]["input_tokens"],
        "prompt_sha256": PROMPT_SHA256,
        "prompt_version": PINS.prompt_version,
        "model": service.engine.description,
        "readout": READOUT,
        "probability_status": PINS.probability_status,
        "call": {"index": 0, "field": "q", "questions": 1},
        "forward_seconds": response["timing"]["inference_ms"] / 1000,
    }


def test_shared_is_packed_into_calls_and_answers_in_request_order(
    service: RunningService,
) -> None:
    answer = service.post("/decide/shared", make_shared(40))
    assert answer.status == 200
    document = answer.json
    assert [result["id"] for result in document["results"]] == [
        f"d{number}" for number in range(40)
    ]
    places = [result["call"] for result in document["results"]]
    assert places[15:17] == [
        {"index": 0, "field": "q16", "questions": 16},
        {"index": 1, "field": "q1", "questions": 16},
    ]
    assert [len(each["questions"]) for each in service.engine.requests] == [16, 16, 8]
    timing = document["timing"]
    assert timing["questions_per_call"] == [16, 16, 8]
    assert (timing["batch_size"], timing["calls"]) == (40, 3)
    assert "d0" not in str(service.engine.requests)


def test_total_seconds_is_scoring_without_queueing(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Job.wait

    def wait_long(job: Job) -> Result:
        return replace(wait(job), queued_seconds=1000.0, scoring_seconds=7.0)

    monkeypatch.setattr(Job, "wait", wait_long)
    assert service.post("/decide", DECIDE).json["total_seconds"] == 7.0
    shared = service.post("/decide/shared", make_shared(2)).json
    assert shared["timing"]["total_seconds"] == 7.0


def test_systemone_goes_straight_to_the_engine_and_back(
    service: RunningService,
) -> None:
    questions = {
        "ok": {"type": "noul", "instructions": "?", "extra": 1},
        "kind": {
            "type": "choice",
            "instructions": None,
            "criteria": {"x": "", "y": ""},
        },
        "how": {"type": "score", "instructions": "?", "criteria": ["low", "high"]},
    }
    body = {"state": {"k": [1]}, "model": "jev-latest", "questions": questions, "x": 1}
    answer = service.post("/v1/systemone", body)
    assert answer.status == 200
    sent = {"state": {"k": [1]}, "questions": questions}
    assert service.engine.requests == [sent]
    assert list(service.engine.requests[0]["questions"]) == ["ok", "kind", "how"]
    assert answer.json == {**fake_predict(sent), "model": PINS.served_as}
    assert {"timing", "calibration", "backend"} <= answer.json.keys()


@pytest.mark.parametrize("model", [None, 7, {"a": 1}, "other", ["x"]])
def test_systemone_takes_any_model(service: RunningService, model: Any) -> None:
    answer = service.post("/v1/systemone", {**SYSTEMONE, "model": model})
    assert (answer.status, answer.json["model"]) == (200, PINS.served_as)


def test_systemone_without_a_usage_has_an_empty_one(service: RunningService) -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        response = fake_predict(request)
        del response["usage"]
        return response

    service.engine.predict = predict
    answer = service.post("/v1/systemone", SYSTEMONE)
    assert (answer.status, answer.json["usage"]) == (200, {})


def test_seventeen_systemone_questions_are_refused_and_never_split(
    service: RunningService,
) -> None:
    questions = {f"q{number}": {"type": "noul"} for number in range(17)}
    refused = service.post("/v1/systemone", {"state": "s", "questions": questions})
    assert (refused.status, refused.code) == (422, "invalid_request")
    assert "16" in refused.json["error"]["message"]
    assert service.engine.records == []
    del questions["q16"]
    assert (
        service.post("/v1/systemone", {"state": "s", "questions": questions}).status
        == 200
    )
    assert len(service.engine.requests[0]["questions"]) == 16


@pytest.mark.parametrize("name", ["images", "assets"])
@pytest.mark.parametrize("value", [None, [], {}, "", ["/etc/hostname"]])
def test_systemone_takes_no_images(
    service: RunningService, name: str, value: Any
) -> None:
    answer = service.post("/v1/systemone", {**SYSTEMONE, name: value})
    assert answer.status == 422
    assert answer.json == error("invalid_request", "images not supported")
    assert service.engine.records == []


def test_the_engines_own_refusal_is_a_422_before_the_call(
    service: RunningService,
) -> None:
    service.engine.refusal = InvalidRequest("duplicate field names")
    answer = service.post("/v1/systemone", SYSTEMONE)
    assert answer.status == 422
    assert answer.json == error("invalid_request", "duplicate field names")
    assert service.engine.records == []


# --- open documents -----------------------------------------------------------------


def test_health_is_open_and_says_everything(service: RunningService) -> None:
    service.post("/decide", DECIDE)
    until(lambda: service.outcomes)
    answer = service.get("/health", token=None)
    assert answer.status == 200
    document = answer.json
    assert list(document)[:8] == [
        "status",
        "model",
        "vram_cap_gib",
        "max_tokens",
        "max_decisions",
        "max_questions_per_call",
        "chunking",
        "workloads",
    ]
    assert document.pop("uptime_seconds") >= 0
    queue = document.pop("queue")
    assert queue.pop("median_call_ms") >= 0
    assert queue.pop("seconds_since_success") >= 0
    assert queue == {
        "admitted": 0,
        "scoring": False,
        "slots_free": 32,
        "running_seconds": None,
        "calls": 1,
    }
    assert document == {
        "status": "ok",
        "model": service.engine.description,
        "vram_cap_gib": None,
        "max_tokens": 8192,
        "max_decisions": 64,
        "max_questions_per_call": 16,
        "chunking": CHUNKING,
        "workloads": [],
        "endpoints": ["/decide", "/decide/shared", "/v1/systemone"],
        "systemone": {
            "max_questions": 16,
            "chunking": "none",
            "images": "not supported",
            "max_tokens": 8192,
        },
        "version": __version__,
        "accepting": True,
        "limits": {"max_queue": 32, "max_body_bytes": 1048576},
        "memory": service.engine.memory(),
        "kernels": service.engine.kernels,
        "warmup": service.engine.warmup,
        "cuda_graphs": None,
        "requests": {"ok": 1, "skipped": 0},
    }


def test_health_shows_the_limits_that_are_set(start_service: Start) -> None:
    service = start_service(
        max_tokens=100, max_decisions=3, max_queue=5, max_body_bytes=9, vram_cap_gib=9.5
    )
    document = service.get("/health").json
    assert document["max_tokens"] == document["systemone"]["max_tokens"] == 100
    assert (document["max_decisions"], document["vram_cap_gib"]) == (3, 9.5)
    assert document["limits"] == {"max_queue": 5, "max_body_bytes": 9}
    assert document["queue"]["slots_free"] == 5


def test_health_with_a_full_queue_is_ok_but_accepts_nothing(
    start_service: Start,
) -> None:
    service = start_service(max_queue=1)
    service.engine.gate.clear()
    with service.wire() as wire:
        wire.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        answer = service.get("/health")
        assert (answer.status, answer.json["status"]) == (200, "ok")
        assert answer.json["accepting"] is False
        queue = answer.json["queue"]
        assert (queue["admitted"], queue["slots_free"]) == (1, 0)
        assert queue["scoring"] is True
        assert queue["running_seconds"] >= 0
        service.engine.gate.set()
        assert wire.read().status == 200


def test_health_while_stopping_is_503(start_service: Start) -> None:
    service = start_service()
    service.worker.stop()
    answer = service.get("/health")
    assert (answer.status, answer.json["status"]) == (503, "stopping")
    assert answer.json["accepting"] is False


def test_health_with_a_lost_engine_is_503(service: RunningService) -> None:
    service.engine.script.append(EngineFailed("the engine is lost"))
    service.post("/decide", DECIDE)
    answer = service.get("/health")
    assert (answer.status, answer.json["status"]) == (503, "engine_failed")
    assert answer.json["accepting"] is False
    assert service.lost == 1


def test_the_model_list_is_behind_the_bearer(service: RunningService) -> None:
    refused = service.get("/v1/models", token=None)
    assert (refused.status, refused.code) == (401, "unauthorized")
    listed = service.get("/v1/models").json["models"]
    assert [entry["name"] for entry in listed] == ["jev-latest", PINS.served_as]
    for entry in listed:
        assert entry.keys() == {"name", "description", "release_date"}
        assert all(isinstance(value, str) for value in entry.values())


def test_the_openapi_document_is_open(service: RunningService) -> None:
    answer = service.get("/openapi.json", token=None)
    assert answer.status == 200
    assert answer.json["openapi"].startswith("3.")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/openapi.json", 200), ("/v1/models", 200), ("/nothing", 404)],
)
def test_head_is_get_without_the_body(
    service: RunningService, path: str, status: int
) -> None:
    with service.wire() as wire:
        got = wire.get(path)
        wire.send(make_request(path, method="HEAD"))
        head = wire.read(is_head=True)
        assert (got.status, head.status, head.body) == (status, status, b"")
        assert int(head.headers["content-length"]) == len(got.body) or path == "/health"
        assert head.headers["content-type"] == got.headers["content-type"]
        assert wire.get("/openapi.json").status == 200


# --- the contract's errors, whole ---------------------------------------------------

WRONG_TOKENS: list[str | None] = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    f"Basic {TOKEN}",
    TOKEN,
    f"Bearer {TOKEN}x",
    f"Bearer {TOKEN[:-1]}",
    f"Bearer {TOKEN} {TOKEN}",
    f"Bearer\t{TOKEN}",
    "Bearer caf\xe9",
    "Bearer " + "x" * 20_000,
    f"Bearer {TOKEN}, Bearer {TOKEN}",
]


@pytest.mark.parametrize("path", [*POSTS, "/nothing", "/health"])
@pytest.mark.parametrize("given", WRONG_TOKENS)
def test_any_post_without_the_right_bearer_is_401_and_never_scored(
    service: RunningService, path: str, given: str | None
) -> None:
    answer = service.post(path, DECIDE, token=None, headers={"Authorization": given})
    assert answer.status == 401
    assert answer.json == error("unauthorized", "missing or wrong bearer token")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.closes
    assert service.engine.records == []


def test_two_authorization_headers_are_401(service: RunningService) -> None:
    twice = f"Bearer {TOKEN}\r\nAuthorization: Bearer {TOKEN}"
    headers = {"Authorization": twice}
    assert service.post("/decide", DECIDE, headers=headers).code == "unauthorized"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_the_scheme_may_be_in_any_case(service: RunningService, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {TOKEN}"}
    assert service.post("/decide", DECIDE, headers=headers).status == 200


def chunked(data: bytes, size: int = 1000) -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return (
        b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    )


CHUNKED = {"Transfer-Encoding": "chunked", "Content-Length": None}


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b" " * 2001, {}, "the body is over 2000 bytes"),
        (b"", {"Content-Length": "2001"}, "the body is over 2000 bytes"),
        (b"", {"Content-Length": "9" * 5000}, "the body is over 2000 bytes"),
        (chunked(b" " * 2001), CHUNKED, "the body is over 2000 bytes"),
        (b"7d1\r\n", CHUNKED, "the body is over 2000 bytes"),
        (
            gzip.compress(b" " * 2001),
            {"Content-Encoding": "gzip"},
            "the decoded body is over 2000 bytes",
        ),
        (
            zstd.compress(b" " * 2_000_000),
            {"Content-Encoding": "zstd"},
            "the decoded body is over 2000 bytes",
        ),
    ],
)
def test_a_body_over_the_limit_is_413(
    start_service: Start, body: bytes, headers: dict[str, str | None], message: str
) -> None:
    service = start_service(max_body_bytes=2000)
    answer = service.post("/decide", body, headers=headers)
    assert answer.status == 413
    assert answer.json == error("request_too_large", message)
    assert service.engine.records == []
    until(lambda: service.admitted == 0)


def test_a_body_of_exactly_the_limit_is_read(start_service: Start) -> None:
    service = start_service(max_body_bytes=2000)
    for body, headers in [
        (b" " * 2000, {}),
        (chunked(b" " * 2000), CHUNKED),
        (gzip.compress(b" " * 2000), {"Content-Encoding": "gzip"}),
    ]:
        assert service.post("/decide", body, headers=headers).status == 422


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/decide", b"", "the body is empty, not JSON"),
        ("/decide", b"{", "the body is not JSON: "),
        ("/decide", b"\xff\xfe\x00", "the body is not UTF-8: "),
        ("/decide", b'{"a":"\xff"}', "the body is not UTF-8: "),
        ("/decide", b'{"a":1,"a":2}', "the body repeats the key 'a'"),
        ("/decide", b'{"a":NaN}', "the body holds NaN, which is not JSON"),
        ("/decide", b"9" * 5000, "the body holds an integer of over 4300 digits"),
        ("/decide", b"[" * 20_000 + b"]" * 20_000, "the body is nested over 100 "),
        ("/decide", b'{"state":"\\ud83d"}', "the body holds a lone surrogate escape"),
        ("/decide", [], ""),
        ("/decide", {**DECIDE, "state": ""}, ""),
        ("/decide", {**DECIDE, "workload": "x"}, ""),
        ("/decide", {**DECIDE, "options": OPTIONS[:1]}, ""),
        ("/decide", {**DECIDE, "options": OPTIONS * 2}, ""),
        ("/decide/shared", make_shared(0), ""),
        ("/decide/shared", make_shared(65), ""),
        ("/v1/systemone", {"state": "s", "questions": {}}, ""),
        ("/v1/systemone", {"state": "s", "questions": {"q": {"type": "x"}}}, ""),
        ("/v1/systemone", {**SYSTEMONE, "state": []}, ""),
    ],
)
def test_what_breaks_a_rule_is_422_and_the_connection_serves_on(
    service: RunningService, path: str, body: Any, message: str
) -> None:
    with service.wire() as wire:
        answer = wire.post(path, body)
        assert (answer.status, answer.code) == (422, "invalid_request")
        assert answer.json["error"]["message"].startswith(message)
        assert not answer.closes
        assert service.engine.records == []
        assert wire.post("/decide", DECIDE).status == 200


def test_a_full_queue_is_429_before_the_body_is_read(start_service: Start) -> None:
    service = start_service(max_queue=1)
    service.engine.gate.clear()
    with service.wire() as held, service.wire() as next_one:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        head_only = make_request("/decide", headers={"Content-Length": "1000"})
        answer = next_one.send(head_only).read()
        assert answer.status == 429
        assert answer.json == error("busy", "1 requests are in progress")
        assert re.fullmatch("[1-9][0-9]?", answer.headers["retry-after"])
        assert answer.closes
        service.engine.gate.set()
        assert held.read().status == 200


def test_a_slot_is_held_until_the_last_byte_of_the_answer(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    send = Connection.send

    def send_and_look(connection: Connection, data: bytes) -> bool:
        sent = send(connection, data)
        held.append(service.admitted)
        return sent

    monkeypatch.setattr(Connection, "send", send_and_look)
    assert service.post("/decide", DECIDE).status == 200
    until(lambda: service.admitted == 0)
    assert held == [1]


def test_an_answer_that_cannot_be_framed_frees_its_slot(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> bytes:
        raise RuntimeError("planted")

    monkeypatch.setattr(Exchange, "_render", fail)
    with service.wire() as wire:
        wire.send(make_request("/decide", DECIDE))
        assert wire.is_at_end()
    until(lambda: service.admitted == 0)


DEEP: Any = [1] * 2500
for _ in range(90):
    DEEP = [DEEP]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("state", "max_tokens"), [("x" * 5000, 100), (DEEP, 8192)], ids=["long", "deep"]
)
def test_what_cannot_fit_max_tokens_is_refused_before_it_is_rendered(
    start_service: Start, path: str, state: Any, max_tokens: int
) -> None:
    """5 kB nested 90 deep are 457 kB with indent=2, over 8192 tokens of 16."""
    service = start_service(max_tokens=max_tokens)
    answer = service.post(path, {**POSTS[path], "state": state})
    assert answer.status == 422
    message = f"the prompt cannot fit MAX_TOKENS ({max_tokens})"
    assert answer.json == error("invalid_request", message)
    assert service.engine.records == []


@pytest.mark.parametrize("path", POSTS)
def test_an_over_long_prompt_does_not_wait_for_its_refusal(
    service: RunningService, path: str
) -> None:
    """The encoder tells it, while the engine still scores another."""

    def refuse(_: Any) -> None:
        raise InvalidRequest("prompt has 9000 tokens, limit is 8192")

    service.engine.prepare = refuse  # type: ignore[method-assign]
    service.engine.gate.clear()
    with service.wire() as held:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        answer = service.post(path, {**POSTS[path], "state": "x " * 10_000})
        assert answer.status == 422
        assert answer.json["error"]["message"].startswith("prompt has 9000 tokens")
        service.engine.gate.set()
        assert held.read().status == 200
    assert len(service.engine.records) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", object()])
def test_what_is_no_json_is_never_sent(value: object) -> None:
    with pytest.raises(ScoringFailed):
        Reply.document(200, {"x": value})


UNFRAMED: list[dict[str, str | None]] = [
    {"Content-Length": "-1"},
    {"Content-Length": "9" * 20},
    {"Content-Length": "5", "Transfer-Encoding": "chunked"},
    {"Content-Length": "5", "Content-Encoding": "br"},
]


@pytest.mark.parametrize("headers", UNFRAMED)
def test_bearer_path_and_admission_come_before_framing(
    start_service: Start, headers: dict[str, str | None]
) -> None:
    service = start_service(max_queue=1)
    wrong = service.post("/nothing", headers=headers, token=None)
    assert wrong.code == "unauthorized"
    assert service.post("/nothing", headers=headers).code == "not_found"
    service.engine.gate.clear()
    with service.wire() as held:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        assert service.post("/decide", headers=headers).code == "busy"
        service.engine.gate.set()
        assert held.read().status == 200
    until(lambda: service.admitted == 0)
    framed = service.post("/decide", headers=headers).code
    assert framed in ("bad_request", "request_too_large", "unsupported_encoding")


MODEL_FAILURES = [
    (OutOfMemory("CUDA is out of memory"), 503, "out_of_memory", None),
    (ScoringFailed("the model failed"), 500, "scoring_failed", None),
    (RuntimeError("secret"), 500, "scoring_failed", "scoring failed"),
    (KeyError("secret"), 500, "scoring_failed", "scoring failed"),
    (InvalidRequest("over MAX_TOKENS"), 422, "invalid_request", None),
]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(("failure", "status", "code", "message"), MODEL_FAILURES)
def test_a_failing_engine_is_answered_and_serves_on(
    service: RunningService,
    path: str,
    failure: Exception,
    status: int,
    code: str,
    message: str | None,
) -> None:
    service.engine.script.append(failure)
    with service.wire() as wire:
        answer = wire.post(path, POSTS[path])
        assert answer.status == status
        assert answer.json == error(code, message or str(failure))
        assert "retry-after" not in answer.headers  # the same would fail again
        assert wire.post(path, POSTS[path]).status == 200


def test_an_oom_in_the_second_call_fails_the_whole_request(
    service: RunningService,
) -> None:
    service.engine.script.extend([None, OutOfMemory("CUDA is out of memory")])
    answer = service.post("/decide/shared", make_shared(17))
    assert (answer.status, answer.code) == (503, "out_of_memory")
    assert service.post("/decide/shared", make_shared(17)).status == 200


def set_nan(answer: dict[str, Any]) -> None:
    answer["probabilities"] = dict.fromkeys(answer["probabilities"], float("nan"))


def drop_option(answer: dict[str, Any]) -> None:
    answer["probabilities"].popitem()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("spoil", [set_nan, drop_option, dict.clear])
def test_a_wrong_answer_of_the_model_is_500_never_a_partial_200(
    service: RunningService, path: str, spoil: Callable[[dict[str, Any]], None]
) -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        response = fake_predict(request)
        for answer in response["answers"].values():
            spoil(answer)
        return response

    service.engine.predict = predict
    answer = service.post(path, POSTS[path])
    assert (answer.status, answer.code) == (500, "scoring_failed")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("answers", [{}, None, "extra", "renamed"])
def test_missing_and_extra_answers_are_500(
    service: RunningService, path: str, answers: Any
) -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        response = fake_predict(request)
        given = response["answers"]
        if answers == "extra":
            given["more"] = next(iter(given.values()))
        elif answers == "renamed":
            given["more"] = given.pop(next(iter(given)))
        else:
            response["answers"] = answers
        return response

    service.engine.predict = predict
    answer = service.post(path, POSTS[path])
    assert (answer.status, answer.code) == (500, "scoring_failed")


def test_a_stopping_service_is_503_with_retry_after(start_service: Start) -> None:
    service = start_service()
    service.worker.stop()
    for path, body in POSTS.items():
        answer = service.post(path, body)
        assert answer.status == 503
        assert answer.json == error("shutting_down", "the service is stopping")
        assert answer.headers["retry-after"] == "60"
        assert answer.closes
    assert service.post("/decide", DECIDE, token=None).status == 401
    assert service.post("/nothing", DECIDE).status == 404


def test_a_lost_engine_is_503_with_retry_after(service: RunningService) -> None:
    service.engine.script.append(EngineFailed("the engine is lost"))
    messages = ["the engine is lost", "the engine is lost; the service restarts"]
    for message in messages:
        answer = service.post("/decide", DECIDE)
        assert answer.status == 503
        assert answer.json == error("engine_failed", message)
        assert answer.headers["retry-after"] == "60"
        assert answer.closes
    assert len(service.engine.records) == 1


def test_no_name_is_looked_up_to_bind(
    start_service: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: object) -> str:
        raise AssertionError("a look-up may wait for a network that is not there")

    monkeypatch.setattr(socket, "getfqdn", look_up)
    assert start_service().get("/health").status == 200


# --- errors beyond the contract's table ---------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"garbage\r\n\r\n", 400, "bad_request"),
        (b"GET /health\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\n\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\r\nHost : h\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n", 400, "bad_request"),
        (b"GET /he\x00alth HTTP/1.1\r\nHost: h\r\n\r\n", 400, "bad_request"),
        (b"GET /" + b"x" * 70_000, 414, "uri_too_long"),
        (make_request("/", headers={"X": "x" * 40_000}), 431, "headers_too_large"),
        (
            make_request("/", headers={f"X-{n}": "x" for n in range(200)}),
            431,
            "headers_too_large",
        ),
        (make_request("/", method="BREW"), 501, "not_implemented"),
        (b"GET /health HTTP/9.9\r\n\r\n", 505, "http_version_not_supported"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version_not_supported"),
    ],
)
def test_what_is_no_request_gets_one_json_answer_and_the_connection_ends(
    service: RunningService, sent: bytes, status: int, code: str
) -> None:
    if code == "not_implemented":
        sent = make_request("/decide", method="BREW")
    with service.wire() as wire:
        answer = wire.send(sent).read()
        assert (answer.status, answer.code) == (status, code)
        assert answer.closes is (code != "not_implemented")
        if answer.closes:
            assert wire.is_at_end()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": "-1"},
        {"Content-Length": "+5"},
        {"Content-Length": "1_0"},
        {"Content-Length": "0x8d"},
        {"Content-Length": "\xb2"},
        {"Content-Length": ""},
        {"Content-Length": "5, 5"},
        {"Content-Length": "5\r\nContent-Length: 5"},
        {"Content-Length": "0\r\nContent-Length: 0"},
        {"Content-Length": "5\r\nContent-Length: 6"},
        {"Content-Length": "5", "Transfer-Encoding": "chunked"},
    ],
)
def test_a_bad_framing_is_400_and_nothing_after_it_is_a_request(
    service: RunningService, headers: dict[str, str]
) -> None:
    with service.wire() as wire:
        smuggled = make_request("/health", method="GET")
        wire.send(make_request("/decide", smuggled, headers=headers))
        answer = wire.read()
        assert (answer.status, answer.code, answer.closes) == (400, "bad_request", True)
        assert wire.is_at_end()
    until(lambda: service.outcomes == {"bad_request": 1})


@pytest.mark.parametrize("coding", ["gzip", "gzip, chunked", "identity", "x"])
def test_an_unknown_transfer_coding_is_501(
    service: RunningService, coding: str
) -> None:
    headers = {"Transfer-Encoding": coding, "Content-Length": None}
    answer = service.post("/decide", b"5\r\nhello\r\n0\r\n\r\n", headers=headers)
    assert (answer.status, answer.code) == (501, "not_implemented")
    assert answer.closes


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/v1/systemonex",
        "/v1",
        "/decide/",
        "//decide",
        "/./decide",
        "/x/../decide",
        "/Decide",
        "/%64ecide",
        "/decide;x",
        "/decide%3Fx",
        "/caf\xe9",
        "http://host/decide",
        "*",
    ],
)
def test_any_other_path_is_404(service: RunningService, path: str) -> None:
    answer = service.post(path, DECIDE)
    assert answer.status == 404
    assert answer.json == error("not_found", "no such path")
    assert service.get(path).status == 404
    assert service.engine.records == []


@pytest.mark.parametrize("query", ["?", "?x=1", "?x=/nothing", "?a?b#c"])
def test_a_query_is_ignored(service: RunningService, query: str) -> None:
    assert service.post("/decide" + query, DECIDE).status == 200
    assert service.get("/health" + query).status == 200


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/decide", "POST"),
        ("HEAD", "/decide", "POST"),
        ("PUT", "/decide", "POST"),
        ("OPTIONS", "/v1/systemone", "POST"),
        ("DELETE", "/decide/shared", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("PATCH", "/v1/models", "GET, HEAD"),
        ("TRACE", "/openapi.json", "GET, HEAD"),
    ],
)
def test_another_method_is_405_with_allow(
    service: RunningService, method: str, path: str, allow: str
) -> None:
    with service.wire() as wire:
        wire.send(make_request(path, method=method))
        answer = wire.read(is_head=method == "HEAD")
        assert (answer.status, answer.headers["allow"]) == (405, allow)
        if method != "HEAD":
            expected = error("method_not_allowed", f"this path takes {allow}")
            assert answer.json == expected


@pytest.mark.parametrize("coding", ["br", "deflate", "gzip, gzip", "compress"])
def test_an_unknown_content_encoding_is_415(
    service: RunningService, coding: str
) -> None:
    answer = service.post("/decide", DECIDE, headers={"Content-Encoding": coding})
    assert answer.status == 415
    assert answer.json == error(
        "unsupported_encoding", "Content-Encoding must be gzip, zstd or identity"
    )


@pytest.mark.parametrize("length", ["100", None])
def test_a_body_that_does_not_come_is_408_and_frees_its_slot(
    start_service: Start, length: str | None
) -> None:
    service = start_service({"deadlines": Deadlines(body=0.05)}, max_queue=1)
    headers = {"Content-Length": length} if length else CHUNKED
    answer = service.post("/decide", b"5\r\nh", headers=headers)
    assert answer.status == 408
    assert answer.json == error("request_timeout", "the body did not arrive in time")
    assert answer.closes
    assert service.post("/decide", DECIDE).status != 429


def test_a_head_that_does_not_come_is_408(start_service: Start) -> None:
    service = start_service({"deadlines": Deadlines(head=0.05)})
    with service.wire() as wire:
        answer = wire.send(b"POST /decide HTTP/1.1\r\n").read()
        assert answer.status == 408
        message = "the head did not arrive in time"
        assert answer.json == error("request_timeout", message)
        assert wire.is_at_end()


def test_an_idle_client_is_let_go_in_silence(start_service: Start) -> None:
    service = start_service({"deadlines": Deadlines(idle=0.05)})
    with service.wire() as wire:
        assert wire.is_at_end()
    until(lambda: service.server.open_connections == 0)
    assert service.outcomes == {}


def test_a_failure_of_the_server_itself_is_a_500_in_the_envelope(
    service: RunningService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(service.service.api.open_gets, "/health", fail)
    answer = service.get("/health")
    assert answer.status == 500
    message = "the request failed inside the server"
    assert answer.json == error("scoring_failed", message)
    assert "ZeroDivisionError" in caplog.text


# --- headers ------------------------------------------------------------------------


def test_every_answer_has_the_same_headers_and_no_version(
    service: RunningService,
) -> None:
    answers = [
        service.post("/decide", DECIDE),
        service.get("/health"),
        service.post("/decide", b"{"),
        service.get("/nothing"),
    ]
    for answer in answers:
        assert answer.headers.keys() == HEADER_NAMES
        assert answer.headers["server"] == "intern-decision-serve"
        assert answer.headers["content-type"] == "application/json"
        date = r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT"
        assert re.fullmatch(date, answer.headers["date"])
        assert "Python" not in str(answer.headers)


@pytest.mark.parametrize("name", ["X-Request-Id", "x-typesafe-request-id"])
def test_a_plain_request_id_is_echoed(service: RunningService, name: str) -> None:
    for given in ("a", "req_1.2-3", "x" * 64):
        answer = service.post("/decide", DECIDE, headers={name: given})
        assert answer.headers["x-request-id"] == given
        assert answer.headers["x-typesafe-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "a\tb", "caf\xe9", "a;b", '"'])
def test_any_other_request_id_is_replaced(service: RunningService, given: str) -> None:
    answer = service.post("/decide", DECIDE, headers={"X-Request-Id": given})
    made = answer.headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{16}", made)
    assert answer.headers["x-typesafe-request-id"] == made


def test_made_request_ids_differ_on_one_connection(service: RunningService) -> None:
    with service.wire() as wire:
        made = {wire.get("/health").headers["x-request-id"] for _ in range(5)}
    assert len(made) == 5


def test_the_sdks_own_request_id_wins(service: RunningService) -> None:
    headers = {"X-Request-Id": "theirs", "x-typesafe-request-id": "the-sdks"}
    answer = service.post("/decide", DECIDE, headers=headers)
    assert answer.headers["x-request-id"] == "the-sdks"


def test_a_refused_head_has_a_request_id_too(service: RunningService) -> None:
    with service.wire() as wire:
        answer = wire.send(b"garbage\r\n\r\n").read()
    assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])


# --- encodings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encode", "coding"),
    [
        (gzip.compress, "gzip"),
        (gzip.compress, "x-gzip"),
        (gzip.compress, "GZIP"),
        (zstd.compress, "zstd"),
        (bytes, "identity"),
        (bytes, ""),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_encoded_body_is_decoded(
    service: RunningService,
    encode: Callable[[bytes], bytes],
    coding: str,
    is_chunked: bool,
) -> None:
    body = encode(make_request("/", DECIDE).split(b"\r\n\r\n", 1)[1])
    headers: dict[str, str | None] = {"Content-Encoding": coding}
    if is_chunked:
        body, headers = chunked(body, 7), {**headers, **CHUNKED}
    answer = service.post("/decide", body, headers=headers)
    assert (answer.status, answer.json["id"]) == (200, "d")


# --- Expect: 100-continue -----------------------------------------------------------

EXPECT = {"Expect": "100-continue"}


def expect(wire: Wire, path: str = "/decide", **options: Any) -> Answer:
    headers = {**EXPECT, "Content-Length": "1000", **options.pop("headers", {})}
    return wire.send(make_request(path, headers=headers, **options)).read()


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"token": None}, 401),
        ({"path": "/nothing"}, 404),
        ({"path": "/health"}, 405),
        ({"headers": {"Content-Length": "10485760"}}, 413),
        ({"headers": {"Content-Length": "x"}}, 400),
        ({"headers": {"Content-Encoding": "br"}}, 415),
        ({"headers": {"Transfer-Encoding": "chunked"}}, 400),
    ],
)
def test_what_will_be_refused_is_not_asked_for(
    service: RunningService, options: dict[str, Any], status: int
) -> None:
    with service.wire() as wire:
        answer = expect(wire, **options)
        assert (answer.status, answer.closes) == (status, True)


def test_a_full_queue_asks_for_no_body(start_service: Start) -> None:
    service = start_service(max_queue=1)
    service.engine.gate.clear()
    with service.wire() as held, service.wire() as wire:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        assert expect(wire).status == 429
        service.engine.gate.set()
        assert held.read().status == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_good_request_is_asked_for_its_body(
    service: RunningService, is_chunked: bool
) -> None:
    body = make_request("/", DECIDE).split(b"\r\n\r\n", 1)[1]
    length: dict[str, str | None] = {"Content-Length": str(len(body))}
    with service.wire() as wire:
        headers = {**EXPECT, **(CHUNKED if is_chunked else length)}
        wire.send(make_request("/decide", headers=headers))
        assert wire.read() == Answer(100, {}, b"")
        answer = wire.send(chunked(body) if is_chunked else body).read()
        assert answer.status == 200
        assert wire.get("/health").status == 200


def test_a_body_that_is_here_already_is_not_asked_for(service: RunningService) -> None:
    assert service.post("/decide", DECIDE, headers=EXPECT).status == 200


def test_an_empty_body_is_not_asked_for(service: RunningService) -> None:
    with service.wire() as wire:
        assert expect(wire, headers={"Content-Length": "0"}).status == 422


def test_http_1_0_is_sent_no_100(service: RunningService) -> None:
    sent = make_request("/decide", DECIDE, headers=EXPECT).replace(b"/1.1", b"/1.0", 1)
    with service.wire() as wire:
        answer = wire.send(sent).read()
        assert (answer.status, answer.closes) == (200, True)
        assert wire.is_at_end()


# --- one connection, many requests --------------------------------------------------


def test_pipelined_requests_are_answered_in_order(service: RunningService) -> None:
    with service.wire() as wire:
        bodies = [{**DECIDE, "id": str(number)} for number in range(20)]
        wire.send(b"".join(make_request("/decide", body) for body in bodies))
        assert [wire.read().json["id"] for _ in bodies] == [str(n) for n in range(20)]


def test_a_request_after_a_refusal_that_closes_is_not_answered(
    service: RunningService,
) -> None:
    with service.wire() as wire:
        wire.send(make_request("/decide", DECIDE, token=None))
        wire.send(make_request("/health", method="GET"))
        assert wire.read().status == 401
        assert wire.is_at_end()
    until(lambda: service.outcomes == {"unauthorized": 1})


def test_a_get_with_a_body_is_answered_and_the_connection_ends(
    service: RunningService,
) -> None:
    with service.wire() as wire:
        answer = wire.send(
            make_request("/health", method="GET", headers={"Content-Length": "40"})
            + b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
        ).read()
        assert (answer.status, answer.closes) == (200, True)
        assert wire.is_at_end()


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/decide", {"token": None}, 401),
        ("/nothing", {}, 404),
        ("/health", {}, 405),
        ("/decide", {}, 422),
    ],
)
def test_a_refusal_without_a_body_keeps_the_connection(
    service: RunningService, path: str, options: dict[str, Any], status: int
) -> None:
    with service.wire() as wire:
        answer = wire.post(path, b"", **options)
        assert (answer.status, answer.closes) == (status, False)
        assert wire.post("/decide", DECIDE).status == 200


def test_a_request_to_close_is_obeyed(service: RunningService) -> None:
    with service.wire() as wire:
        answer = wire.post("/decide", DECIDE, headers={"Connection": "close"})
        assert (answer.status, answer.closes) == (200, True)
        assert wire.is_at_end()


def test_a_post_without_a_length_has_an_empty_body(service: RunningService) -> None:
    with service.wire() as wire:
        answer = wire.post("/decide", b"", headers={"Content-Length": None})
        assert answer.json == error("invalid_request", "the body is empty, not JSON")
        assert wire.get("/health").status == 200


def test_the_content_type_does_not_matter(service: RunningService) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {"Content-Type": kind}
        assert service.post("/decide", DECIDE, headers=headers).status == 200


def test_an_ordinary_client_keeps_its_connection(service: RunningService) -> None:
    connection = HTTPConnection(*service.address[:2], timeout=20)
    for _ in range(3):
        connection.request(
            "POST",
            "/decide",
            make_request("/", DECIDE).split(b"\r\n\r\n", 1)[1],
            {"Authorization": f"Bearer {TOKEN}"},
        )
        response = connection.getresponse()
        assert response.status == 200
        response.read()
    connection.close()


# --- addresses ----------------------------------------------------------------------


def test_an_ipv6_host_is_served_and_named(start_service: Start) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    service = start_service(host="::1")
    port = service.address[1]
    assert service.server.url == f"http://[::1]:{port}"
    connection = HTTPConnection("::1", port, timeout=20)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


# --- the access log -----------------------------------------------------------------

SECRET = "only-in-the-prompt"


def test_a_line_says_what_a_request_was_and_nothing_it_held(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body = {**make_shared(17), "state": SECRET}
    headers = {"X-Request-Id": "mine", "X-Secret": SECRET}
    answer = service.post(f"/decide/shared?{SECRET}", body, headers=headers)
    service.post("/decide", SECRET.encode(), headers={"X-Request-Id": SECRET * 9})
    service.post("/decide", DECIDE, headers={"Authorization": f"Bearer {SECRET}"})

    def access_lines() -> list[str]:
        return [r.message for r in caplog.records if r.name.endswith(".access")]

    until(lambda: len(access_lines()) == 3)  # a line is written after it is counted
    lines = sorted(access_lines(), key=lambda line: line.split(" status=")[1])
    tokens = sum(answer.json["timing"]["input_tokens"])
    size = r"bytes=[1-9]\d*"
    number = r"\d+\.\d"
    assert re.fullmatch(
        rf"id=mine method=POST path=/decide/shared status=200 ms={number} "
        rf"queued_ms={number} scoring_ms={number} calls=2 input_tokens={tokens} {size}",
        lines[0],
    )
    assert " path=/decide status=401 " in lines[1]
    assert " path=/decide status=422 " in lines[2]
    assert SECRET not in caplog.text
    assert TOKEN not in caplog.text


def test_a_failing_request_leaks_no_prompt_into_the_log(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    service.engine.script.append(RuntimeError("device says no"))
    service.post("/decide", {**DECIDE, "state": SECRET})
    until(lambda: service.outcomes)
    assert "device says no" in caplog.text
    assert SECRET not in caplog.text


def test_a_flood_is_summed_up_when_it_is_over(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "intern_decision_serve.access")
    with service.wire() as wire:
        for _ in range(40):
            wire.post("/decide", b"", token=None)

    def summed() -> int:
        found = [re.match(r"summed_up=(\d+) 401=\1$", m) for m in caplog.messages]
        return sum(int(match[1]) for match in found if match)

    until(lambda: summed() + sum(m.startswith("id=") for m in caplog.messages) == 40)
    assert summed() > 0
