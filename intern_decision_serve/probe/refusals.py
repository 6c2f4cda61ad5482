"""What a refusal says: whether it is the contract's, and the server's words in it."""

from __future__ import annotations

from collections.abc import Mapping

from .client import Answer
from .findings import Findings
from .foreign import without_token
from .results import in_short

__all__ = ["message", "refusal_problem", "report_unanswered"]

_SHOWN_LETTERS = 90


def refusal_problem(answer: Answer, status: int, code: str) -> str:
    """What is wrong with a refusal, or ""."""
    if answer.status != status:
        return f"got {answer.named}, not {status} {code}"
    document = answer.document
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) or set(error) != {"code", "message"}:
        return f"{status} without the error envelope"
    if error["code"] != code:
        return f"{status} with code {error['code']!r}, not {code!r}"
    return "" if isinstance(error["message"], str) else "the message is no string"


def message(answer: Answer, token: str) -> str:
    """The server's words; cut only after a token in them is blotted out."""
    error = answer.document.get("error") if isinstance(answer.document, dict) else None
    said = error.get("message", "") if isinstance(error, dict) else ""
    text = without_token(str(said), token)
    return text if len(text) <= _SHOWN_LETTERS else text[: _SHOWN_LETTERS - 3] + "..."


def report_unanswered(
    findings: Findings, token: str, what: str, refused: Mapping[str, Answer]
) -> None:
    """Fail one check that names each of `what` the server refused, with its words."""
    if not refused:
        return
    rows = [
        {"id": name, "answer": answer.named, "message": message(answer, token)}
        for name, answer in refused.items()
    ]
    findings.facts[f"unanswered {what}s"] = rows
    names = in_short(f"{row['id']}: {row['answer']}" for row in rows)
    findings.check(f"every {what} is answered", False, names)
    shown = [tuple(row.values()) for row in rows]
    title = f"{what.capitalize()}s without an answer"
    findings.table(title, (what, "answer", "message"), shown)
