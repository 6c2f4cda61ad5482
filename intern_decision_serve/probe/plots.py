"""Plots as SVG written by hand: lines, steps, bars, reliability.

Each function returns one `<svg>` element that names no resource outside itself. Colours
are the page's CSS classes, so that a plot follows its light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = [
    "Line",
    "bar_plot",
    "line_plot",
    "nice_ticks",
    "reliability_plot",
    "step_plot",
]

_WIDTH, _HEIGHT = 470, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 88, 14, 50
_LABEL_STEP = 15  # the least distance of two labels, in pixels
_LEAST_HIGH = 0.01  # of an axis: smaller ticks have more digits than there is room for


@dataclass(frozen=True, slots=True)
class Line:
    """One named series of (x, y)."""

    name: str
    points: list[tuple[float, float]]


def nice_ticks(high: float, count: int = 5) -> list[float]:
    """Round steps from 0 to the first one at or over `high`."""
    if not math.isfinite(high) or high <= 0:
        high = 1.0
    rough = max(high, _LEAST_HIGH) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [step * place for place in range(math.ceil(high / step - 1e-9) + 1)]


def _text(value: float) -> str:
    """A tick's number, without digits that say nothing."""
    return f"{value:,.10g}" if abs(value) < 1e7 else f"{value:.2g}"


@dataclass(frozen=True, slots=True)
class _Frame:
    """The plotting area, and where a value lands in it; both axes start at 0."""

    x_high: float
    y_high: float
    right: int = _RIGHT
    width: int = _WIDTH

    def x(self, value: float) -> float:
        return _LEFT + value / self.x_high * (self.width - _LEFT - self.right)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.y_high * (_HEIGHT - _TOP - _BOTTOM)

    def axes(
        self, x_ticks: Iterable[tuple[float, str]], y_ticks: Sequence[float],
        x_label: str, y_label: str,
    ) -> str:  # fmt: skip
        """Grid, ticks and both axis titles."""
        bottom, end = self.y(0), self.width - self.right
        parts = []
        for tick in y_ticks:
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{end}" y1="{at:.1f}" '
                         f'y2="{at:.1f}"/>'
                         f'<text class="tick" x="{_LEFT - 9}" y="{at + 4:.1f}" '
                         f'text-anchor="end">{_text(tick)}</text>')  # fmt: skip
        for value, name in x_ticks:
            at = self.x(value)
            parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" '
                         f'y1="{bottom}" y2="{bottom + 5}"/>'
                         f'<text class="tick" x="{at:.1f}" y="{bottom + 19}" '
                         f'text-anchor="middle">{escape(name)}</text>')  # fmt: skip
        middle = (_LEFT + end) / 2
        half = (bottom + _TOP) / 2
        parts.append(
            f'<line class="axis" x1="{_LEFT}" x2="{end}" y1="{bottom}" y2="{bottom}"/>'
            f'<text class="name" x="{middle}" y="{_HEIGHT - 9}" text-anchor="middle">'
            f"{escape(x_label)}</text>"
            f'<text class="name" transform="translate(15 {half}) rotate(-90)" '
            f'text-anchor="middle">{escape(y_label)}</text>'
        )
        return "".join(parts)


def _svg(label: str, body: str, width: int = _WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {_HEIGHT}" role="img" style="max-width:{width}px" '
        f'aria-label="{escape(label, quote=True)}">{body}</svg>'
    )


def _empty(label: str) -> str:
    return _svg(
        label,
        f'<text class="name" x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">'
        "no samples</text>",
    )


def _path(frame: _Frame, points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)


def _ends(frame: _Frame, lines: Sequence[Line]) -> str:
    """The lines' names at their right ends, pushed apart where they would touch."""
    placed: list[tuple[float, int]] = sorted(
        (frame.y(line.points[-1][1]), number) for number, line in enumerate(lines, 1)
    )
    parts, lowest = [], -math.inf
    for wanted, number in placed:
        lowest = max(wanted, lowest + _LABEL_STEP)
        at = frame.x(lines[number - 1].points[-1][0]) + 11
        name = escape(lines[number - 1].name)
        parts.append(f'<text class="end s{number}" x="{at:.1f}" y="{lowest + 4:.1f}">'
                     f"{name}</text>")  # fmt: skip
    return "".join(parts)


def line_plot(
    lines: Sequence[Line], *, x_label: str, y_label: str, marks: Sequence[float] = ()
) -> str:
    """Up to three series over a shared x, named at their ends; `marks` are uprights."""
    lines = [line for line in lines if line.points]
    if not lines:
        return _empty(y_label)
    x_high = max(x for line in lines for x, _ in line.points)
    x_ticks = nice_ticks(x_high, 5 if x_high >= 5 else max(round(x_high), 1))
    y_ticks = nice_ticks(max(y for line in lines for _, y in line.points))
    frame = _Frame(x_ticks[-1], y_ticks[-1])
    named = [(tick, _text(tick)) for tick in x_ticks]
    parts = [frame.axes(named, y_ticks, x_label, y_label)]
    for mark in marks:
        if mark < x_ticks[-1]:
            at = frame.x(mark)
            parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" '
                         f'y1="{_TOP}" y2="{frame.y(0)}"/>')  # fmt: skip
    for number, line in enumerate(lines, start=1):
        parts.append(f'<path class="line s{number}" d="{_path(frame, line.points)}"/>')
        parts += [
            f'<circle class="dot s{number}" cx="{frame.x(x):.1f}" '
            f'cy="{frame.y(y):.1f}" r="3.5"><title>{escape(line.name)} at '
            f"{_text(x)}: {y:.4g}</title></circle>"
            for x, y in line.points
        ]
    parts.append(_ends(frame, lines))
    return _svg(f"{y_label} by {x_label}", "".join(parts))


def step_plot(
    points: Sequence[tuple[float, float]],
    changes: Sequence[tuple[float, str]],
    *,
    x_label: str,
    y_label: str,
) -> str:
    """A value that holds until the next look; uprights name what changed there."""
    x_high = max(x for x, _ in points)
    y_ticks = nice_ticks(max(y for _, y in points) * 1.15)
    frame = _Frame(x_high or 1.0, y_ticks[-1], right=24)
    ticks = [(tick, _text(tick)) for tick in nice_ticks(x_high, 6) if tick <= x_high]
    parts = [frame.axes(ticks, y_ticks, x_label, y_label)]
    for at, name in changes:
        x = frame.x(min(at, x_high))
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" '
                     f'y2="{frame.y(0)}"/><text class="tick" x="{x + 5:.1f}" '
                     f'y="{_TOP + 11}">{escape(name)}</text>')  # fmt: skip
    corners: list[tuple[float, float]] = []
    for x, y in points:
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    area = [(corners[0][0], 0.0), *corners, (corners[-1][0], 0.0)]
    parts.append(f'<path class="area s1" d="{_path(frame, area)}Z"/>')
    parts.append(f'<path class="line thin s1" d="{_path(frame, corners)}"/>')
    return _svg(f"{y_label} over {x_label}", "".join(parts))


def bar_plot(
    names: Sequence[str],
    values: Sequence[float],
    *,
    x_label: str,
    y_label: str,
    reference: float,
    reference_label: str,
) -> str:
    """One bar per name, with its value on top and a dashed line to compare with."""
    y_ticks = nice_ticks(max([*values, reference]) * 1.08)
    frame = _Frame(float(len(names)), y_ticks[-1], right=46)
    ticks = [(place + 0.5, name) for place, name in enumerate(names)]
    parts = [frame.axes(ticks, y_ticks, x_label, y_label)]
    wide = min((frame.x(1) - frame.x(0)) * 0.6, 74)
    for place, value in enumerate(values):
        middle, top = frame.x(place + 0.5), frame.y(value)
        parts.append(f'<rect class="bar s1" x="{middle - wide / 2:.1f}" y="{top:.1f}" '
                     f'width="{wide:.1f}" height="{frame.y(0) - top:.1f}" rx="2"/>'
                     f'<text class="value" x="{middle:.1f}" y="{top - 6:.1f}" '
                     f'text-anchor="middle">{value:.3f}</text>')  # fmt: skip
    at = frame.y(reference)
    parts.append(f'<line class="reference" x1="{_LEFT}" x2="{_WIDTH - 46}" '
                 f'y1="{at:.1f}" y2="{at:.1f}"/><text class="tick" '
                 f'x="{_WIDTH - 40}" y="{at + 4:.1f}">{escape(reference_label)}'
                 "</text>")  # fmt: skip
    return _svg(f"{y_label} by {x_label}", "".join(parts))


def reliability_plot(points: Sequence[tuple[float, float, int]]) -> str:
    """Accuracy over stated confidence; a dot's area is its share of the rows."""
    width = 350
    frame = _Frame(1.0, 1.0, right=24, width=width)
    ticks = [place / 5 for place in range(6)]
    named = [(tick, _text(tick)) for tick in ticks]
    parts = [frame.axes(named, ticks, "stated confidence", "accuracy")]
    parts.append(f'<path class="reference" d="{_path(frame, [(0, 0), (1, 1)])}"/>')
    total = sum(rows for _, _, rows in points) or 1
    for confidence, accuracy, rows in points:
        radius = 4 + 16 * math.sqrt(rows / total)
        parts.append(f'<circle class="bubble s1" cx="{frame.x(confidence):.1f}" '
                     f'cy="{frame.y(accuracy):.1f}" r="{radius:.1f}"><title>{rows} '
                     f"rows, stated {confidence:.3f}, right {accuracy:.3f}</title>"
                     "</circle>")  # fmt: skip
    return _svg("accuracy by stated confidence", "".join(parts), width)
