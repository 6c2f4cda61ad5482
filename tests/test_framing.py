"""One request's bytes, judged without a socket: what is not exactly one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intern_decision_serve.errors import (
    BadRequest,
    HeadersTooLarge,
    NotImplementedMethod,
    ServiceError,
    TooLarge,
    UriTooLong,
    VersionNotSupported,
)
from intern_decision_serve.framing import (
    MAX_CHUNKS,
    MAX_HEAD_BYTES,
    MAX_REQUEST_LINE_BYTES,
    ChunkedDecoder,
    RequestHead,
    body_length,
    check_partial_head,
    parse_head,
)

# No test may fail because the machine was busy.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")

LIMIT = 1000
HOST = b"Host: h"
LINE = b"POST /decide HTTP/1.1"


def head(*lines: bytes, first: bytes = LINE, host: bytes | None = HOST) -> RequestHead:
    hosts = [host] if host is not None else []
    return parse_head(b"\r\n".join([first, *hosts, *lines]))


def refused(error: type[ServiceError], call: object, *args: object) -> str:
    assert callable(call)
    with pytest.raises(ServiceError) as caught:
        call(*args)
    assert type(caught.value) is error, caught.value
    return caught.value.message


# --- the head -----------------------------------------------------------------------


def test_a_head_keeps_its_exact_bytes() -> None:
    parsed = head(b"X-A:  one\t", b"x-a: tw\xe9", b"X-B:", first=b"GET /p?q=1 HTTP/1.1")
    assert parsed == RequestHead(
        method="GET",
        target="/p?q=1",
        version=(1, 1),
        headers=(
            (b"host", b"h"),
            (b"x-a", b"one"),
            (b"x-a", b"tw\xe9"),
            (b"x-b", b""),
        ),
    )
    assert parsed.path == "/p"
    assert parsed.values(b"x-a") == [b"one", b"tw\xe9"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"", BadRequest),
        (b"GET", BadRequest),
        (b"GET /health", BadRequest),  # HTTP/0.9
        (b"GET  /health HTTP/1.1", BadRequest),
        (b"GET /health  HTTP/1.1", BadRequest),
        (b"GET /health HTTP/1.1 ", BadRequest),
        (b" GET /health HTTP/1.1", BadRequest),
        (b"GET\t/health\tHTTP/1.1", BadRequest),
        (b"GET /he alth HTTP/1.1", BadRequest),
        (b"GET /he\x00alth HTTP/1.1", BadRequest),
        (b"GET /he\ralth HTTP/1.1", BadRequest),
        (b"G@T /health HTTP/1.1", BadRequest),
        (b"GET /health http/1.1", BadRequest),
        (b"GET /health HTTP/1.10", BadRequest),
        (b"GET /health HTTP/1", BadRequest),
        (b"GET /health HTTP/9.9", VersionNotSupported),
        (b"GET /health HTTP/1.2", VersionNotSupported),
        (b"PRI * HTTP/2.0", VersionNotSupported),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", BadRequest),  # a TLS hello
    ],
)
def test_a_request_line_that_is_none_is_refused_even_before_the_rest_is_here(
    line: bytes, error: type[ServiceError]
) -> None:
    refused(error, parse_head, line + b"\r\n" + HOST)
    refused(error, check_partial_head, line + b"\r\n")


@pytest.mark.parametrize(
    "line",
    [
        b"X-A : one",  # a space before the colon
        b"X-A\t: one",
        b" X-A: one",
        b" folded",  # a continuation of the line before
        b"\tfolded",
        b": nameless",
        b"nothing",
        b"",
        b"X A: one",
        b"X-A: o\x00ne",
        b"X-A: o\x01ne",
        b"X-A: o\x7fne",
        b"X-A: o\rne",
        b"X-\xe9: one",
        b"X-A\x00: one",
        b"(X): one",
    ],
)
def test_a_header_line_that_is_none_is_refused(line: bytes) -> None:
    assert refused(BadRequest, head, line) == "a header line is not `name: value`"


@pytest.mark.parametrize(
    "received",
    [
        LINE + b"\n",
        LINE + b"\r\nHost: h\n",
        LINE + b"\r\nHost: h\n\n",
        b"\n",
        LINE + b"\r\n\n",
    ],
)
def test_a_bare_line_feed_is_refused_at_once(received: bytes) -> None:
    message = "a line of the request head ends without CRLF"
    assert refused(BadRequest, check_partial_head, received) == message
    assert refused(BadRequest, parse_head, received) == message


@pytest.mark.parametrize(
    ("version", "lines", "is_right"),
    [
        (b"1.1", [b"Host: h"], True),
        (b"1.1", [b"Host:"], True),
        (b"1.1", [], False),
        (b"1.1", [b"Host: h", b"Host: h"], False),
        (b"1.0", [], True),
        (b"1.0", [b"Host: h", b"Host: i"], False),
    ],
)
def test_http_1_1_has_exactly_one_host(
    version: bytes, lines: list[bytes], is_right: bool
) -> None:
    block = b"\r\n".join([b"GET / HTTP/" + version, *lines])
    if is_right:
        parse_head(block)
    else:
        expected = "exactly one Host header is required"
        assert refused(BadRequest, parse_head, block) == expected


def test_a_request_line_over_its_limit_is_414() -> None:
    fits = b"GET /" + b"a" * (MAX_REQUEST_LINE_BYTES - 14) + b" HTTP/1.1"
    assert len(fits) == MAX_REQUEST_LINE_BYTES
    head(first=fits)
    check_partial_head(fits + b"\r")
    for longer in (b"x" + fits, fits + b"\r\n" + HOST):
        for received in (b"x" + longer, b"x" + longer + b"\r\n" + HOST):
            refused(UriTooLong, check_partial_head, received)
    refused(UriTooLong, check_partial_head, b"x" * 70_000)


def test_a_head_over_its_limit_is_431() -> None:
    refused(HeadersTooLarge, head, b"Authorization: Bearer " + b"x" * 100_000)
    many = [b"X-%d: x" % number for number in range(99)]
    head(*many)
    refused(HeadersTooLarge, head, *many, b"X: x")
    refused(HeadersTooLarge, check_partial_head, LINE + b"\r\n" + b"x" * MAX_HEAD_BYTES)
    refused(HeadersTooLarge, head, *[b"a:"] * 10_000)


@pytest.mark.parametrize("blank", [b" ", b"\t", b" \t"])
def test_a_line_of_blanks_costs_no_more_than_its_length(blank: bytes) -> None:
    """The pattern once took the square of it: 4 s for 20 kB, without a token."""
    hostile = b"X:" + blank * (16_000 // len(blank)) + b"\x01"
    for _ in range(20):
        refused(BadRequest, head, hostile)


@pytest.mark.parametrize(
    ("line", "version", "kept"),
    [
        (b"X: x", b"1.1", True),
        (b"Connection: keep-alive", b"1.1", True),
        (b"Connection: close", b"1.1", False),
        (b"Connection: Keep-Alive, CLOSE", b"1.1", False),
        (b"Connection: keep-alive", b"1.0", False),
    ],
)
def test_only_http_1_1_without_close_is_kept_alive(
    line: bytes, version: bytes, kept: bool
) -> None:
    assert head(line, first=b"GET / HTTP/" + version).keep_alive is kept


@pytest.mark.parametrize(
    ("line", "version", "expects"),
    [
        (b"Expect: 100-continue", b"1.1", True),
        (b"expect: 100-Continue", b"1.1", True),
        (b"Expect: something", b"1.1", False),
        (b"Expect: 100-continue", b"1.0", False),
    ],
)
def test_only_http_1_1_is_sent_a_100(
    line: bytes, version: bytes, expects: bool
) -> None:
    assert head(line, first=b"POST / HTTP/" + version).expects_continue is expects


# --- the body's length --------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], 0),
        ([b"Content-Length: 0"], 0),
        ([b"Content-Length: 141"], 141),
        ([b"content-length:141"], 141),
        ([b"Content-Length:   141  "], 141),
        ([b"Content-Length: 000000000000000000000000000000141"], 141),
        ([b"Content-Length: 1000"], LIMIT),
        ([b"Transfer-Encoding: chunked"], None),
        ([b"transfer-encoding: CHUNKED"], None),
        ([b"Content-Length: 1001"], TooLarge),
        ([b"Content-Length: 99999999999999999999"], TooLarge),
        ([b"Content-Length: " + b"9" * 5000], TooLarge),
        ([b"Content-Length:"], BadRequest),
        ([b"Content-Length: -1"], BadRequest),
        ([b"Content-Length: +141"], BadRequest),
        ([b"Content-Length: 1_41"], BadRequest),
        ([b"Content-Length: 0x8d"], BadRequest),
        ([b"Content-Length: 1.0"], BadRequest),
        ([b"Content-Length: 1e2"], BadRequest),
        ([b"Content-Length: abc"], BadRequest),
        ([b"Content-Length: 14 1"], BadRequest),
        ([b"Content-Length: \xb2"], BadRequest),  # superscript two in latin-1
        ([b"Content-Length: \xc2\xb2"], BadRequest),  # and in UTF-8
        ([b"Content-Length: \xd9\xa1"], BadRequest),  # an Arabic one
        ([b"Content-Length: 141, 141"], BadRequest),
        ([b"Content-Length: 141", b"Content-Length: 10"], BadRequest),
        ([b"Content-Length: 141", b"Content-Length: 141"], BadRequest),
        ([b"Content-Length: 0", b"Content-Length: 0"], BadRequest),
        ([b"Content-Length: 5", b"Transfer-Encoding: chunked"], BadRequest),
        ([b"Transfer-Encoding: chunked", b"Content-Length: 5"], BadRequest),
        ([b"Transfer-Encoding: gzip"], NotImplementedMethod),
        ([b"Transfer-Encoding: gzip, chunked"], NotImplementedMethod),
        ([b"Transfer-Encoding: chunked, chunked"], NotImplementedMethod),
        ([b"Transfer-Encoding: identity"], NotImplementedMethod),
        ([b"Transfer-Encoding: xchunked"], NotImplementedMethod),
        ([b"Transfer-Encoding: chunked;q=1"], NotImplementedMethod),
        ([b"Transfer-Encoding: \x0bchunked"], BadRequest),
        ([b"Transfer-Encoding:"], NotImplementedMethod),
        ([b"Transfer-Encoding: chunked"] * 2, NotImplementedMethod),
    ],
)
def test_a_body_has_one_length_or_none(
    lines: list[bytes], expected: int | None | type[ServiceError]
) -> None:
    def measure() -> int | None:
        return body_length(head(*lines), LIMIT)

    if isinstance(expected, type):
        refused(expected, measure)
    else:
        assert measure() == expected


def test_http_1_0_has_no_transfer_coding() -> None:
    old = head(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0")
    refused(BadRequest, body_length, old, LIMIT)


# --- chunks -------------------------------------------------------------------------


def decode(data: bytes, limit: int = LIMIT) -> tuple[bytes, bytes]:
    decoder = ChunkedDecoder(limit)
    decoder.feed(data)
    assert decoder.done
    return bytes(decoder.body), decoder.rest


@pytest.mark.parametrize(
    ("data", "body", "rest"),
    [
        (b"0\r\n\r\n", b"", b""),
        (b"000\r\n\r\n", b"", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello", b""),
        (b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\nGET", b"hello!", b"GET"),
        (b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789", b""),
        (b"a;name=value\r\n0123456789\r\n0 ; x\r\n\r\n", b"0123456789", b""),
        (b"0000000000000005\r\nhello\r\n0\r\n\r\n", b"hello", b""),
        (b"2\r\n\r\n\r\n0\r\n\r\n", b"\r\n", b""),
        (b"1\r\nx\r\n0\r\nX-Sum: 1\r\nY: 2\r\n\r\nrest", b"x", b"rest"),
    ],
)
def test_a_chunked_body_is_decoded_however_it_is_cut(
    data: bytes, body: bytes, rest: bytes
) -> None:
    assert decode(data) == (body, rest)
    decoder = ChunkedDecoder(LIMIT)
    for number in range(len(data)):
        if not decoder.done:
            decoder.feed(data[number : number + 1])
    assert (bytes(decoder.body), decoder.done) == (body, True)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"-1\r\nx\r\n",
        b"+1\r\nx\r\n",
        b"0x1\r\nx\r\n",
        b"1_0\r\nx\r\n",
        b" 1\r\nx\r\n",
        b"1 \r\nx\r\n",
        b"g\r\nx\r\n",
        b"\xb2\r\nx\r\n",
        b"00000000000000001\r\nx\r\n",
        b"1\nx\n0\n\n",
        b"1\r\nxy\r\n",
        b"1\r\nx\n0\r\n\r\n",
        b"1\r\nx\rx",
        b"1;\x00\r\nx\r\n",
        b"1" + b";" + b"x" * 300,
        b"1" + b";" + b"x" * 300 + b"\r\n",
        b"0\r\nno header\r\n\r\n",
        b"0\r\n folded\r\n\r\n",
        b"0\r\n\n",
    ],
)
def test_a_malformed_chunk_is_refused(data: bytes) -> None:
    refused(BadRequest, ChunkedDecoder(LIMIT).feed, data)


@pytest.mark.parametrize("size", [b"3e9", b"FFFFFFFF", b"f" * 16])
def test_the_cap_holds_before_a_chunk_is_kept(size: bytes) -> None:
    decoder = ChunkedDecoder(LIMIT)
    decoder.feed(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
    refused(TooLarge, decoder.feed, size + b"\r\n")
    assert len(decoder.body) == LIMIT
    refused(TooLarge, ChunkedDecoder(LIMIT).feed, size + b"\r\n")


@pytest.mark.parametrize("first", [b"", b"3e8\r\n" + b"x" * 1000 + b"\r\n"])
def test_the_cap_holds_for_a_chunk_that_is_here_whole(first: bytes) -> None:
    decoder = ChunkedDecoder(LIMIT)
    whole = b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"
    refused(TooLarge, decoder.feed, first + whole)
    assert len(decoder.body) <= LIMIT


def test_a_line_of_the_limit_may_arrive_in_two_parts() -> None:
    line = b"1;" + b"x" * 254
    decoder = ChunkedDecoder(LIMIT)
    decoder.feed(line + b"\r")
    decoder.feed(b"\nx\r\n0\r\n\r\n")
    assert decoder.done
    refused(BadRequest, ChunkedDecoder(LIMIT).feed, line + b"x\r")


def test_chunks_and_trailers_are_bounded() -> None:
    decode(b"1\r\nx\r\n" * MAX_CHUNKS + b"0\r\n\r\n", limit=MAX_CHUNKS)
    refused(BadRequest, ChunkedDecoder(10**6).feed, b"1\r\nx\r\n" * (MAX_CHUNKS + 1))
    refused(
        HeadersTooLarge, ChunkedDecoder(LIMIT).feed, b"0\r\n" + b"X: 12345\r\n" * 1000
    )


# --- any bytes ----------------------------------------------------------------------

_LINES = st.sampled_from(
    [
        LINE,
        HOST,
        b"Content-Length: 5",
        b"Content-Length: 6",
        b"Transfer-Encoding: chunked",
        b"X: y",
        b"",
        b" x",
        b"X : y",
    ]
)


@given(st.one_of(st.binary(max_size=200), st.lists(_LINES).map(b"\r\n".join)))
def test_any_bytes_are_a_head_or_a_refusal(data: bytes) -> None:
    for call in (check_partial_head, parse_head):
        try:
            call(data)
        except ServiceError as error:
            assert error.status in (400, 414, 431, 505)


@given(st.lists(_LINES, max_size=6))
def test_no_head_with_two_framings_has_a_length(lines: list[bytes]) -> None:
    try:
        parsed = head(*lines)
        body_length(parsed, LIMIT)
    except ServiceError:
        return
    framings = [
        name
        for name, _ in parsed.headers
        if name in (b"content-length", b"transfer-encoding")
    ]
    assert len(framings) <= 1


@given(st.lists(st.binary(min_size=1, max_size=50)), st.data())
def test_chunks_decode_to_what_was_sent(
    parts: list[bytes], data: st.DataObject
) -> None:
    sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    sent += b"0\r\n\r\nrest"
    cut = data.draw(st.integers(0, len(sent) - 5))
    decoder = ChunkedDecoder(10_000)
    decoder.feed(sent[:cut])
    decoder.feed(sent[cut:])
    assert (bytes(decoder.body), decoder.rest) == (b"".join(parts), b"rest")


@given(st.binary(max_size=200))
def test_any_bytes_are_chunks_or_a_refusal(data: bytes) -> None:
    decoder = ChunkedDecoder(LIMIT)
    try:
        decoder.feed(data)
    except ServiceError as error:
        assert error.status in (400, 413, 431)
    assert len(decoder.body) <= LIMIT
