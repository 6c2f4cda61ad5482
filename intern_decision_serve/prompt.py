"""The prompt as the model sees it: its text, its sha256, the proof of both.

It renders with the checkpoint's own code and tokenizer and never writes a prompt of its
own. A tokenizer belongs to one thread: call all of this on the inference thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import InvalidRequest, StartupRefused

__all__ = ["check_token_count", "hash_prompt", "render_prompt", "run_client_step"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


def render_prompt(inference: Any, tokenizer: Any, request: dict[str, Any]) -> str:
    """Render the chat-template text of one call (INV-8).

    `inference` is the executed module, `tokenizer` the engine's own; the arguments are
    those `HFBackend.encode` uses. What `validate_request` raises passes through.
    """
    compiled = inference.compile_row(inference.validate_request(request))
    text: str = tokenizer.apply_chat_template(
        compiled.messages,
        tokenize=False,
        add_generation_prompt=False,
        enable_thinking=False,
        add_vision_id=True,
    )
    return text


def hash_prompt(text: str) -> str:
    """Return the sha256 of the text's UTF-8, 64 hex digits."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def check_token_count(tokenizer: Any, text: str, input_tokens: int) -> None:
    """Raise StartupRefused unless `text` is exactly `input_tokens` tokens (INV-8).

    A rendered text of another length is a prompt the model never saw.
    """
    counted = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    if counted != input_tokens:
        raise StartupRefused(
            f"the rendered prompt has {counted} tokens, predict() reports "
            f"{input_tokens}: prompt_sha256 would name another prompt"
        )


def run_client_step(step: Callable[[], T]) -> T:
    """Run pure code that only the request drives: whatever it raises is a 422."""
    try:
        return step()
    except ValueError as error:
        message = str(error) or "the model refuses this request"
    except Exception as error:
        kind = type(error).__name__
        message = f"the request cannot be turned into a prompt: {kind}"
        _log.warning("a request cannot be turned into a prompt: %s", kind)
    raise InvalidRequest(message)
