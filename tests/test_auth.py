"""The bearer check answers right or 401, nothing else; weak tokens never start."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intern_decision_serve import auth
from intern_decision_serve.auth import check_bearer, check_token_strength, make_token
from intern_decision_serve.errors import Unauthorized

TOKEN = "!~" + "t" * 30


def is_accepted(values: list[bytes], token: str = TOKEN) -> bool:
    try:
        check_bearer(values, token)
    except Unauthorized as error:
        assert (error.status, error.code) == (401, "unauthorized")
        assert error.message == "missing or wrong bearer token"
        return False
    return True


@pytest.mark.parametrize(
    "token",
    [
        "",
        "t" * 31,
        "t" * 31 + " ",
        " " + "t" * 32,
        "t" * 32 + "\n",
        "t" * 32 + "\t",
        "t" * 32 + "\0",
        "t" * 32 + "\x7f",
        "t" * 32 + "\xe9",
        "\N{FULLWIDTH DIGIT EIGHT}" * 32,
        "t" * 32 + "\udcff",
    ],
)
def test_a_short_or_non_visible_ascii_token_is_refused_at_startup(token: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_token_strength(token)
    assert str(caught.value) == (
        "INTERN_DECISION_API_TOKEN: the token must be at least 32 visible ASCII "
        "characters (33-126)"
    )


def test_the_refusal_names_the_source_it_is_given() -> None:
    with pytest.raises(ValueError, match="^INTERN_DECISION_API_TOKEN_FILE: "):
        check_token_strength("short", "INTERN_DECISION_API_TOKEN_FILE")


@pytest.mark.parametrize("token", ["t" * 32, "".join(map(chr, range(33, 127)))])
def test_32_visible_ascii_characters_are_enough(token: str) -> None:
    check_token_strength(token)


def test_made_tokens_are_strong_and_differ() -> None:
    tokens = {make_token() for _ in range(8)}
    assert len(tokens) == 8
    for token in tokens:
        check_token_strength(token)


@pytest.mark.parametrize(
    "value",
    ["Bearer {}", "bearer {}", "BEARER {}", "bEaReR {}", "Bearer  {}", " Bearer {}\t "],
)
def test_the_right_token_is_accepted_in_any_case_of_the_scheme(value: str) -> None:
    assert is_accepted([value.format(TOKEN).encode()])


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [TOKEN.encode()],
        [b"Basic " + TOKEN.encode()],
        [b"Bearer:" + TOKEN.encode()],
        [b"Bearer\t" + TOKEN.encode()],
        [b"Bearer" + TOKEN.encode()],
        [b"Bearer " + TOKEN.encode()[:-1]],
        [b"Bearer " + TOKEN.encode() + b"t"],
        [b"Bearer " + TOKEN.encode() + b" x"],
        [b"Bearer " + TOKEN.upper().encode()],
        [b"Bearer caf\xe9"],
        [b"B\xe9arer " + TOKEN.encode()],
        [b"Bearer \xff\xfe\x00"],
        [b"Bearer " + b"t" * 100_000],
        [b"Bearer " + TOKEN.encode()] * 2,
        [b"Bearer " + TOKEN.encode(), b"Basic x"],
    ],
)
def test_anything_else_is_unauthorized(values: list[bytes]) -> None:
    assert not is_accepted(values)


@given(st.lists(st.binary(max_size=60), max_size=3), st.text(min_size=1, max_size=40))
def test_no_header_raises_anything_but_unauthorized(
    values: list[bytes], token: str
) -> None:
    is_accepted(values, token)
    is_accepted([b"Bearer " + value for value in values], token)


def test_the_token_is_compared_in_constant_time_on_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def record(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    class Recorder:
        compare_digest = staticmethod(record)

    monkeypatch.setattr(auth, "hmac", Recorder)
    assert not is_accepted([b"Bearer wrong"])
    assert is_accepted([b"Bearer " + TOKEN.encode()])
    expected = TOKEN.encode()
    assert compared == [(b"wrong", expected), (expected, expected)]
