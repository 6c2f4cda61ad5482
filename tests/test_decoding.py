"""Encoded bodies: decoded under the cap, or refused with the right status."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intern_decision_serve.decoding import MAX_MEMBERS, check_codings, decode_body
from intern_decision_serve.errors import (
    InvalidRequest,
    ServiceError,
    TooLarge,
    UnsupportedEncoding,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMIT = 10_000
TEXT = b'{"state": "s"}' * 20
ENCODERS = {b"gzip": gzip.compress, b"x-gzip": gzip.compress, b"zstd": zstd.compress}


def refused(body: bytes, *codings: bytes, limit: int = LIMIT) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        decode_body(body, list(codings), limit)
    return caught.value


@pytest.mark.parametrize("codings", [[], [b"identity"], [b"identity", b"identity"]])
def test_identity_is_the_body_itself(codings: list[bytes]) -> None:
    assert decode_body(TEXT, codings, LIMIT) == TEXT


@pytest.mark.parametrize("coding", ENCODERS)
@pytest.mark.parametrize("body", [b"", b"x", TEXT, bytes(LIMIT)])
def test_each_coding_gives_back_what_was_sent(coding: bytes, body: bytes) -> None:
    encoded = ENCODERS[coding](body)
    assert decode_body(encoded, [coding], LIMIT) == body
    assert decode_body(encoded, [coding, b"identity"], LIMIT) == body


@pytest.mark.parametrize(
    "codings",
    [[b"br"], [b"deflate"], [b"*"], [b"gzip", b"zstd"], [b"gzip", b"gzip"], [b"GZIP"]],
)
def test_any_other_coding_is_415_and_needs_no_body(codings: list[bytes]) -> None:
    for call in (
        lambda: decode_body(TEXT, codings, LIMIT),
        lambda: check_codings(codings),
    ):
        with pytest.raises(UnsupportedEncoding) as caught:
            call()
        assert caught.value.message == (
            "Content-Encoding must be gzip, zstd or identity"
        )


@pytest.mark.parametrize("coding", [b"gzip", b"zstd"])
def test_the_cap_holds_for_the_decoded_size(coding: bytes) -> None:
    error = refused(ENCODERS[coding](bytes(LIMIT + 1)), coding)
    assert (type(error), error.message) == (
        TooLarge,
        f"the decoded body is over {LIMIT} bytes",
    )
    halves = ENCODERS[coding](bytes(LIMIT // 2 + 1))
    assert isinstance(refused(halves * 2, coding), TooLarge)


@pytest.mark.parametrize("coding", [b"gzip", b"zstd"])
def test_a_bomb_costs_no_more_than_the_cap(coding: bytes) -> None:
    bomb = ENCODERS[coding](bytes(200 * 1024 * 1024))
    tracemalloc.start()
    assert isinstance(refused(bomb, coding, limit=1024 * 1024), TooLarge)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


@pytest.mark.parametrize("coding", [b"gzip", b"zstd"])
@pytest.mark.parametrize("damage", ["cut", "empty", "junk", "tail"])
def test_a_damaged_body_is_422_never_500(coding: bytes, damage: str) -> None:
    good = ENCODERS[coding](TEXT)
    damaged = {
        "cut": good[:-3],
        "empty": b"",
        "junk": TEXT,
        "tail": good + b"junk",
    }[damage]
    error = refused(damaged, coding)
    assert isinstance(error, InvalidRequest)
    assert coding.decode() in error.message


def test_a_wrong_checksum_is_422() -> None:
    good = gzip.compress(TEXT)
    flipped = good[:-6] + bytes([good[-6] ^ 255]) + good[-5:]
    assert isinstance(refused(flipped, b"gzip"), InvalidRequest)


@pytest.mark.parametrize("coding", [b"gzip", b"zstd"])
def test_members_follow_each_other_in_a_bounded_number(coding: bytes) -> None:
    encoded = ENCODERS[coding](b"x")
    assert decode_body(encoded * MAX_MEMBERS, [coding], LIMIT) == b"x" * MAX_MEMBERS
    error = refused(encoded * (MAX_MEMBERS + 1), coding)
    expected = f"more than {MAX_MEMBERS} {coding.decode()} members in one body"
    assert (type(error), error.message) == (InvalidRequest, expected)


def test_a_zstd_window_over_8_mib_is_not_given_its_memory() -> None:
    options = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    frame = compressor.compress(bytes(1000)) + compressor.flush()
    assert isinstance(refused(frame, b"zstd"), InvalidRequest)


def test_zlib_without_its_gzip_frame_is_not_gzip() -> None:
    assert isinstance(refused(zlib.compress(TEXT), b"gzip"), InvalidRequest)


@given(
    st.sampled_from([b"gzip", b"zstd"]), st.binary(max_size=100), st.binary(max_size=9)
)
def test_any_bytes_decode_or_are_refused(
    coding: bytes, body: bytes, tail: bytes
) -> None:
    for data in (
        body,
        ENCODERS[coding](body) + tail,
        ENCODERS[coding](body)[:-1] + tail,
    ):
        try:
            assert len(decode_body(data, [coding], LIMIT)) <= LIMIT
        except ServiceError as error:
            assert error.status in (413, 422)
