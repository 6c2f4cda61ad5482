"""Labelled rows: a JSONL file of decisions in, one `/decide` request each out.

It knows nothing of the wire. A bad line is a ValueError that names the file and line.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from .foreign import refuse_constant

__all__ = ["Document", "Row", "canonical", "digest", "read_rows"]

Document = dict[str, object]


def canonical(value: object) -> str:
    """One spelling of a JSON value: floats in full, keys sorted, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: object) -> str:
    """The sha256 of a JSON value's canonical spelling."""
    return hashlib.sha256(canonical(value).encode("utf-8", "replace")).hexdigest()


@dataclass(frozen=True, slots=True)
class Row:
    """One decision with its right option, where the label is known."""

    id: str
    state: object
    question: str
    options: tuple[tuple[str, str], ...]
    label: str | None = None

    @property
    def sha256(self) -> str:
        """Names what was asked, so that two runs compare only the same questions."""
        return digest([self.state, self.question, self.options, self.label])

    def decision(self, orderings: str | None = None) -> Document:
        """The row as a decision of a `/decide/shared` request."""
        return _decision(self, self.options, orderings)

    def request(self, orderings: str | None = None) -> Document:
        """The row as a `/decide` request."""
        return {"state": self.state, **self.decision(orderings)}

    def rotated(self) -> Document:
        """The row with each description moved to the next option id, the last first."""
        ids = [option_id for option_id, _ in self.options]
        texts = [text for _, text in self.options]
        moved = tuple(zip(ids, texts[-1:] + texts[:-1], strict=True))
        return {"state": self.state, **_decision(self, moved, None)}

    def follower(self, option_id: str) -> str:
        """The id that carries `option_id`'s description in `rotated`."""
        ids = [known for known, _ in self.options]
        return ids[(ids.index(option_id) + 1) % len(ids)]


def _decision(
    row: Row, options: tuple[tuple[str, str], ...], orderings: str | None
) -> Document:
    document: Document = {
        "id": row.id,
        "question": row.question,
        "options": [{"id": name, "description": text} for name, text in options],
    }
    if orderings is not None:
        document["orderings"] = orderings
    return document


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read a JSONL file of `{id, state, question, options, label}` rows.

    ValueError names the file, the line and what is wrong with it.
    """
    try:
        text = path.read_bytes().decode("utf-8")  # read_text() turns "\r" into "\n"
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    rows: dict[str, Row] = {}
    # Not splitlines(): a JSON string may hold U+2028, U+0085 and others it splits at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _read_row(json.loads(line, parse_constant=refuse_constant))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {what}") from None
        if row.id in rows:
            raise ValueError(f"{path}, line {number}: id {row.id!r} is there twice")
        rows[row.id] = row
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return tuple(rows.values())


def _read_row(document: object) -> Row:
    """One row of the file; KeyError, TypeError or ValueError for a bad one."""
    if not isinstance(document, dict):
        raise ValueError("a row must be a JSON object")
    options = tuple(
        (_string(option, "id"), _string(option, "description"))
        for option in document["options"]
    )
    label = document.get("label")
    if label is not None and label not in [option_id for option_id, _ in options]:
        raise ValueError(f"label {label!r} is none of the option ids")
    return Row(
        id=_string(document, "id"),
        state=document["state"],
        question=_string(document, "question"),
        options=options,
        label=label,
    )


def _string(document: object, name: str) -> str:
    if not isinstance(document, dict):
        raise ValueError("an option must be a JSON object")
    value = document[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, not {json.dumps(value)[:40]}")
    return value
