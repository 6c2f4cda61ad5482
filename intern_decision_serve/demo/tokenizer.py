"""The demo tokenizer: byte-level BPE made on the spot, the same bytes everywhere.

It owns the special tokens and the chat template's place in the tokenizer's files. It
must never read training text from outside the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from intern_decision_serve.demo.words import WORDS

__all__ = ["SPECIAL_TOKENS", "read_template", "write_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
    "<decision>",
)
VOCAB_SIZE = 8192  # about 3.5 characters of plain English a token
MODEL_MAX_LENGTH = 262144


def read_template() -> str:
    """Return the chat template as packaged."""
    return files(__package__).joinpath("chat_template.jinja").read_text("utf-8")


def write_tokenizer(directory: Path) -> dict[str, int]:
    """Write the tokenizer's files; return the id of every special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        show_progress=False,
        # all 256 bytes, so that any text is encoded and every answer symbol is a token
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_write_training_text(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(_describe_tokenizer(), indent=2) + "\n", "utf-8"
    )
    (directory / "chat_template.jinja").write_text(read_template(), "utf-8")
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in SPECIAL_TOKENS}


def _write_training_text() -> Iterator[str]:
    for word in WORDS:
        title, stem = word.capitalize(), word.removesuffix("e")
        # inside a sentence is where a word stands most, so that form is learned first
        yield f" {word}" * 8
        yield f" {word}s {stem}ed {stem}ing {stem}er {word}ly {title}"
        yield f"{title}\n\n## {title}\n\n- {word}, {word}.\n({word})"
        yield json.dumps({word: word}, indent=2)
        yield json.dumps({"state": [{word: word}]}, indent=4)


def _describe_tokenizer() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
    }
