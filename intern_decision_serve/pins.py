"""The pinned family: which files are trusted, and the limits those files fix.

Facts only. Nothing here reads a file or a setting.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CHUNKING",
    "DEFAULT_MODEL",
    "FAMILY",
    "MAX_OPTIONS_PER_DECISION",
    "MAX_QUESTIONS_PER_CALL",
    "PINNED_STACK",
    "READOUT",
    "SERVING_CONFIG",
    "ModelPins",
]

MAX_QUESTIONS_PER_CALL = 16  # the pinned validate_request refuses a 17th
MAX_OPTIONS_PER_DECISION = 16  # the contract's limit on /decide; the model's is 62

READOUT = "softmax over the option symbols at each <decision> position"
CHUNKING = "greedy, request order, at most 16 questions a call, one wave per ordering"
SERVING_CONFIG = "transformers, bfloat16, sdpa, text only, one inference thread"


@dataclass(frozen=True, slots=True)
class ModelPins:
    """One checkpoint: the revision and code hash that startup insists on (INV-3).

    `source` is the repository the checkpoint came from, `min_python` the oldest
    interpreter its inference.py compiles on, `temperature` the calibration it ships.
    """

    name: str
    source: str
    revision: str
    inference_sha256: str
    temperature: float
    min_python: tuple[int, int]

    @property
    def default_checkpoint(self) -> str:
        """The snapshot's place in the mounted cache."""
        folder = "models--" + self.source.replace("/", "--")
        return f"/hf/hub/{folder}/snapshots/{self.revision}"

    @property
    def prompt_version(self) -> str:
        """Names the code that writes the prompt: the first 12 digits of its sha256."""
        return f"inference.py@{self.inference_sha256[:12]}"

    @property
    def probability_status(self) -> str:
        """Says whose calibration the probabilities carry (Deltas 3)."""
        return f"temperature-scaled, vendor calibration, T={self.temperature}"

    @property
    def served_as(self) -> str:
        """The `model` string of a /v1/systemone answer."""
        return f"{self.name}@{self.revision}"


def _pinned(
    name: str, revision: str, inference_sha256: str, temperature: float
) -> ModelPins:
    return ModelPins(
        name=name,
        source=f"internlm/{name}",
        revision=revision,
        inference_sha256=inference_sha256,
        temperature=temperature,
        min_python=(3, 12),
    )


FAMILY: dict[str, ModelPins] = {
    pins.name: pins
    for pins in (
        _pinned(
            "Intern-Decision-4B",
            "0e5e6aa7d6d750e2b1504ba11a8136cb58aeb3cd",
            "c904e2c67ca0775621a22375ee373d2ba30b52117cda870c6c9ef74143b29863",
            1.99241824,
        ),
        _pinned(
            "Intern-Decision-2B",
            "8797836c65fc91a2435b1fb6850b5f0aabd75cc3",
            "2918862f34770c6db57cf3f86666cbd7cff1139b24f300fef01d9146584d4fd8",
            2.100509348278,
        ),
        _pinned(
            "Intern-Decision-0.8B",
            "85a0cc5a99d67ea8d56dfe98115689212867171d",
            "62664f5bebb593e825370f82b2733edd13b16118b436d09db2f0c36405b9b4ea",
            2.747760550703,
        ),
    )
}

DEFAULT_MODEL = "Intern-Decision-4B"

# Distribution -> version of the stack the contract's numbers were measured on.
PINNED_STACK: dict[str, str] = {
    "torch": "2.10.0",
    "transformers": "5.17.0",
    "flash-linear-attention": "0.5.2",
    "fla-core": "0.5.2",
    "causal-conv1d": "1.7.0",
}
