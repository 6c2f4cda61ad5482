"""Prints measurements as the Markdown tables that the README holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Row", "print_table"]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; a ratio against its goal, and what explains it."""

    name: str
    value: str
    ratio: str
    goal: str
    notes: str = ""


def print_table(title: str, rows: Iterable[Row]) -> None:
    """Print rows as they come: a run takes minutes."""
    _print(f"\n### {title}\n")
    _print("| what | measured | ratio | goal | notes |")
    _print("|---|---|---|---|---|")
    for row in rows:
        cells = (row.name, row.value, row.ratio, row.goal, row.notes)
        _print("| " + " | ".join(cells) + " |")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
