"""What is scored before the first client: settle, reference, tower swap, ladder.

Everything here goes through the real predict() on the inference thread. It must never
decide what an answer should be, only that it is the same one every time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from .errors import EngineFailed, OutOfMemory, ServiceError, StartupRefused

__all__ = [
    "WARMUP",
    "build_rung",
    "check_same",
    "choose_lengths",
    "climb",
    "drop_vision",
    "find_difference",
    "find_replay_fault",
    "settle",
]

WARMUP: dict[str, Any] = {
    "state": "The sensor in the cold room reads 21 degrees; the limit is 8 degrees.",
    "questions": {
        "q": {
            "type": "choice",
            "instructions": "What should happen next?",
            "criteria": {
                "alarm": "tell the operator now",
                "wait": "read the sensor again in an hour",
            },
        }
    },
}

SETTLE_LIMIT = 8  # autotuning ends after one call; measured at most 2 on an H200

# Facts (fla 0.5.2): its l2norm kernel is compiled and tuned anew, 8 to 11 s, for every
# 65,536 rows, and the 4B has 32 rows a token: one class per 2,048 tokens. The short
# rungs load the matrix kernels that cuBLAS picks for few rows.
SHORT_LENGTHS = (256, 512, 1024)
LENGTH_CLASS = 2048
RUNG_QUESTIONS = (1, 16)  # the readout is another matrix product at 16 positions
FILLER = "evidence "
PROBE_WORDS = 256

_log = logging.getLogger(__name__)

Score = Callable[[dict[str, Any]], tuple[dict[str, Any], str]]
CountTokens = Callable[[dict[str, Any]], int]


def settle(score: Score) -> tuple[dict[str, Any], int]:
    """Score the warm-up until two answers in a row are equal; return it and the count.

    Until then Triton's autotuner may still change kernels between two calls, and with
    them the last bits of an answer.
    """
    before, _ = score(WARMUP)
    difference = None
    for calls in range(2, SETTLE_LIMIT + 1):
        after, _ = score(WARMUP)
        difference = find_difference(before, after)
        if difference is None:
            _log.info("the warm-up settled in %d calls", calls)
            return after, calls
        before = after
    raise StartupRefused(
        f"the warm-up gave no two equal answers in a row in {SETTLE_LIMIT} calls; "
        f"the last two differ: {difference}"
    )


def check_same(reference: dict[str, Any], response: dict[str, Any]) -> None:
    """Refuse to start when dropping the vision tower changed the answer (INV-7)."""
    difference = find_difference(reference, response)
    if difference is not None:
        raise StartupRefused(
            f"the warm-up changed when the vision tower was dropped: {difference}; "
            "INTERN_DECISION_KEEP_VISION=1 keeps it"
        )


def find_replay_fault(
    score: Score, capture: Callable[[], None], reference: dict[str, Any]
) -> str | None:
    """Score the warm-up until it is replayed; name what differs or fails, or None.

    It also takes the first captures' extra second before any client can wait for it.
    """
    try:
        for _ in range(2):
            score(WARMUP)
        capture()
        return find_difference(reference, score(WARMUP)[0])
    except EngineFailed:
        raise
    except ServiceError as error:
        return error.message


def find_difference(before: Any, after: Any, path: str = "") -> str | None:
    """Name the first place where two responses differ in type or bits, or None.

    Only `timing` may differ. A NaN differs from everything, itself included.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        if list(before) != list(after):
            return f"{path or 'keys'}: {list(before)} became {list(after)}"
        places: Iterator[Any] = ((key, before[key], after[key]) for key in before)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{path}: {len(before)} items became {len(after)}"
        places = zip(range(len(before)), before, after, strict=True)
    else:
        same = type(before) is type(after) and before == after
        return None if same else f"{path}: {before!r} became {after!r}"
    for key, old, new in places:
        if not path and key == "timing":
            continue
        difference = find_difference(old, new, f"{path}.{key}" if path else str(key))
        if difference is not None:
            return difference
    return None


def drop_vision(torch: Any, model: Any) -> None:
    """Put a stub that raises in the place of the vision tower (INV-7).

    The tower's memory comes back at the next collection; 0.62 GiB on the 4B.
    """
    inner = getattr(model, "model", None)
    if getattr(inner, "visual", None) is None:
        raise StartupRefused(
            "the model has no vision tower at model.model.visual to drop; "
            "INTERN_DECISION_KEEP_VISION=1 starts without looking for it"
        )
    stub = type("DroppedVision", (torch.nn.Module,), {"forward": _refuse_images})
    model.model.visual = stub()


def _refuse_images(*_: Any, **__: Any) -> None:
    raise RuntimeError("the vision tower was dropped: no images are scored here")


def choose_lengths(
    wanted: tuple[int, ...] | None, max_tokens: int, *, is_cuda: bool
) -> tuple[int, ...]:
    """List the rungs, in ascending order; by default one per size class and some below.

    The CPU compiles nothing: it climbs only a ladder that was asked for.
    """
    if wanted is None:
        classes = range(LENGTH_CLASS, max_tokens, LENGTH_CLASS)
        wanted = (*SHORT_LENGTHS, *classes, max_tokens) if is_cuda else ()
    elif any(length > max_tokens for length in wanted):
        _log.warning("warm-up lengths over %d tokens are left out", max_tokens)
    return tuple(sorted({length for length in wanted if length <= max_tokens}))


def climb(
    lengths: tuple[int, ...],
    score: Score,
    count_tokens: CountTokens,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Score every rung once per number of questions; report tokens, seconds, outcome.

    A rung that the cap has no room for is told and left; any other failure refuses.
    """
    rungs = []
    for place, length in enumerate(lengths, 1):
        progress(f"warm-up ladder {place}/{len(lengths)}: {length} tokens")
        rungs += [
            _step(request, score, length, questions)
            for questions in RUNG_QUESTIONS
            if (request := build_rung(count_tokens, length, questions)) is not None
        ]
    return rungs


def _step(
    request: dict[str, Any], score: Score, length: int, questions: int
) -> dict[str, Any]:
    started = time.perf_counter()
    tokens, outcome = length, "scored"
    try:
        tokens = int(score(request)[0]["usage"]["input_tokens"])
    except OutOfMemory:
        outcome = "out_of_memory"
    except ServiceError as error:
        raise StartupRefused(f"warm-up at {length} tokens: {error.message}") from None
    seconds = round(time.perf_counter() - started, 3)
    if outcome == "scored":
        _log.info(
            "warm-up: %d tokens, %d questions: %.3f s", tokens, questions, seconds
        )
    else:
        _log.warning(
            "warm-up: %d tokens do not fit under INTERN_DECISION_VRAM_CAP_GIB; "
            "calls of that length will be 503 out_of_memory",
            length,
        )
    return {
        "tokens": tokens,
        "questions": questions,
        "seconds": seconds,
        "outcome": outcome,
    }


def build_rung(
    count_tokens: CountTokens, length: int, questions: int
) -> dict[str, Any] | None:
    """Build a call of `length` tokens or just under; None if the questions fill it."""
    bare = count_tokens(_build(0, questions))
    if bare > length:
        return None
    per_word = (count_tokens(_build(PROBE_WORDS, questions)) - bare) / PROBE_WORDS
    words = int((length - bare) / per_word)
    while words and (over := count_tokens(_build(words, questions)) - length) > 0:
        words = max(0, words - max(1, int(over / per_word)))
    return _build(words, questions)


def _build(words: int, questions: int) -> dict[str, Any]:
    question = WARMUP["questions"]["q"]
    return {
        "state": WARMUP["state"] + " " + FILLER * words,
        "questions": {f"q{place}": question for place in range(1, questions + 1)},
    }
