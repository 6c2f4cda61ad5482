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

_GONE = object()  # in place of a field that is left out
_OF_REQUEST = ("state", "workload")  # the rest belongs to the decision
_OVER_SYMBOLS = 80  # options: more than there are letters and digits to answer with


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


def _without_gone(document: Document) -> Document:
    return {name: value for name, value in document.items() if value is not _GONE}


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
    """Each rule of a decision and its state, on both paths that take one."""
    for rule, changes in (*_bad_fields(), *_bad_options()):
        decision = _without_gone(_decision(**changes))
        yield rule, "/decide", _bytes(decision)
        whole = {name: decision.pop(name) for name in _OF_REQUEST if name in decision}
        yield rule, "/decide/shared", _bytes({**whole, "decisions": [decision]})


def _bad_fields() -> Iterator[tuple[str, Document]]:
    rules: tuple[tuple[str, Document], ...] = (
        ("no state", {"state": _GONE}),
        ("an empty string as state", {"state": ""}),
        ("an empty object as state", {"state": {}}),
        ("an empty array as state", {"state": []}),
        ("a number as state", {"state": 7}),
        ("null as state", {"state": None}),
        ("a workload", {"workload": "nightly"}),
        ("a workload that is no string", {"workload": 0}),
        ("unknown orderings", {"orderings": "some"}),
        ("orderings that are no string", {"orderings": 1}),
        ("all orderings of 5 options", {"orderings": "all", "options": _options(5)}),
        ("the decision marker in the question", {"question": "a <decision> here?"}),
    )
    yield from rules
    for name in ("id", "question"):
        yield f"no {name}", {name: _GONE}
        yield f"an empty {name}", {name: ""}
        yield f"a number as {name}", {name: 7}
        yield f"null as {name}", {name: None}
        yield f"an array as {name}", {name: ["x"]}


def _bad_options() -> Iterator[tuple[str, Document]]:
    option: Document = {"id": "a", "description": "one"}
    for rule, options in (
        ("no options", _GONE),
        ("an empty array as options", []),
        ("an object as options", {"a": "one", "b": "two"}),
        ("one option", _options(1)),
        ("17 options", _options(17)),
        ("two options with one id", [option, option]),
        ("an option that is no object", [option, "b"]),
        ("an option id that is no string", [option, {"id": 7, "description": "two"}]),
        ("an option without an id", [option, {"description": "two"}]),
        ("a description that is no string", [option, {"id": "b", "description": None}]),
        ("an option without a description", [option, {"id": "b"}]),
    ):
        yield rule, {"options": options}


def _bad_shared(max_decisions: int) -> Iterator[Broken]:
    many = [criterion(number) for number in range(max_decisions + 1)]
    wide = [
        {"id": f"d{number}", "question": "Which?", "options": _options(16),
         "orderings": "rotations"}
        for number in range(max_decisions // 16 + 1)
    ]  # fmt: skip
    yield "no decisions", "/decide/shared", _bytes({"state": "The gate is open."})
    cases: tuple[tuple[str, object], ...] = (
        ("an empty array as decisions", []),
        ("an object as decisions", criterion(0)),
        ("a decision that is no object", ["a"]),
        ("two decisions with one id", [criterion(0), criterion(0)]),
        ("more than MAX_DECISIONS decisions", many),
        ("orderings over MAX_DECISIONS", wide),
    )
    for rule, decisions in cases:
        body: Document = {"state": "The gate is open.", "decisions": decisions}
        yield rule, "/decide/shared", _bytes(body)


def _bad_systemone() -> Iterator[Broken]:
    ask: Document = {"type": "noul", "instructions": "Is the gate open?"}
    cases: tuple[tuple[str, Document], ...] = (
        ("17 questions", {"questions": {f"f{n}": ask for n in range(17)}}),
        ("no questions", {"questions": _GONE}),
        ("an empty object as questions", {"questions": {}}),
        ("an array as questions", {"questions": [ask]}),
        ("images", {"images": []}),
        ("assets", {"assets": None}),
        ("no state", {"state": _GONE}),
        ("an empty state", {"state": ""}),
        ("a number as state", {"state": 7}),
    )
    questions: list[tuple[str, Document]] = [
        (rule, {"questions": {"f": asked}}) for rule, asked in _bad_questions(ask)
    ]
    for rule, changes in (*cases, *questions):
        body: Document = {
            "state": "The gate is open.",
            "questions": {"f": ask},
            **changes,
        }
        yield rule, "/v1/systemone", _bytes(_without_gone(body))


def _bad_questions(ask: Document) -> Iterator[tuple[str, object]]:
    """Rules of one question of /v1/systemone, each with a question that breaks it."""
    many = {f"o{number}": f"option {number}" for number in range(_OVER_SYMBOLS)}
    yield "a question that is no object", "Is the gate open?"
    yield "a question without a type", {"instructions": "Is the gate open?"}
    rules: tuple[tuple[str, object, Document], ...] = (
        ("an unknown question type", "essay", {}),
        ("a number as question type", 7, {}),
        ("a choice without criteria", "choice", {}),
        ("a choice with an array as criteria", "choice", {"criteria": ["a", "b"]}),
        ("a choice with a string as criteria", "choice", {"criteria": "ab"}),
        ("a choice without options", "choice", {"criteria": {}}),
        ("a choice of 80 options", "choice", {"criteria": many}),
        ("a score without criteria", "score", {}),
        ("a score with a string as criteria", "score", {"criteria": "cold"}),
        ("a score without options", "score", {"criteria": []}),
        ("a score of 80 options", "score", {"criteria": list(many)}),
    )
    for rule, kind, more in rules:
        yield rule, {**ask, "type": kind, **more}
