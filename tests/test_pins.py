"""The pins are the published facts, digit for digit."""

from __future__ import annotations

import dataclasses
import re

import pytest

from intern_decision_serve import pins
from intern_decision_serve.pins import DEFAULT_MODEL, FAMILY, PINNED_STACK, ModelPins

# name -> revision, inference.py sha256, temperature
FACTS = {
    "Intern-Decision-4B": (
        "0e5e6aa7d6d750e2b1504ba11a8136cb58aeb3cd",
        "c904e2c67ca0775621a22375ee373d2ba30b52117cda870c6c9ef74143b29863",
        1.99241824,
    ),
    "Intern-Decision-2B": (
        "8797836c65fc91a2435b1fb6850b5f0aabd75cc3",
        "2918862f34770c6db57cf3f86666cbd7cff1139b24f300fef01d9146584d4fd8",
        2.100509348278,
    ),
    "Intern-Decision-0.8B": (
        "85a0cc5a99d67ea8d56dfe98115689212867171d",
        "62664f5bebb593e825370f82b2733edd13b16118b436d09db2f0c36405b9b4ea",
        2.747760550703,
    ),
}


def test_the_family_is_the_three_published_models() -> None:
    assert {
        name: (model.revision, model.inference_sha256, model.temperature)
        for name, model in FAMILY.items()
    } == FACTS


@pytest.mark.parametrize("model", FAMILY.values(), ids=FAMILY.keys())
def test_a_model_is_fully_pinned(model: ModelPins) -> None:
    assert model.name in FAMILY
    assert model.source == f"internlm/{model.name}"
    assert re.fullmatch("[0-9a-f]{40}", model.revision)
    assert re.fullmatch("[0-9a-f]{64}", model.inference_sha256)
    assert model.min_python == (3, 12)


def test_the_default_is_the_contracts_model() -> None:
    model = FAMILY[DEFAULT_MODEL]
    assert model.default_checkpoint == (
        "/hf/hub/models--internlm--Intern-Decision-4B/snapshots/"
        "0e5e6aa7d6d750e2b1504ba11a8136cb58aeb3cd"
    )
    assert model.prompt_version == "inference.py@c904e2c67ca0"
    assert model.probability_status == (
        "temperature-scaled, vendor calibration, T=1.99241824"
    )
    assert model.served_as == (
        "Intern-Decision-4B@0e5e6aa7d6d750e2b1504ba11a8136cb58aeb3cd"
    )


def test_the_limits_are_the_models_and_the_contracts() -> None:
    assert pins.MAX_QUESTIONS_PER_CALL == 16
    assert pins.MAX_OPTIONS_PER_DECISION == 16


def test_the_pinned_stack_is_the_contracts() -> None:
    assert PINNED_STACK == {
        "torch": "2.10.0",
        "transformers": "5.17.0",
        "flash-linear-attention": "0.5.2",
        "fla-core": "0.5.2",
        "causal-conv1d": "1.7.0",
    }


def test_pins_cannot_be_changed_at_run_time() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FAMILY[DEFAULT_MODEL].revision = "x"  # type: ignore[misc]


def test_the_constant_strings_are_one_line_each() -> None:
    for text in (pins.READOUT, pins.CHUNKING, pins.SERVING_CONFIG):
        assert text.splitlines() == [text]
