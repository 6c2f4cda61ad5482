"""Requests of the measured shapes, the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
Build = Callable[[int], Request]

WORDS = (
    "the sensor reads door open cold room limit operator alarm waiting pump valve "
    "pressure normal high low since noon checked twice report engine gate seven"
).split()
CRITERIA = {"yes": "it holds in this state", "no": "it does not hold"}


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def question(rng: random.Random) -> Request:
    """One Jev question of any of the three types."""
    kind = rng.choice(("choice", "score", "noul"))
    asked = {"type": kind, "instructions": text(rng, rng.randint(3, 12)) + "?"}
    if kind == "choice":
        count = rng.randint(2, 8)
        asked["criteria"] = {f"option {n}": text(rng, 4) for n in range(count)}
    elif kind == "score":
        asked["criteria"] = [text(rng, 3) for _ in range(rng.randint(2, 6))]
    return asked


def binary(rng: random.Random) -> Request:
    """One yes-or-no choice, the contract's kind of criterion."""
    asked = text(rng, 8) + "?"
    return {"type": "choice", "instructions": asked, "criteria": CRITERIA}


def decision(rng: random.Random, name: str, options: int) -> Request:
    """One /decide decision."""
    return {
        "id": name,
        "question": text(rng, 8) + "?",
        "options": [
            {"id": f"option {n}", "description": text(rng, 4)} for n in range(options)
        ],
    }


def systemone(seed: int, words: int, questions: int) -> Request:
    """A /v1/systemone body over a text of so many words."""
    rng = random.Random(seed)
    names = (f"field {n}" for n in range(questions))
    return {
        "questions": {name: question(rng) for name in names},
        "state": {"log": text(rng, words), "seed": seed},
    }


def decide(seed: int, words: int, options: int, orderings: str) -> Request:
    """A /decide body."""
    rng = random.Random(seed)
    body = {"state": text(rng, words), "orderings": orderings}
    return {**decision(rng, f"d{seed}", options), **body}


def shared(seed: int, words: int, decisions: int, options: int) -> Request:
    """A /decide/shared body."""
    rng = random.Random(seed)
    asked = [decision(rng, f"d{n}", options) for n in range(decisions)]
    return {"state": text(rng, words), "decisions": asked}


def mixed(count: int, most_words: int) -> list[tuple[str, Request]]:
    """So many (path, body) pairs over all endpoints, lengths and question counts."""
    rng = random.Random(1)
    pairs: list[tuple[str, Request]] = []
    for seed in range(count):
        words = rng.choice((20, 60, 200, 600, most_words // 2, most_words))
        kind = seed % 4
        if kind == 0:
            options = rng.choice((2, 3, 16))
            pairs.append(("/decide", decide(seed, words, options, "none")))
        elif kind == 1:
            pairs.append(("/decide", decide(seed, min(words, 200), 3, "rotations")))
        elif kind == 2:
            count_ = rng.choice((1, 5, 16, 20))
            pairs.append(("/decide/shared", shared(seed, words, count_, 3)))
        else:
            body = systemone(seed, words, rng.choice((1, 3, 16)))
            pairs.append(("/v1/systemone", body))
    return pairs


def fit(count_tokens: Callable[[Request], int], build: Build, tokens: int) -> Request:
    """Build with as many words as give `tokens`, or just under."""
    words = tokens // 2
    for _ in range(8):
        counted = count_tokens(build(words))
        if tokens - 8 <= counted <= tokens:
            break
        words = max(1, int(words * tokens / counted) - (counted > tokens))
    return build(words)
