"""Steps of the load that touch neither cap nor warm-up: import, construct, describe.

It must never weaken a refusal: what fails here ends the start with one line.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from .device import is_card_full, name_device
from .errors import (
    DeviceAbsent,
    EngineFailed,
    OutOfMemory,
    ServiceError,
    StartupRefused,
)
from .memory import format_failure, is_context_lost, is_out_of_memory
from .pins import SERVING_CONFIG, ModelPins

__all__ = [
    "construct",
    "describe",
    "find_longest_token",
    "import_torch",
    "refuse_service_errors",
]

_log = logging.getLogger(__name__)


def import_torch() -> Any:
    """Import torch on this thread, the only one that may meet the driver (INV-2)."""
    try:
        return importlib.import_module("torch")
    except Exception as error:
        _log.error("torch does not import:\n%s", format_failure(error))
        raise StartupRefused(
            f"torch does not import: {_first_line(error)}; "
            "install the 'cuda' or the 'demo' extra"
        ) from None


def construct(
    torch: Any, build: Callable[[], Any], index: int | None, cap_gib: float | None
) -> Any:
    """Build the checkpoint's own DecisionEngine; DeviceAbsent if the card is at fault.

    A restart helps when other processes fill the card or it fails, and only then.
    """
    _hide_progress_bars()
    try:
        return build()
    except Exception as error:
        _log.error("the checkpoint does not load:\n%s", format_failure(error))
        refusal = _explain(torch, error, index, cap_gib)
    raise refusal


def _explain(
    torch: Any, error: Exception, index: int | None, cap_gib: float | None
) -> StartupRefused:
    if is_out_of_memory(torch, error):
        if index is not None and is_card_full(torch, index, cap_gib):
            return DeviceAbsent("the card has no room left for the weights")
        return StartupRefused(
            f"the weights do not fit: INTERN_DECISION_VRAM_CAP_GIB is {cap_gib:g}"
            if cap_gib
            else "the weights do not fit in memory"
        )
    if is_context_lost(torch, error):
        return DeviceAbsent(f"the card failed at the weights: {_first_line(error)}")
    kind = type(error).__name__
    return StartupRefused(f"the checkpoint does not load: {kind}: {_first_line(error)}")


def _hide_progress_bars() -> None:
    """Keep carriage returns out of the journal; `progress` says where loading is."""
    bars = sys.modules.get("transformers.utils.logging")
    if bars is not None:
        bars.disable_progress_bar()


def describe(
    pins: ModelPins, torch: Any, decision_engine: Any, index: int | None
) -> dict[str, Any]:
    """Build the `model` object of `/health` and of every decision result."""
    first_weight = next(iter(decision_engine.backend.model.parameters()))
    transformers = sys.modules.get("transformers")
    return {
        "name": pins.name,
        "source": pins.source,
        "revision": pins.revision,
        "dtype": str(first_weight.dtype).removeprefix("torch."),
        "device": name_device(torch, index),
        "torch_version": str(torch.__version__),
        "transformers_version": getattr(transformers, "__version__", None),
        "serving_config": SERVING_CONFIG,
        "inference_sha256": pins.inference_sha256,
        "chat_template_sha256": _hash_template(decision_engine.tokenizer),
    }


def _hash_template(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def find_longest_token(tokenizer: Any) -> int:
    """Return the characters of the longest token, added ones included.

    A byte-level vocabulary spells every byte as one character, so no token stands for
    more characters of text than its spelling has.
    """
    return max(len(token) for token in tokenizer.get_vocab())


def refuse_service_errors(step: Callable[[], None]) -> None:
    """Run a startup step: what a client would be told becomes a refusal to start."""
    try:
        step()
        return
    except OutOfMemory:
        refusal: StartupRefused = StartupRefused(
            "the warm-up does not fit in the GPU's memory: raise "
            "INTERN_DECISION_VRAM_CAP_GIB or free the card"
        )
    except EngineFailed:
        refusal = DeviceAbsent("the GPU or its context failed during the warm-up")
    except ServiceError as error:
        refusal = StartupRefused(f"the warm-up does not score: {error.message}")
    raise refusal


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or "no message"
