"""Encode ahead: the next call's CPU part, done while the card works on this one.

    encoder thread                           inference thread
    prepare(request): the pinned file's      predict(request) -> backend.encode(row)
    validate, compile, render, tokenise ->   finds the prepared triple, moves it to
    on a tokenizer only this thread uses     the device, runs the model

Measured (H200): 1.14x throughput at 6,389 tokens; no gain under about 3,000, so short
requests are left alone. It must never touch CUDA, the model, or the tokenizer of the
inference thread, and never write a prompt of its own.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .memory import format_failure
from .prompt import hash_prompt, render_prompt
from .warmup import WARMUP

__all__ = [
    "EncodeAhead",
    "Prepared",
    "Preparer",
    "is_worth_preparing",
    "make_preparer",
]

_log = logging.getLogger(__name__)

# A prompt of fewer bytes cannot be over MAX_TOKENS' default either: every token of a
# byte-level tokenizer holds at least one byte.
SHORTEST_PREPARED_BYTES = 8192

# A legal MiB takes the tokenizer 2 to 7 s, and turning its ids into lists holds the GIL
# for up to 290 ms. So a prompt far too long is refused by its beginning: one with twice
# MAX_TOKENS in its first 12 characters a token cannot fit as a whole.
BEGINNING_CHARACTERS_A_TOKEN = 12


@dataclass(frozen=True, slots=True)
class Prepared:
    """One call, encoded: `encoded` is what `backend.encode` returns, on the host."""

    request: dict[str, Any]
    prompt_sha256: str
    encoded: tuple[Any, ...]


def is_worth_preparing(request: dict[str, Any]) -> bool:
    """Tell a long request cheaply; its rendered text is never shorter than this one."""
    text = json.dumps(request, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode("utf-8", "surrogatepass")) >= SHORTEST_PREPARED_BYTES


class Preparer:
    """A shadow of the checkpoint's backend: its own tokenizer, the CPU, no model."""

    def __init__(self, inference: Any, backend: Any) -> None:
        self._inference = inference
        self._shadow = _shadow_backend(backend)

    def prepare(self, request: dict[str, Any]) -> Prepared:
        """Encode one call; raises what the pinned code raises. Encoder thread only."""
        text = render_prompt(self._inference, self._shadow.tokenizer, request)
        _check_beginning(self._shadow, text)
        row = self._inference.validate_request(request)
        encoded = type(self._shadow).encode(self._shadow, row)
        return Prepared(request, hash_prompt(text), tuple(encoded))


def _check_beginning(shadow: Any, text: str) -> None:
    """Raise ValueError for a prompt whose beginning alone has twice `max_length`."""
    tokenizer = getattr(shadow.tokenizer, "backend_tokenizer", None)
    limit = shadow.max_length
    beginning = text[: BEGINNING_CHARACTERS_A_TOKEN * limit]
    if tokenizer is None or len(beginning) == len(text):
        return
    # The batch call is the one that releases the GIL.
    [encoding] = tokenizer.encode_batch([beginning], add_special_tokens=False)
    if len(encoding) > 2 * limit:
        raise ValueError(f"the prompt has over {2 * limit} tokens, limit is {limit}")


def _shadow_backend(backend: Any) -> Any:
    shadow = copy.copy(backend)
    memo: dict[int, Any] = {}  # processor and tokenizer may share objects
    shadow.tokenizer = copy.deepcopy(backend.tokenizer, memo)
    shadow.processor = copy.deepcopy(backend.processor, memo)
    shadow.device = type(backend.device)("cpu")
    shadow.model = None
    return shadow


def make_preparer(
    inference: Any, backend: Any, encode: Callable[[Any], Any]
) -> Preparer | None:
    """Build the shadow and prove it on the warm-up; None where it encodes otherwise.

    Called once at load, before the encoder thread first uses the shadow.
    """
    try:
        preparer = Preparer(inference, backend)
        ahead = preparer.prepare(WARMUP).encoded
        now = encode(inference.validate_request(WARMUP))
        same = len(ahead) == len(now) == 3 and _plain(ahead[1:]) == _plain(now[1:])
    except Exception as error:
        _log.warning("encode-ahead is off: %s", format_failure(error))
        return None
    if not same:
        _log.warning("encode-ahead is off: its shadow encodes the warm-up otherwise")
    return preparer if same else None


def _plain(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


class EncodeAhead:
    """Stands in for `backend.encode`: hands out what was prepared, else encodes.

    `prepared` is set for one call and taken by it. Inference thread only.
    """

    def __init__(self, encode: Callable[[Any], Any], device: Any) -> None:
        self.prepared: Prepared | None = None
        self._encode = encode
        self._device = device

    def __call__(self, row: Any) -> Any:
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return self._encode(row)
        return tuple(_to_device(part, self._device) for part in prepared.encoded)


def _to_device(value: Any, device: Any) -> Any:
    """Move every tensor in a batch of any usual shape; leave all else as it is."""
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _to_device(item, device) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_device(item, device) for item in value)
    return value
