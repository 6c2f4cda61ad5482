"""Content-Encoding: gzip and zstd bodies, decoded under the body cap.

The official SDK sends zstd from 1 KiB up where it can. The cap holds for the decoded
size while decoding, so a bomb costs at most the cap. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

from .errors import InvalidRequest, TooLarge, UnsupportedEncoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["check_codings", "decode_body"]

MAX_MEMBERS = 16  # gzip members or zstd frames in one body; empty ones cost Python
ZSTD_WINDOW_LOG_MAX = 23  # 8 MiB, what RFC 8878 asks every decoder to support


def check_codings(codings: list[bytes]) -> str | None:
    """The one coding that Content-Encoding's tokens (lower case) name, if any.

    Raises UnsupportedEncoding; needs no body, so that none is asked for in vain.
    """
    match [coding for coding in codings if coding != b"identity"]:
        case []:
            return None
        case [b"gzip" | b"x-gzip"]:
            return "gzip"
        case [b"zstd"]:
            return "zstd"
    raise UnsupportedEncoding("Content-Encoding must be gzip, zstd or identity")


def decode_body(body: bytes, codings: list[bytes], max_body_bytes: int) -> bytes:
    """Decode by the Content-Encoding tokens (lower case); raises the ServiceError."""
    coding = check_codings(codings)
    if coding is None:
        return body
    return _decode(body, max_body_bytes, _DECODERS[coding], coding)


class _Gzip:
    """zlib's decompressor with the attributes of the zstd one."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(data, max_length)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


def _new_zstd() -> Any:
    return zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}
    )


_DECODERS: dict[str, Callable[[], Any]] = {"gzip": _Gzip, "zstd": _new_zstd}


def _decode(body: bytes, limit: int, new: Callable[[], Any], name: str) -> bytes:
    decoded = bytearray()
    data = body
    for _ in range(MAX_MEMBERS):
        decoder = new()
        try:
            decoded += decoder.decompress(data, max_length=limit + 1 - len(decoded))
        except (zlib.error, zstd.ZstdError):
            raise InvalidRequest(f"the body is not valid {name}") from None
        if len(decoded) > limit:
            raise TooLarge(f"the decoded body is over {limit} bytes")
        if not decoder.eof:
            raise InvalidRequest(f"the {name} body ends early")
        data = decoder.unused_data
        if not data:
            return bytes(decoded)
    raise InvalidRequest(f"more than {MAX_MEMBERS} {name} members in one body")
