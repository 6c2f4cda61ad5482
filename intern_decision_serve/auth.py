"""The bearer token: its strength at startup, the constant-time check per request.

It never logs, never shows a token and answers every wrong header with one message.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

from .errors import Unauthorized

__all__ = ["check_bearer", "check_token_strength", "make_token"]

_MIN_CHARACTERS = 32
_REFUSAL = "missing or wrong bearer token"


def check_token_strength(token: str, source: str = "INTERN_DECISION_API_TOKEN") -> None:
    """Raise ValueError for a token that startup must refuse (INV-6).

    `source` is the setting the token came from, for the message.
    """
    visible = all(33 <= ord(character) <= 126 for character in token)
    if len(token) < _MIN_CHARACTERS or not visible:
        raise ValueError(
            f"{source}: the token must be at least {_MIN_CHARACTERS} visible ASCII "
            "characters (33-126)"
        )


def make_token() -> str:
    """Make a random token that `check_token_strength` accepts."""
    return secrets.token_urlsafe(32)


def check_bearer(header_values: Sequence[bytes], token: str) -> None:
    """Raise Unauthorized unless exactly one Authorization value carries `token`.

    `header_values` are the raw bytes of every Authorization field. The scheme may be
    in any case (RFC 9110, 11.1); one or more spaces follow it (INV-6).
    """
    if len(header_values) != 1:
        raise Unauthorized(_REFUSAL)
    scheme, _, credentials = header_values[0].strip(b" \t").partition(b" ")
    # compare_digest refuses str that is not ASCII, so both sides are bytes
    expected = token.encode("utf-8", "surrogatepass")
    matches = hmac.compare_digest(credentials.lstrip(b" "), expected)
    if scheme.lower() != b"bearer" or not matches:
        raise Unauthorized(_REFUSAL)
