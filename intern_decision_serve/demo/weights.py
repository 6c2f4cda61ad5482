"""Random weights in the real architecture: the shapes, and one seeded model of each.

It must never import torch before it is asked for a model, nor leave the caller's
random state or default dtype changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["SIZES", "make_config", "write_weights"]

SEED = 20260930

# An initializer range of about 1/sqrt(hidden) keeps the layers' part of the residual
# as large as the embedding's: the answers depend on the state, and differ by option.
_TINY_TEXT = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,  # three gated delta nets, then one full attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "initializer_range": 0.15,
}
_TINY_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
_4B_TEXT = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "initializer_range": 0.02,
}
_4B_VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2560,
}

# size -> text shape, vision shape, largest shard
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tiny": (
        _TINY_TEXT,
        _TINY_VISION,
        "1MB",
    ),  # several shards and an index, to be checked
    "4b": (_4B_TEXT, _4B_VISION, "5GB"),
}


def write_weights(
    directory: Path, size: str, token_ids: Mapping[str, int], *, device: str = "cpu"
) -> None:
    """Write config and bf16 shards of a random model, drawn on `device`.

    The same size and device give the same bytes each time. A CUDA device keeps some
    of its memory for this process: make a large one in a process of its own.
    """
    import torch
    import transformers

    # The library's own functions have no types to check calls against.
    model_class: Any = transformers.Qwen3_5ForConditionalGeneration
    shard_size = SIZES[size][2]
    config = make_config(size, token_ids)
    with _drawing_on(torch.device(device)):
        model = model_class(config)
        _look_further_back(model)
    model.generation_config.pad_token_id = token_ids["<|endoftext|>"]
    model.generation_config.eos_token_id = token_ids["<|im_end|>"]
    with _without_progress_bar():
        model.save_pretrained(directory, max_shard_size=shard_size)


def make_config(size: str, token_ids: Mapping[str, int]) -> Any:
    """Return the Qwen3_5Config of a size, over a tokenizer's special tokens."""
    from transformers import Qwen3_5Config

    text, vision, _ = SIZES[size]
    # A quarter of every head rotates; its frequencies are shared by time and two axes.
    pairs = text["head_dim"] // 8
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": sections,
    }
    return Qwen3_5Config(
        text_config={
            **text,
            "max_position_embeddings": 262144,
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            "eos_token_id": token_ids["<|im_end|>"],
            "pad_token_id": token_ids["<|endoftext|>"],
        },
        vision_config=vision,
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def _look_further_back(model: Any) -> None:
    """Make the answers depend on the state, a few hundred tokens before the readout.

    As initialised, a delta net forgets within a token and attention averages all.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.model.language_model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.001, 0.05).log_()
            elif name.endswith("q_norm.weight"):
                parameter.fill_(3.0)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _drawing_on(device: torch.device) -> Iterator[None]:
    import torch

    # CPU only: forking every card's state would start CUDA on the caller's thread.
    forked = [device] if device.type == "cuda" else []
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=forked), device:
        torch.manual_seed(SEED)
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
