"""The report: conditions and findings as one document, written as JSON, Markdown, HTML.

Answers come without the token; what this side was told passes `without_token` as well.
Numbers never stand without the conditions they were measured under, and an interrupted
run says so on top.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from .findings import Findings
from .foreign import MISREAD, plain, without_token
from .session import Probe, Reply

__all__ = [
    "Report",
    "conditions",
    "document",
    "make_sure_of",
    "now",
    "report_paths",
    "write_reports",
]

_SUFFIXES = (".md", ".json", ".html")


@dataclass(slots=True)
class Report:
    """A whole run; `complete` is False when it was interrupted."""

    started: datetime
    conditions: list[tuple[str, str]]
    health: Reply = field(default_factory=dict)
    sections: list[Findings] = field(default_factory=list)
    answers: list[tuple[str, str, int, bool]] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = True

    @property
    def failed(self) -> int:
        """The number of rules that do not hold."""
        return sum(section.failed for section in self.sections)


def conditions(probe: Probe, started: datetime) -> list[tuple[str, str]]:
    """Under what the numbers hold: when, which server, from where."""
    health = probe.health
    model = health.get("model")
    pins = model if isinstance(model, dict) else {}
    shown = [
        ("started", started.strftime("%Y-%m-%d %H:%M:%S UTC")),
        ("server", probe.target.url),
        ("server version", _told(health.get("version"))),
        *((f"model {name}", _told(value)) for name, value in pins.items()),
    ]
    for name in ("vram_cap_gib", "max_tokens", "max_decisions", "chunking"):
        value = "none" if name in health and health[name] is None else health.get(name)
        shown.append((name, _told(value)))
    shown += _kernels(health.get("kernels"))
    shown.append(("warmup", _warmup(health.get("warmup"))))
    where = f"{platform.platform()}, Python {platform.python_version()}"
    named = f"{probe.options.client}: " if probe.options.client else ""
    shown.append(("client", f"{named}{where}, {os.cpu_count()} CPUs"))
    return shown


def _kernels(kernels: object) -> list[tuple[str, str]]:
    """One line per kernel name: where its implementation comes from."""
    if not isinstance(kernels, dict) or not kernels:
        return [("kernels", _told(kernels))]
    lines = []
    for name, bound in kernels.items():
        said = bound if isinstance(bound, dict) else {"implementation": bound}
        source = f"{said.get('package', '')} {said.get('version', '')}".strip()
        slow = ", the slow fallback" if said.get("fast") is False else ""
        source = source or str(said.get("implementation"))
        lines.append((f"kernel {name}", source + slow))
    return lines


def _warmup(warmup: object) -> str:
    """The warm-up in a line, its ladder summed up where it is told as ours is."""
    if not isinstance(warmup, dict) or "rungs" not in warmup:
        return _told(warmup)
    try:
        ladder = _ladder(warmup["rungs"])
    except MISREAD:  # another server's, told as it is
        return _told(warmup)
    rest = {name: part for name, part in warmup.items() if name != "rungs"}
    return ", ".join(filter(None, (_told(rest), ladder)))


def _ladder(rungs: list[Reply]) -> str:
    if not rungs:
        return "no rungs"
    longest = max(rung["tokens"] for rung in rungs)
    seconds = sum(rung["seconds"] for rung in rungs)
    failed = [
        f"{rung['tokens']} x {rung['questions']} {rung['outcome']}"
        for rung in rungs
        if rung["outcome"] != "scored"
    ]
    said = f"{len(rungs)} rungs up to {longest} tokens in {seconds:.1f} s"
    return ", ".join((said, *failed))


def _told(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "not reported" if value is None else str(value)


def document(report: Report) -> dict[str, object]:
    """The report as JSON: the same facts, without the drawings."""
    return {
        "format": "intern-decision-serve probe 1",
        "complete": report.complete,
        "seconds": round(report.seconds, 3),
        "failed_checks": report.failed,
        "conditions": dict(report.conditions),
        "health": report.health,
        "answers": [
            {"section": section, "answer": named, "count": count, "expected": expected}
            for section, named, count, expected in report.answers
        ],
        "sections": [_section(section) for section in report.sections],
    }


def _section(section: Findings) -> dict[str, object]:
    return {
        "name": section.name,
        "title": section.title,
        "complete": section.complete,
        "seconds": round(section.seconds, 3),
        "conditions": section.conditions,
        "checks": [dataclasses.asdict(check) for check in section.checks],
        "tables": [dataclasses.asdict(table) for table in section.tables],
        "facts": section.facts,
    }


def report_paths(stem: Path) -> list[Path]:
    """The files of a report: Markdown, JSON, HTML."""
    return [stem.with_name(stem.name + suffix) for suffix in _SUFFIXES]


def make_sure_of(paths: Sequence[Path]) -> None:
    """Make folders, and try that each file can be written; OSError or ValueError.

    Asked before anything is measured; a file that was not there is not there after.
    """
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} would be written twice")
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not os.path.lexists(path)
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()


def write_reports(paths: Sequence[Path], texts: Sequence[str], token: str) -> None:
    """Write one text per path; all are tried before the first OSError is raised."""
    failed: OSError | None = None
    for path, text in zip(paths, texts, strict=True):
        try:
            path.write_text(plain(without_token(text, token)), "utf-8")
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def now() -> datetime:
    """The time of day, in UTC."""
    return datetime.now(UTC)
