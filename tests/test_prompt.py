"""The hashed text is rendered by the checkpoint's own code, with encode's arguments."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from intern_decision_serve.errors import StartupRefused
from intern_decision_serve.prompt import check_token_count, hash_prompt, render_prompt


class FakeTokenizer:
    """Joins the messages' contents; one token per word."""

    def __init__(self) -> None:
        self.templated: list[dict[str, Any]] = []
        self.tokenised: list[dict[str, Any]] = []

    def apply_chat_template(self, messages: list[str], **arguments: Any) -> str:
        self.templated.append(arguments)
        return " ".join(messages)

    def __call__(self, text: str, **arguments: Any) -> dict[str, list[int]]:
        self.tokenised.append(arguments)
        return {"input_ids": list(range(len(text.split())))}


def fake_inference() -> Any:
    def validate_request(request: dict[str, Any]) -> dict[str, Any]:
        if "state" not in request:
            raise ValueError("state is missing")
        return {"row": request["state"]}

    def compile_row(row: dict[str, Any]) -> Any:
        return SimpleNamespace(messages=["system", row["row"], "assistant"])

    return SimpleNamespace(validate_request=validate_request, compile_row=compile_row)


def test_the_prompt_is_compiled_from_the_validated_row() -> None:
    tokenizer = FakeTokenizer()
    text = render_prompt(fake_inference(), tokenizer, {"state": "caf\xe9"})
    assert text == "system caf\xe9 assistant"
    assert tokenizer.templated == [
        {
            "tokenize": False,
            "add_generation_prompt": False,
            "enable_thinking": False,
            "add_vision_id": True,
        }
    ]


def test_what_the_prompt_builder_rejects_passes_through() -> None:
    with pytest.raises(ValueError, match="^state is missing$"):
        render_prompt(fake_inference(), FakeTokenizer(), {})


@pytest.mark.parametrize("text", ["", "plain", "caf\xe9 \N{GRINNING FACE}"])
def test_the_hash_is_of_the_texts_utf8(text: str) -> None:
    assert hash_prompt(text) == hashlib.sha256(text.encode("utf-8")).hexdigest()


def test_an_equal_token_count_is_accepted_without_special_tokens() -> None:
    tokenizer = FakeTokenizer()
    check_token_count(tokenizer, "one two three", 3)
    assert tokenizer.tokenised == [{"add_special_tokens": False}]


@pytest.mark.parametrize("input_tokens", [0, 2, 4])
def test_a_token_count_mismatch_refuses_to_start(input_tokens: int) -> None:
    with pytest.raises(StartupRefused) as caught:
        check_token_count(FakeTokenizer(), "one two three", input_tokens)
    assert str(caught.value) == (
        f"the rendered prompt has 3 tokens, predict() reports {input_tokens}: "
        "prompt_sha256 would name another prompt"
    )
