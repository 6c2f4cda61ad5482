"""The demo checkpoint's own inference code: prompt, forward, readout, calibration.

This file is copied byte for byte into the demo snapshot and executed from there, as
a real checkpoint's is. It reads text only, needs torch and transformers and nothing
else, imports nothing of the serving package, and must never truncate a prompt.
"""

from __future__ import annotations

import copy
import json
import math
import string
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration

__all__ = ["DecisionEngine", "HFBackend", "compile_row", "validate_request"]

MODEL_NAME = "Intern-Decision-Demo"
DEFAULT_TEMPERATURE = 1.5
DECISION_TOKEN = "<decision>"
ANSWER_SYMBOLS = string.ascii_uppercase + string.ascii_lowercase + string.digits
MAX_QUESTIONS = 16
SYSTEM_PROMPT = (
    "You settle decisions. Every field of the schema takes exactly one of the "
    "symbols listed under it, judged by the state alone."
)

Row = dict[str, Any]
Options = tuple[tuple[str, str], ...]  # (value, description), in prompt order

_USER_LINE = "Settle every field of the schema for this state."
_CRITERIA: dict[str, tuple[tuple[type, ...], str]] = {
    "choice": ((dict,), "an object"),
    "score": ((list, dict), "a list or an object"),
    "noul": ((object,), "anything"),
}
_NOUL_WORDS = {"no": "no", "false": "no", "0": "no"}
_NOUL_WORDS |= {"yes": "yes", "true": "yes", "1": "yes"}


@dataclass(frozen=True)
class CompiledRow:
    """One prompt: its chat messages and, per field, symbols parallel to options."""

    messages: list[dict[str, str]]
    fields: tuple[str, ...]
    symbols: dict[str, tuple[str, ...]]
    options: dict[str, Options]


def validate_request(request: Any) -> Row:
    """Return a deep copy of what the prompt needs; ValueError on a wrong shape.

    The state may be any value: whoever serves this decides what is empty.
    """
    if not isinstance(request, dict):
        raise ValueError("the request must be an object")
    if "state" not in request:
        raise ValueError("the request has no state")
    if request.get("images"):
        raise ValueError("images are not supported: this checkpoint reads text only")
    questions = request.get("questions")
    if not isinstance(questions, dict):
        raise ValueError("questions must be an object")
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise ValueError(f"questions must hold 1 to 16 fields, not {len(questions)}")
    for name, question in questions.items():
        _check_question(name, question)
    return copy.deepcopy({"state": request["state"], "questions": questions})


def _check_question(name: Any, question: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError("field names must be nonempty strings")
    if not isinstance(question, dict):
        raise ValueError(f"question {name!r} must be an object")
    kind, criteria = question.get("type"), question.get("criteria")
    if kind not in _CRITERIA:
        raise ValueError(f"question {name!r}: type must be choice, score or noul")
    types, shape = _CRITERIA[kind]
    if not isinstance(criteria, types):
        raise ValueError(f"question {name!r}: {kind} criteria must be {shape}")
    options = _list_options(kind, criteria)
    if not 1 <= len(options) <= len(ANSWER_SYMBOLS):
        raise ValueError(f"question {name!r}: {len(options)} options, not 1 to 62")
    if kind == "score" and not all(_is_finite(value) for value, _ in options):
        raise ValueError(f"question {name!r}: score values must be finite numbers")


def _is_finite(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _list_options(kind: str, criteria: Any) -> Options:
    """List a checked question's options; a null description reads None."""
    if kind == "noul":
        described = {"no": "the answer is no", "yes": "the answer is yes"}
        given = criteria if isinstance(criteria, dict) else {}
        for key, description in given.items():
            if (value := _NOUL_WORDS.get(str(key).lower())) is not None:
                described[value] = str(description)
        return tuple(described.items())
    pairs = enumerate(criteria) if isinstance(criteria, list) else criteria.items()
    return tuple((str(value), str(description)) for value, description in pairs)


def compile_row(row: Row) -> CompiledRow:
    """Write the chat messages of a validated row.

    ValueError for a decision token in the user text: answers are read there.
    """
    options = {
        name: _list_options(question["type"], question.get("criteria"))
        for name, question in row["questions"].items()
    }
    symbols = {name: tuple(ANSWER_SYMBOLS[: len(o)]) for name, o in options.items()}
    user = _write_user_text(row, options)
    if DECISION_TOKEN in user:
        raise ValueError(f"{DECISION_TOKEN} is reserved and may not be in the input")
    blanks = dict.fromkeys(options, DECISION_TOKEN)
    assistant = json.dumps(blanks, indent=4, ensure_ascii=False)
    return CompiledRow(
        messages=[
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ],
        fields=tuple(options),
        symbols=symbols,
        options=options,
    )


def _write_user_text(row: Row, options: dict[str, Options]) -> str:
    state = json.dumps(row["state"], indent=2, ensure_ascii=False)
    lines = [_USER_LINE, "", "## State", state, "", "## Decision schema"]
    for name, pairs in options.items():
        lines.append(f"{name}: {row['questions'][name].get('instructions')}")
        for symbol, (value, text) in zip(ANSWER_SYMBOLS, pairs, strict=False):
            lines.append(f"    {symbol} = {value}: {text}")
    return "\n".join(lines)


class HFBackend:
    """Tokenizer and model: one row in, one forward, the logits of every field out."""

    def __init__(
        self, path: str, *, max_length: int, device: str, dtype: str, attn: str
    ) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.processor = self.tokenizer  # text only: there is no image processor
        self.device = torch.device(device)
        self.max_length = max_length
        self.marker_id = self.tokenizer.convert_tokens_to_ids(DECISION_TOKEN)
        model: Any = Qwen3_5ForConditionalGeneration.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=attn,
            local_files_only=True,
        )
        self.model = model.to(self.device).eval()

    def encode(self, row: Row) -> tuple[CompiledRow, dict[str, Any], torch.Tensor]:
        """Render and tokenise a row; the tensors stay on the host.

        The returned positions are one before each decision token, where the model is
        about to write it. ValueError when the prompt is longer than `max_length`.
        """
        compiled = compile_row(row)
        text = self.tokenizer.apply_chat_template(
            compiled.messages,
            tokenize=False,
            add_generation_prompt=False,
            enable_thinking=False,
            add_vision_id=True,
        )
        batch = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if ids.shape[1] > self.max_length:
            limit = self.max_length
            raise ValueError(f"prompt has {ids.shape[1]} tokens, limit is {limit}")
        positions = (ids[0] == self.marker_id).nonzero()[:, 0] - 1
        if len(positions) != len(compiled.fields):
            raise ValueError("the prompt does not hold one decision token per field")
        return compiled, {"input_ids": ids, "attention_mask": mask}, positions

    def score(self, row: Row) -> tuple[CompiledRow, torch.Tensor, int, float]:
        """Return the row, logits (fields x vocab), token count and milliseconds."""
        compiled, batch, positions = self.encode(row)
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        positions = positions.to(self.device)
        self._synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            output = self.model(**batch, use_cache=False, logits_to_keep=positions)
        self._synchronize()
        elapsed_ms = (time.perf_counter() - started) * 1000.0
        return compiled, output.logits[0], batch["input_ids"].shape[1], elapsed_ms

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class DecisionEngine:
    """Scores requests on one checkpoint; not safe to share between threads."""

    def __init__(
        self,
        checkpoint: str | Path | None = None,
        *,
        temperature: float = DEFAULT_TEMPERATURE,
        backend: str = "hf",
        media_root: str | Path = ".",  # where pictures would be: nothing reads it
        max_length: int = 8192,
        device: str = "cuda",
        dtype: str = "bfloat16",
        attn_implementation: str = "sdpa",
    ) -> None:
        if backend != "hf":
            raise ValueError(f"backend must be 'hf', not {backend!r}")
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError("temperature must be finite and over 0")
        self.temperature = temperature
        self.backend_name = backend
        self.backend = HFBackend(
            str(Path(__file__).parent if checkpoint is None else checkpoint),
            max_length=max_length,
            device=device,
            dtype=dtype,
            attn=attn_implementation,
        )
        self.tokenizer = self.backend.tokenizer

    def predict(self, request: Any) -> dict[str, Any]:
        """Score every question of a request in one forward.

        ValueError before the forward is the request's fault; after it, a readout
        that is no distribution. ArithmeticError when calibration moved the argmax.
        """
        row = validate_request(request)
        compiled, logits, input_tokens, inference_ms = self.backend.score(row)
        answers = {}
        for name, scores in zip(compiled.fields, logits, strict=True):
            legend = dict(compiled.options[name])
            raw = self._read(scores, compiled.symbols[name])
            scaled = _scale(dict(zip(legend, raw, strict=True)), self.temperature)
            kind = row["questions"][name]["type"]
            answers[name] = _write_answer(kind, scaled, legend)
        count = {"output_tokens": len(answers), "decision_count": len(answers)}
        calibration = {"method": "temperature-scaling", "temperature": self.temperature}
        return {
            "answers": answers,
            "usage": {"input_tokens": input_tokens, **count},
            "timing": {"inference_ms": inference_ms},
            "calibration": calibration,
            "model": MODEL_NAME,
            "backend": self.backend_name,
        }

    def _read(self, scores: torch.Tensor, symbols: tuple[str, ...]) -> list[float]:
        encoded = [self.tokenizer.encode(s, add_special_tokens=False) for s in symbols]
        if any(len(ids) != 1 for ids in encoded):
            raise RuntimeError("an answer symbol is not one token of this tokenizer")
        chosen = scores[[ids[0] for ids in encoded]].float()
        distribution: list[float] = torch.softmax(chosen, dim=-1).tolist()
        return distribution


def _write_answer(
    kind: str, probabilities: dict[str, float], legend: dict[str, str]
) -> dict[str, Any]:
    top = _find_top(probabilities)
    own: dict[str, Any] = {"choice": top}
    if kind == "noul":
        own = {"noul": probabilities["yes"]}
    elif kind == "score":
        score = math.fsum(float(value) * p for value, p in probabilities.items())
        own = {"score": score, "legend": legend}
    return {
        "type": kind,
        **own,
        "probabilities": probabilities,
        "confidence": probabilities[top],
        "source": "local",
        "decision": top,
    }


def _find_top(probabilities: dict[str, float]) -> str:
    """Return the likeliest value; an exact tie goes to the smaller string."""
    return min(probabilities, key=lambda value: (-probabilities[value], value))


def _scale(raw: dict[str, float], temperature: float) -> dict[str, float]:
    """Temperature-scale in Python floats, checking the distribution on both sides."""
    _check_distribution(raw)
    powers = {value: p ** (1.0 / temperature) for value, p in raw.items()}
    total = math.fsum(powers.values())
    scaled = {value: power / total for value, power in powers.items()}
    _check_distribution(scaled)
    if _find_top(scaled) != _find_top(raw):
        raise ArithmeticError("temperature scaling moved the argmax")
    return scaled


def _check_distribution(probabilities: dict[str, float]) -> None:
    if not all(math.isfinite(p) and p >= 0.0 for p in probabilities.values()):
        raise ValueError("the model gave a non-finite probability")
    if not math.isclose(math.fsum(probabilities.values()), 1.0, abs_tol=1e-4):
        raise ValueError("the model's probabilities do not sum to one")
