"""Positive and negative control: what the model says on rows whose answer is known.

It judges the wire (each result is the contract's), not the model: accuracy is reported
with its interval and never fails a run, a label that moved against `--compare` does.
"""

from __future__ import annotations

import json
from pathlib import Path

from .client import Answer
from .findings import Findings
from .refusals import report_unanswered
from .results import in_short, problems
from .rows import Row
from .session import Probe, Reply
from .statistics import Interval, wilson
from .unfinished import reporting

__all__ = ["NAME", "TITLE", "earlier_rows", "measure", "percent"]

NAME = "control"
TITLE = "Positive and negative control"

_SHOWN_ROWS = 60


def percent(interval: Interval) -> str:
    """A share with its 95 % interval, as tables show it."""
    return f"{interval.share:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def measure(probe: Probe, findings: Findings) -> None:
    """Score every row, then every row with its descriptions rotated."""
    findings.conditions = (
        f"{len(probe.rows)} rows ({probe.rows_source}), one decision per request, "
        "one ordering."
    )
    answers: list[Reply] = []
    findings.facts["rows"] = answers
    found: list[str] = []
    model = probe.health.get("model")
    with reporting(lambda: _report(probe, findings, answers, found)):
        for number, row in enumerate(probe.rows, start=1):
            probe.progress.step(f"control: row {number} of {len(probe.rows)}")
            result = probe.try_row(row)
            if result is not None:
                texts = problems(row.request(), result, model=model)
                found += [f"{row.id}: {text}" for text in texts]
                answers.append(_answer(row, result))
    _negative(probe, findings)


def _report(
    probe: Probe, findings: Findings, answers: list[Reply], found: list[str]
) -> None:
    report_unanswered(findings, probe.token, "row", probe.refused)
    seen = in_short(found) or f"{len(answers)} results"
    findings.check("every result is the contract's", not found, seen)
    _report_accuracy(findings, answers)
    _report_rows(findings, answers)
    if probe.options.compare is not None:
        _compare(findings, earlier_rows(probe.options.compare), answers)


def _answer(row: Row, result: Reply) -> Reply:
    """What is kept of one row, for people and for a later `--compare`."""
    return {
        "id": row.id,
        "row_sha256": row.sha256,
        "label": row.label,
        "top": result["top"],
        "option_ids": result["option_ids"],
        "probabilities": result["probabilities"],
        "input_tokens": result["input_tokens"],
        "prompt_sha256": result["prompt_sha256"],
    }


def _report_accuracy(findings: Findings, answers: list[Reply]) -> None:
    labelled = [answer for answer in answers if answer["label"] is not None]
    if not labelled:
        findings.skip("accuracy", "no row that was answered has a label")
        return
    right = sum(answer["top"] == answer["label"] for answer in labelled)
    interval = wilson(right, len(labelled))
    findings.facts["accuracy"] = {
        "right": right,
        "rows": len(labelled),
        "share": interval.share,
        "low": interval.low,
        "high": interval.high,
    }
    findings.table(
        "Accuracy",
        ("labelled rows", "right", "share (95 % interval)"),
        [(len(labelled), right, percent(interval))],
    )


def _report_rows(findings: Findings, answers: list[Reply]) -> None:
    rows = [
        (
            answer["id"],
            answer["label"],
            answer["top"],
            f"{max(answer['probabilities']):.4f}",
            answer["input_tokens"],
        )
        for answer in answers[:_SHOWN_ROWS]
    ]
    hidden = len(answers) - len(rows)
    note = f"{hidden} more rows are in the JSON." if hidden else ""
    columns = ("row", "label", "top", "confidence", "tokens")
    findings.table("Every row's answer", columns, rows, note)


def _negative(probe: Probe, findings: Findings) -> None:
    """Rotate the descriptions one place: does the top follow its description?"""
    counts = dict.fromkeys(("follows_description", "same_top", "elsewhere"), 0)
    refused: dict[str, Answer] = {}
    found: list[str] = []
    model = probe.health.get("model")
    with reporting(lambda: _report_negative(probe, findings, counts, refused, found)):
        for number, row in enumerate(probe.rows, start=1):
            probe.progress.step(f"negative control: row {number} of {len(probe.rows)}")
            plain = probe.try_row(row)
            if plain is None:
                continue
            result = probe.try_ask("/decide", row.rotated())
            if isinstance(result, Answer):
                refused[row.id] = result
                continue
            texts = problems(row.rotated(), result, model=model)
            if result.get("prompt_sha256") == plain["prompt_sha256"] and _is_another(
                row
            ):
                texts.append("prompt_sha256 is that of the row as it was")
            found += [f"{row.id}: {text}" for text in texts]
            counts[_turn(row, plain["top"], result.get("top"))] += 1


def _is_another(row: Row) -> bool:
    """Whether rotating the descriptions asks anything else."""
    return row.rotated() != row.request()


def _turn(row: Row, before: str, after: object) -> str:
    """Where the top went when the descriptions moved one place."""
    if before in dict(row.options) and after == row.follower(before):
        return "follows_description"
    return "same_top" if after == before else "elsewhere"


def _report_negative(
    probe: Probe,
    findings: Findings,
    counts: dict[str, int],
    refused: dict[str, Answer],
    found: list[str],
) -> None:
    report_unanswered(findings, probe.token, "rotated row", refused)
    total = sum(counts.values())
    findings.facts["negative"] = {"rows": total, **counts}
    if not total:
        findings.skip("negative control", "no row was answered both ways")
        return
    seen = in_short(found) or f"{total} results"
    findings.check("every rotated row's result is the contract's", not found, seen)
    follows, stays, elsewhere = counts.values()
    findings.table(
        "Negative control: descriptions rotated one place",
        ("rows", "top follows its description", "same top", "another option"),
        [(total, percent(wilson(follows, total)), percent(wilson(stays, total)),
          elsewhere)],
        "The option ids stay in place; a model that reads descriptions follows them.",
    )  # fmt: skip


def earlier_rows(path: Path) -> dict[str, Reply]:
    """The rows of an earlier run's JSON report, by id; ValueError for another file."""
    try:
        sections = json.loads(path.read_text("utf-8"))["sections"]
        rows = next(s for s in sections if s["name"] == NAME)["facts"]["rows"]
        return {row["id"]: row for row in rows}
    except (StopIteration, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} holds no control section of this probe") from None


def _compare(
    findings: Findings, earlier: dict[str, Reply], answers: list[Reply]
) -> None:
    """Set every row against the earlier run's: identical, different, moved."""
    moved: list[str] = []
    counts = dict.fromkeys(("identical", "numerically different", "label moved"), 0)
    largest = 0.0
    pairs = [(earlier.get(answer["id"]), answer) for answer in answers]
    for before, answer in pairs:
        if before is None or before["row_sha256"] != answer["row_sha256"]:
            continue
        if before["top"] != answer["top"]:
            counts["label moved"] += 1
            moved.append(f"{answer['id']}: {before['top']} -> {answer['top']}")
        else:
            step = _largest_step(before, answer)
            largest = max(largest, step)
            counts["numerically different" if step else "identical"] += 1
    compared = sum(counts.values())
    alone = {
        "only in this run": len(answers) - compared,
        "only in the earlier run": len(earlier) - compared,
    }
    findings.facts["compare"] = {**counts, **alone, "largest": largest}
    findings.table(
        "Against the earlier run",
        (*counts, *alone, "largest step of a probability"),
        [(*counts.values(), *alone.values(), f"{largest:.3g}")],
        "A row is in both where its id and all that was asked are the same.",
    )
    seen = in_short(moved) or f"{compared} rows compared"
    findings.check("no label moved since the earlier run", compared > 0 and not moved,
                   seen)  # fmt: skip


def _largest_step(before: Reply, answer: Reply) -> float:
    pairs = zip(before["probabilities"], answer["probabilities"], strict=True)
    return max(abs(float(one) - float(other)) for one, other in pairs)
