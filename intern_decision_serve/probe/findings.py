"""What sections find: checks, tables, plots and facts, in the order they were made.

Data only. A section fills its `Findings` as it goes, so that an interrupted run keeps
everything measured until then; the report writers read it and never ask the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["FAIL", "NOT_MEASURED", "PASS", "Check", "Findings", "Plot", "Table"]

PASS = "pass"
FAIL = "fail"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, how it came out, and what was seen."""

    rule: str
    outcome: str
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows as they are shown; numbers stand right where `numeric` names the column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A finished SVG element; `caption` says what to look for."""

    title: str
    svg: str
    caption: str = ""


@dataclass(slots=True)
class Findings:
    """One section of the report; `facts` is the same in JSON, for programs."""

    name: str
    title: str
    conditions: str = ""
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = False

    def check(self, rule: str, holds: bool, seen: str = "") -> bool:
        """Record a rule that was measured; return whether it holds."""
        self.checks.append(Check(rule, PASS if holds else FAIL, seen))
        return holds

    def skip(self, rule: str, reason: str) -> None:
        """Record a rule that could not be measured, and why."""
        self.checks.append(Check(rule, NOT_MEASURED, reason))

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        note: str = "",
    ) -> None:
        """Record a table; cells are shown as `str` gives them, None as a dash."""
        shown = tuple(tuple("–" if v is None else str(v) for v in row) for row in rows)
        self.tables.append(Table(title, tuple(columns), shown, note))

    def plot(self, title: str, svg: str, caption: str = "") -> None:
        """Record a plot."""
        self.plots.append(Plot(title, svg, caption))

    @property
    def failed(self) -> int:
        """The number of rules that do not hold."""
        return sum(check.outcome == FAIL for check in self.checks)
