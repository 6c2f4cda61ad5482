"""The requests that must be a 422, each with the rule it breaks; pure.

One request breaks one rule, and is right in everything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from .rows import Document
from .samples import criterion, filler

__all__ = ["invalid_requests"]

Broken = tuple[str, str, bytes]


def invalid_requests(*, max_tokens: int, max_decisions: int) -> Iterator[Broken]:
    """Rule, path and body of every refusal, for a server with these limits."""
    yield from _bad_json()
    yield from _bad_decisions()
    yield from _bad_shared(max_decisions)
    yield from _bad_systemone()
    # A word is at least one token, so this cannot fit, whatever the tokenizer.
    long = _decision(state=filler(max_tokens + 1))
    yield "a prompt over MAX_TOKENS", "/decide", _bytes(long)


def _bytes(document: Document) -> bytes:
    return json.dumps(document).encode()


def _decision(**changes: object) -> Document:
    return {"state": "The gate is open.", **criterion(0), **changes}


def _options(count: int) -> list[Document]:
    return [{"id": f"o{n}", "description": f"option {n}"} for n in range(count)]


def _with_state(raw: bytes) -> bytes:
    """A decision whose state is these very bytes, JSON or not."""
    return _bytes(_decision(state="@")).replace(b'"@"', raw)


def _bad_json() -> Iterator[Broken]:
    for rule, body in (
        ("a body that is not JSON", b"{"),
        ("an empty body", b""),
        ("a body that is no object", b"[]"),
        ("two JSON values", _bytes(_decision()) * 2),
        ("a duplicate key", b'{"id":"x",' + _bytes(_decision())[1:]),
        ("NaN", _with_state(b'{"x":NaN}')),
        ("Infinity", _with_state(b'{"x":-Infinity}')),
        ("a number that overflows", _with_state(b'{"x":1e400}')),
        ("an integer too long to convert", _with_state(b"[" + b"9" * 5000 + b"]")),
        ("a lone surrogate", _with_state(rb'"x \ud83d y"')),
        ("bytes that are not UTF-8", _with_state(b'"\xff\xfe"')),
        ("nesting over 100 levels", _with_state(b"[" * 120 + b"1" + b"]" * 120)),
    ):
        yield rule, "/decide", body


def _bad_decisions() -> Iterator[Broken]:
    option = {"id": "a", "description": "one"}
    number: Document = {"id": 7, "description": "two"}
    no_text: Document = {"id": "b", "description": None}
    without = {name: v for name, v in _decision().items() if name != "state"}
    yield "no state", "/decide", _bytes(without)
    for rule, changes in (
        ("an empty string as state", {"state": ""}),
        ("an empty object as state", {"state": {}}),
        ("an empty array as state", {"state": []}),
        ("a number as state", {"state": 7}),
        ("an empty id", {"id": ""}),
        ("an empty question", {"question": ""}),
        ("one option", {"options": _options(1)}),
        ("17 options", {"options": _options(17)}),
        ("two options with one id", {"options": [option, option]}),
        ("an option id that is no string", {"options": [option, number]}),
        ("a description that is no string", {"options": [option, no_text]}),
        ("unknown orderings", {"orderings": "some"}),
        ("all orderings of 5 options", {"orderings": "all", "options": _options(5)}),
        ("a workload", {"workload": "nightly"}),
        ("the decision marker in the question", {"question": "a <decision> here?"}),
    ):
        yield rule, "/decide", _bytes(_decision(**changes))


def _bad_shared(max_decisions: int) -> Iterator[Broken]:
    many = [criterion(number) for number in range(max_decisions + 1)]
    wide = [
        {"id": f"d{number}", "question": "Which?", "options": _options(16),
         "orderings": "rotations"}
        for number in range(max_decisions // 16 + 1)
    ]  # fmt: skip
    for rule, decisions in (
        ("no decisions", []),
        ("two decisions with one id", [criterion(0), criterion(0)]),
        ("more than MAX_DECISIONS decisions", many),
        ("orderings over MAX_DECISIONS", wide),
    ):
        body: Document = {"state": "The gate is open.", "decisions": decisions}
        yield rule, "/decide/shared", _bytes(body)


def _bad_systemone() -> Iterator[Broken]:
    ask: Document = {"type": "noul", "instructions": "Is the gate open?"}
    broken: tuple[tuple[str, Document], ...] = (
        ("17 questions", {"questions": {f"f{n}": ask for n in range(17)}}),
        ("no questions", {"questions": {}}),
        ("an unknown question type", {"questions": {"f": {**ask, "type": "essay"}}}),
        ("a choice without criteria", {"questions": {"f": {**ask, "type": "choice"}}}),
        ("images", {"images": []}),
        ("assets", {"assets": None}),
        ("an empty state", {"state": ""}),
    )
    for rule, changes in broken:
        body: Document = {
            "state": "The gate is open.",
            "questions": {"f": ask},
            **changes,
        }
        yield rule, "/v1/systemone", _bytes(body)
