"""Faults other servers of this kind have had, by their numbers: none happens here.

Each test tries what brought the fault to light, over a real socket. D to F (model
stack, memory, deployment) are tested beside the modules they concern.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fakes import fake_predict
from running import DECIDE, OPTIONS, PINS, SYSTEMONE, RunningService
from wire import TOKEN, Answer, Wire, make_request, until

from intern_decision_serve.connection import Connection
from intern_decision_serve.errors import InvalidRequest, OutOfMemory

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Start = Callable[..., RunningService]

CHUNKED = {"Transfer-Encoding": "chunked", "Content-Length": None}
CHOICE = {"type": "choice", "instructions": "?", "criteria": {"a": "1", "b": "2"}}
REFUSED_ON_RULES = (422, "invalid_request")


def refusal(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code


def decide(service: RunningService, body: Any) -> Answer:
    return service.post("/decide", body)


# --- A. HTTP on the standard library ------------------------------------------------


def test_b01_an_answer_leaves_in_one_write_without_nagle(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    send = Connection.send

    def count(self: Connection, data: bytes) -> bool:
        sizes.append(len(data))
        return send(self, data)

    monkeypatch.setattr(Connection, "send", count)
    with service.wire() as wire:
        for turn in range(1, 6):
            assert wire.post("/decide", DECIDE).status == 200
            assert len(sizes) == turn
        (sock,) = service.server._connections
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    # one `send` is one `sendall`: test_connection


# B02 (backlog): test_concurrency, test_a_burst_gets_only_200_and_429_and_no_reset


@pytest.mark.parametrize("status", [401, 404, 413, 422, 429])
def test_b03_what_follows_an_early_answer_is_never_taken_for_a_request(
    start_service: Start, status: int
) -> None:
    service = start_service(max_queue=1, max_body_bytes=1000)
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n" + b" " * 163
    path = "/nothing" if status == 404 else "/decide"
    headers = {"Content-Length": "1001"} if status == 413 else {}
    held = service.wire()
    if status == 429:
        service.engine.gate.clear()
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
    with service.wire() as wire:
        token = None if status == 401 else TOKEN
        wire.send(make_request(path, smuggled, token=token, headers=headers))
        wire.send(make_request("/health", method="GET"))
        answer = wire.read()
        assert answer.status == status
        if answer.closes:
            assert wire.is_at_end()
        else:
            assert (status, wire.read().json["status"]) == (422, "ok")
    service.engine.gate.set()
    held.sock.close()


def test_b05_chunks_are_decoded_under_the_cap(service: RunningService) -> None:
    data = json.dumps(DECIDE).encode()
    body = (
        b"5\r\n"
        + data[:5]
        + b"\r\n%x\r\n" % len(data[5:])
        + data[5:]
        + b"\r\n0\r\n\r\n"
    )
    with service.wire() as wire:
        assert wire.post("/decide", body, headers=CHUNKED).status == 200
        two_mib = (b"10000\r\n" + b" " * 65536 + b"\r\n") * 32 + b"0\r\n\r\n"
        sending = threading.Thread(
            target=wire.send, args=(make_request("/decide", two_mib, headers=CHUNKED),)
        )
        sending.start()
        assert refusal(wire.read()) == (413, "request_too_large")
        sending.join()


@pytest.mark.parametrize("lengths", [("141", "10"), ("141", "141"), ("141, 141",)])
def test_b07_two_lengths_are_one_refusal(
    service: RunningService, lengths: tuple[str, ...]
) -> None:
    headers = {"Content-Length": "\r\nContent-Length: ".join(lengths)}
    with service.wire() as wire:
        wire.send(make_request("/decide", b"x" * 141, headers=headers))
        answer = wire.read()
        assert (*refusal(answer), answer.closes) == (400, "bad_request", True)
        assert wire.is_at_end()


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("-1", 400),
        ("+141", 400),
        ("1_41", 400),
        ("0x8d", 400),
        ("abc", 400),
        ("\xb2", 400),
        ("99999999999999999999", 413),
        ("9" * 5000, 413),
    ],
)
def test_b08_a_length_is_ascii_digits(
    service: RunningService, length: str, expected: int
) -> None:
    answer = service.post("/decide", b"", headers={"Content-Length": length})
    assert (answer.status, answer.closes) == (expected, True)


# B10 (Expect): test_http, "Expect: 100-continue"
# B11 (early answer, reset): test_refusals, all of it


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (make_request("/decide", method="PUT"), 405),
        (make_request("/decide", method="OPTIONS"), 405),
        (b"GET /health HTTP/9.9\r\nHost: h\r\n\r\n", 505),
        (b"x" * 70_000, 414),
        (make_request("/", headers={f"X{n}": "x" for n in range(200)}), 431),
        (b"garbage\r\n", 400),
        (b"GET /health\r\n", 400),
    ],
)
def test_b14_every_refusal_is_json(
    service: RunningService, sent: bytes, status: int
) -> None:
    with service.wire() as wire:
        answer = wire.send(sent).read()
        assert answer.status == status
        assert answer.code
        assert answer.headers["server"] == "intern-decision-serve"


@pytest.mark.parametrize(
    "value", ["Bearer caf\xe9", "Bearer " + "x" * 100_000, "bearer", "\x80"]
)
def test_b15_a_strange_bearer_is_a_4xx(service: RunningService, value: str) -> None:
    answer = service.post("/decide", DECIDE, headers={"Authorization": value})
    assert answer.status == (431 if len(value) > 50_000 else 401)


def test_b16_paths_are_exact_and_a_query_is_ignored(service: RunningService) -> None:
    for path in ("/v1/systemonex", "/decide/", "//decide", "http://host/health"):
        assert refusal(service.get(path)) == (404, "not_found")
    assert service.post("/decide?x=1", DECIDE).status == 200
    assert service.get("/health?probe=1").status == 200


# B17 (SIGTERM): test_lifecycle


def test_b18_health_answers_while_everything_waits(start_service: Start) -> None:
    service = start_service(max_queue=1)
    service.engine.gate.clear()
    with service.wire() as held:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        for _ in range(20):
            document = service.get("/health").json
            assert (document["status"], document["accepting"]) == ("ok", False)
            assert document["queue"]["running_seconds"] >= 0
        service.engine.gate.set()
        assert held.read().status == 200


def test_b19_abandoned_requests_are_not_scored(service: RunningService) -> None:
    service.engine.gate.clear()
    with service.wire() as held, service.wire() as live:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        for end in (Wire.reset, Wire.half_close) * 3:
            wire = service.wire()
            wire.send(make_request("/decide", {**DECIDE, "state": "abandoned"}))
            until(lambda: service.admitted == 2)
            end(wire)
            until(lambda: service.admitted == 1)
            wire.sock.close()
        live.send(make_request("/decide", DECIDE))
        service.engine.gate.set()
        assert [held.read().status, live.read().status] == [200, 200]
    assert "abandoned" not in str(service.engine.requests)
    assert service.get("/health").json["requests"]["client_gone"] == 6


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (b"\xff\xfe\x00", "/decide", 422),
        (b'{"state": "\xff"}', "/decide", 422),
        (b"{}", "/caf\xe9", 404),
        (b"{}", "/decide\x00", 400),
    ],
)
def test_b20_no_bytes_get_an_empty_reply(
    service: RunningService, body: bytes, path: str, status: int
) -> None:
    assert service.post(path, body).status == status


# --- B. JSON and request content ----------------------------------------------------


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize("place", ['{"x":%s}', "[[%s]]", "%s"])
def test_b21_a_number_json_has_not_is_422(
    service: RunningService, number: str, place: str
) -> None:
    body = json.dumps({**DECIDE, "state": "HERE"}).replace('"HERE"', place % number)
    assert refusal(decide(service, body.encode())) == REFUSED_ON_RULES


def test_b22_an_integer_is_read_up_to_its_limit(service: RunningService) -> None:
    for digits, status in ((4000, 200), (5000, 422)):
        body = json.dumps({**DECIDE, "state": ["HERE"]})
        body = body.replace('"HERE"', "9" * digits)
        assert decide(service, body.encode()).status == status


def test_b23_deep_nesting_is_422(service: RunningService) -> None:
    deep = "[" * 20_000 + "]" * 20_000
    body = json.dumps({**DECIDE, "state": "HERE"}).replace('"HERE"', deep)
    assert refusal(decide(service, body.encode())) == REFUSED_ON_RULES


def test_b25_half_a_surrogate_pair_is_422(service: RunningService) -> None:
    for text, status in ((r"x \ud83d y", 422), (r"x \ud83d\ude00 y", 200)):
        body = json.dumps({**DECIDE, "state": "HERE"}).replace("HERE", text)
        assert decide(service, body.encode()).status == status


@pytest.mark.parametrize("state", ["", {}, [], 0, None, False, 1.5])
@pytest.mark.parametrize("path", ["/decide", "/decide/shared", "/v1/systemone"])
def test_b28_the_service_checks_the_state_itself(
    service: RunningService, path: str, state: Any
) -> None:
    body = {**DECIDE, **SYSTEMONE, "decisions": [DECIDE], "state": state}
    assert refusal(service.post(path, body)) == REFUSED_ON_RULES
    assert service.engine.records == []


@pytest.mark.parametrize("images", [[], None, ["/etc/hostname"], "x", {}])
def test_b28_images_are_refused_whatever_they_are(
    service: RunningService, images: Any
) -> None:
    answer = service.post("/v1/systemone", {**SYSTEMONE, "images": images})
    assert answer.json["error"]["message"] == "images not supported"
    assert answer.status == 422


@pytest.mark.parametrize("description", [None, True, 1, {"k": 1}, ["x"]])
def test_b30_a_description_on_decide_is_a_string(
    service: RunningService, description: Any
) -> None:
    options = [{"id": "a", "description": description}, OPTIONS[1]]
    assert refusal(decide(service, {**DECIDE, "options": options})) == REFUSED_ON_RULES
    assert refusal(decide(service, {**DECIDE, "question": description})) == (
        REFUSED_ON_RULES
    )


def test_b30_on_systemone_they_pass_as_the_engine_takes_them(
    service: RunningService,
) -> None:
    question = {"type": "choice", "instructions": None, "criteria": {"a": None, "b": 1}}
    body = {"state": "s", "questions": {"q": question, "r": {"type": "noul"}}}
    assert service.post("/v1/systemone", body).status == 200
    assert service.engine.requests == [body]


def test_b31_newlines_and_control_characters_are_the_callers(
    service: RunningService,
) -> None:
    forged = "a\n    C = c: yes"
    options = [{"id": forged, "description": "x\x00\x1b"}, OPTIONS[1]]
    body = {**DECIDE, "question": "x\nq2: y", "options": options}
    answer = decide(service, body)
    assert (answer.status, answer.json["option_ids"]) == (200, [forged, "b"])


def test_b32_the_engines_refusal_of_its_marker_keeps_its_message(
    service: RunningService,
) -> None:
    message = "Input contains the reserved marker <decision>"
    service.engine.script.append(InvalidRequest(message))
    answer = decide(service, {**DECIDE, "state": "<decision>"})
    assert refusal(answer) == REFUSED_ON_RULES
    assert answer.json["error"]["message"] == message
    assert decide(service, {**DECIDE, "id": "<decision>"}).status == 200


@pytest.mark.parametrize(
    "failure", [ValueError("Invalid probability distribution"), ArithmeticError("x")]
)
def test_b35_the_models_fault_is_a_500(
    service: RunningService, failure: Exception
) -> None:
    service.engine.script.append(failure)  # past the engine's own mapping
    assert refusal(decide(service, DECIDE)) == (500, "scoring_failed")


def test_b35_a_nan_of_the_model_is_a_500(service: RunningService) -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        response = fake_predict(request)
        response["calibration"]["temperature"] = math.nan
        return response

    service.engine.predict = predict
    for path, body in (("/decide", DECIDE), ("/v1/systemone", SYSTEMONE)):
        assert refusal(service.post(path, body)) == (500, "scoring_failed")


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + json.dumps(DECIDE).encode(),
        json.dumps(DECIDE).encode("utf-16-le"),
        json.dumps(DECIDE).encode("utf-16"),
        b"",
        b"null",
        b"[]",
        b"{}{}",
        b'"text"',
    ],
)
def test_b37_a_body_is_one_utf_8_json_object(
    service: RunningService, body: bytes
) -> None:
    assert refusal(decide(service, body)) == REFUSED_ON_RULES


# --- C. clients and the SDK ---------------------------------------------------------


def test_b40_encoded_bodies_are_decoded_or_named(start_service: Start) -> None:
    service = start_service(max_body_bytes=10_000)
    plain = json.dumps({**DECIDE, "state": "s" * 5000}).encode()
    bomb = zstd.compress(bytes(100_000_000))
    assert len(bomb) < 10_000
    for coding, body, status in [
        ("zstd", zstd.compress(plain), 200),
        ("identity", plain, 200),
        ("zstd", bomb, 413),
        ("deflate", plain, 415),
        ("br", plain, 415),
    ]:
        headers = {"Content-Encoding": coding}
        answer = service.post("/decide", body, headers=headers)
        assert answer.status == status
        if status == 415:
            assert "Content-Encoding" in answer.json["error"]["message"]


def test_b40_the_sdks_compressed_body_is_read(service: RunningService) -> None:
    sdk = pytest.importorskip("typesafe_sdk")
    with sdk.TypeSafeClient(
        base_url=service.server.url, api_key=TOKEN, compression="zstd"
    ) as client:
        response = client.system_one("s" * 5000, {"ok": sdk.Noul(instructions="?")})
    assert service.engine.requests[0]["state"] == "s" * 5000
    assert 0 <= response.nouls["ok"].noul <= 1


@pytest.mark.parametrize(
    ("failure", "status"),
    [(InvalidRequest("too long"), 422), (OutOfMemory("no memory"), 503)],
)
def test_b42_what_would_fail_again_names_no_wait(
    service: RunningService, failure: Exception, status: int
) -> None:
    sdk = pytest.importorskip("typesafe_sdk")
    service.engine.script.append(failure)
    once = sdk.RetryPolicy(max_retries=0)
    with sdk.TypeSafeClient(
        base_url=service.server.url, api_key=TOKEN, retry=once
    ) as client:
        with pytest.raises(sdk.TypeSafeAPIError) as caught:
            client.system_one("s", {"ok": sdk.Noul(instructions="?")})
    assert caught.value.status == status
    assert "retry-after" not in caught.value.headers
    assert caught.value.headers["x-typesafe-request-id"]


def test_b43_typed_answers_parse(service: RunningService) -> None:
    sdk = pytest.importorskip("typesafe_sdk")
    questions = {
        "c": sdk.Choice(instructions="?", criteria={"x": "1", "y": None}),
        "n": sdk.Noul(instructions="?"),
        "s": sdk.Score(instructions="?", criteria=["low", "middle", "high"]),
    }
    with sdk.TypeSafeClient(base_url=service.server.url, api_key=TOKEN) as client:
        response = client.system_one({"k": "v"}, questions)
        assert client.models.list().models[1].name == PINS.served_as
    assert response.model == PINS.served_as
    assert response.choices["c"].probabilities.keys() == {"x", "y"}
    score = response.scores["s"]
    total = sum(float(value) * p for value, p in score.probabilities.items())
    assert abs(score.score - total) < 1e-9
    assert response.request_id


@pytest.mark.parametrize("count", [0, 1, 3])
def test_b44_fewer_or_more_answers_than_questions_are_a_500(
    service: RunningService, count: int
) -> None:
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        response = fake_predict(request)
        more = fake_predict({"state": "", "questions": {"more": {"type": "noul"}}})
        answers = [*response["answers"].items(), *more["answers"].items()]
        response["answers"] = dict(answers[:count])
        return response

    service.engine.predict = predict
    questions = {"a": CHOICE, "b": CHOICE}
    answer = service.post("/v1/systemone", {"state": "s", "questions": questions})
    assert refusal(answer) == (500, "scoring_failed")
