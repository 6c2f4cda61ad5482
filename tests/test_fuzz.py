"""Random and mutated input against the parsers, and against the live service.

Bounded and derandomized: the same inputs every run; FUZZ_EXAMPLES=5000 hunts among new
ones. Whatever comes in, each answer is one well-formed response with the JSON envelope,
or a clean close; never a 500.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from live import LiveService, serve
from wire import TOKEN

from intern_decision_serve import errors
from intern_decision_serve.errors import ServiceError
from intern_decision_serve.framing import (
    ChunkedDecoder,
    RequestHead,
    body_length,
    parse_head,
)

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

LIMIT = 4096
bounded = hypothesis.settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")),
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
CODES = {error.code: error.status for error in ServiceError.__subclasses__()}
TOKEN_LINE = f"Authorization: Bearer {TOKEN}\r\n".encode()
OPTIONS = [{"id": "a", "description": "first"}, {"id": "b", "description": ""}]
DECISION = {"id": "d", "question": "What?", "options": OPTIONS}
BODIES: dict[str, dict[str, Any]] = {
    "/decide": {"state": {"k": [1, None, "v"]}, "orderings": "all", **DECISION},
    "/decide/shared": {"state": "s", "decisions": [DECISION]},
    "/v1/systemone": {
        "state": ["s"],
        "questions": {
            "c": {"type": "choice", "criteria": {"x": "1", "y": None}},
            "s": {"type": "score", "instructions": "?", "criteria": ["low", "high"]},
            "n": {"type": "noul"},
        },
    },
}


def _post(path: str, framing: bytes, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\n".encode() + TOKEN_LINE
    return head + framing + b"\r\n" + body


GOOD_BODY = json.dumps(BODIES["/decide"]).encode()
CHUNKED_BODY = b"%x;ext=1\r\n%b\r\n0\r\nTrailer: t\r\n\r\n" % (
    len(GOOD_BODY),
    GOOD_BODY,
)
SEEDS = [
    b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n",
    b"HEAD /openapi.json HTTP/1.0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: h\r\n" + TOKEN_LINE + b"\r\n",
    _post("/decide", b"Content-Length: %d\r\n" % len(GOOD_BODY), GOOD_BODY),
    _post("/decide", b"Transfer-Encoding: chunked\r\n", CHUNKED_BODY),
    _post("/decide", b"Expect: 100-continue\r\nContent-Length: 2\r\n", b"{}"),
    _post("/v1/systemone", b"Content-Encoding: gzip\r\nContent-Length: 3\r\n", b"abc"),
]
PIECES = [
    b"\r\n",
    b"\n",
    b"\r\n\r\n",
    b"\x00",
    b" ",
    b":",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"HTTP/1.1",
    b"ffffffffffffffff\r\n",
    b"\xff\xfe",
    b"-1",
    b"x" * 9000,
]


@st.composite
def mutated(draw: Any, seeds: list[bytes]) -> bytes:
    """A seed, or two in a row, with a few places cut out or written over."""
    data = bytearray(draw(st.sampled_from(seeds)))
    if draw(st.booleans()):
        data += draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.integers(0, 4))
        piece = draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=4)))
        data[at : at + gone] = piece
    return bytes(data)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """The data in parts, cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in zip(places, places[1:], strict=False)]


class TestHead:
    @bounded
    @hypothesis.given(st.one_of(st.binary(max_size=400), mutated(SEEDS)))
    def test_any_bytes_are_a_head_or_an_error_of_the_list(self, data: bytes) -> None:
        try:
            head = parse_head(data.partition(b"\r\n\r\n")[0])
            length = body_length(head, LIMIT)
        except ServiceError as error:
            assert CODES[error.code] == error.status
            assert 400 <= error.status < 600
            return
        assert isinstance(head, RequestHead)
        assert length is None or 0 <= length <= LIMIT


def decode(parts: list[bytes]) -> tuple[bytes, bytes] | type[ServiceError]:
    """The body and what followed it; or the error; ("", "") stands for unfinished."""
    decoder = ChunkedDecoder(LIMIT)
    try:
        for i, part in enumerate(parts):
            decoder.feed(part)
            if decoder.done:
                rest = decoder.rest + b"".join(parts[i + 1 :])
                return bytes(decoder.body), rest
    except ServiceError as error:
        return type(error)
    return b"", b""


class TestChunks:
    @bounded
    @hypothesis.given(
        st.one_of(
            mutated([CHUNKED_BODY, b"3\r\nabc\r\n" * 5 + b"0\r\n\r\nGET /"]),
            st.binary(max_size=60),
        ),
        st.lists(st.integers(0, 20_000), max_size=12),
    )
    def test_any_split_decodes_as_one_feed_does(
        self, data: bytes, cuts: list[int]
    ) -> None:
        whole = decode([data])
        assert decode(split(data, cuts)) == whole
        assert decode([data[i : i + 1] for i in range(len(data))]) == whole

    @bounded
    @hypothesis.given(st.lists(st.binary(min_size=1, max_size=50), max_size=20))
    def test_what_was_chunked_comes_back(self, chunks: list[bytes]) -> None:
        encoded = b"".join(b"%X\r\n%b\r\n" % (len(c), c) for c in chunks)
        assert decode([encoded + b"0\r\n\r\nrest"]) == (b"".join(chunks), b"rest")


@pytest.fixture(scope="module")
def live() -> Iterator[LiveService]:
    with serve(max_body_bytes=LIMIT) as service:
        yield service


def converse(live: LiveService, parts: list[bytes]) -> bytes:
    """Send the parts, say that no more comes, and read to the end."""
    received = b""
    with socket.create_connection(live.address, timeout=20) as sock:
        try:
            for part in parts:
                sock.sendall(part)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it closed first; what it said is still to be read
        while data := sock.recv(65536):
            received += data
    return received


_HEAD = re.compile(
    rb"HTTP/1\.1 (\d{3}) [A-Za-z -]*\r\n((?:[A-Za-z-]+: [^\r\n]*\r\n)+)\r\n"
)


def read_answers(received: bytes) -> list[int]:
    """The statuses of a connection's answers, each checked whole."""
    statuses = []
    while received:
        match = _HEAD.match(received)
        if received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            received = received[25:]
            continue
        assert match is not None, received[:200]
        headers = dict(
            line.split(b": ", 1) for line in match[2].lower().splitlines() if line
        )
        body = received[match.end() :]
        length = int(headers[b"content-length"])
        if len(body) == 0 and length:  # an answer to HEAD
            statuses.append(int(match[1]))
            return statuses
        statuses.append(int(match[1]))
        if body[:5] == b"HTTP/":  # an answer to HEAD, and another behind it
            received = body
            continue
        assert headers[b"content-type"].startswith((b"application/json", b"text/plain"))
        check_body(int(match[1]), body[:length])
        received = body[length:]
    return statuses


def check_body(status: int, body: bytes) -> None:
    """A refusal's body is the envelope, with a code that has this status."""
    if status == 200:
        return
    document = json.loads(body)
    assert document.keys() == {"error"}
    assert document["error"].keys() == {"code", "message"}
    assert CODES[document["error"]["code"]] == status


class TestSocket:
    @bounded
    @hypothesis.given(
        st.one_of(mutated(SEEDS), st.binary(max_size=200)),
        st.lists(st.integers(0, 20_000), max_size=3),
    )
    def test_any_bytes_get_well_formed_answers_and_never_a_500(
        self, live: LiveService, data: bytes, cuts: list[int]
    ) -> None:
        statuses = read_answers(converse(live, split(data, cuts)))
        assert 500 not in statuses
        assert set(statuses) <= {200, *CODES.values()}

    def test_the_service_is_as_it_was(self, live: LiveService) -> None:
        status, answer, _ = live.ask("/decide", BODIES["/decide"])
        assert status == 200
        assert answer["combined"]["orderings"] == 2
        assert live.service.admission.wait_until_empty(10)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["none", "all", "choice", "score", "noul", "a", "", "1e400"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found.extend(places(inner))
    return found


@st.composite
def documents(draw: Any) -> tuple[str, bytes]:
    """A path, and a valid body of it with up to two values replaced or removed."""
    path = draw(st.sampled_from(sorted(BODIES)))
    document = json.loads(json.dumps(BODIES[path]))
    for _ in range(draw(st.integers(0, 2))):
        container, key = draw(st.sampled_from(places(document) or [(document, "x")]))
        if isinstance(container, dict) and draw(st.booleans()):
            container.pop(key, None)
            container[draw(st.text(max_size=3))] = draw(JSON_VALUES)
        else:
            container[key] = draw(JSON_VALUES)
    text = json.dumps(document, ensure_ascii=draw(st.booleans()))
    body = bytearray(text.encode("utf-8", "surrogatepass"))
    if draw(st.integers(0, 3)) == 0 and body:
        at = draw(st.integers(0, len(body) - 1))
        body[at : at + 1] = draw(st.binary(max_size=2))
    return path, bytes(body)


class TestBody:
    @bounded
    @hypothesis.given(documents())
    def test_any_body_is_scored_or_a_422_and_never_a_500(
        self, live: LiveService, request_: tuple[str, bytes]
    ) -> None:
        path, body = request_
        data = _post(
            path, b"Content-Length: %d\r\nConnection: close\r\n" % len(body), body
        )
        received = b""
        with socket.create_connection(live.address, timeout=20) as sock:
            sock.sendall(data)
            while part := sock.recv(65536):
                received += part
        [status] = read_answers(received)
        assert status in (200, errors.InvalidRequest.status, errors.TooLarge.status)
        if status == 200:
            json.loads(received.partition(b"\r\n\r\n")[2], parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise AssertionError(f"the answer holds {name}")
