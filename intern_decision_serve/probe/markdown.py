"""The report as Markdown: conditions, checks and tables; plots are the HTML's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .findings import Findings
from .report import Report

__all__ = ["to_markdown"]


def to_markdown(report: Report) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield "# Probe of a decision server"
    yield ""
    if not report.complete:
        yield "**Incomplete: the run was interrupted.** What follows was measured until"
        yield "then."
        yield ""
    checks = sum(len(section.checks) for section in report.sections)
    yield (
        f"{checks} checks, {report.failed} failed, in {report.seconds:.0f} s. Numbers "
        "hold under the conditions below."
    )
    yield ""
    yield from _table(("condition", "value"), report.conditions)
    for section in report.sections:
        yield from _section(section)
    yield "## Every answer, counted"
    yield ""
    rows = [
        (section, named, str(count), "yes" if expected else "**no**")
        for section, named, count, expected in report.answers
    ]
    yield from _table(("section", "answer", "count", "expected"), rows)


def _section(section: Findings) -> Iterator[str]:
    yield f"## {section.title}"
    yield ""
    if not section.complete:
        yield "**Incomplete.**"
        yield ""
    if section.conditions:
        yield section.conditions
        yield ""
    if section.checks:
        rows = [
            (check.rule, f"**{check.outcome}**" if check.outcome == "fail"
             else check.outcome, check.seen)
            for check in section.checks
        ]  # fmt: skip
        yield from _table(("check", "outcome", "seen"), rows)
    for table in section.tables:
        yield f"### {table.title}"
        yield ""
        yield from _table(table.columns, table.rows)
        if table.note:
            yield table.note
            yield ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"
    yield ""


def _cell(value: str) -> str:
    return value.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
