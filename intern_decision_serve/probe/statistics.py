"""The arithmetic of the report: pure functions over lists of numbers.

Percentiles interpolate between neighbours; a p99 exists only from 100 samples on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Bin",
    "Interval",
    "brier",
    "expected_calibration_error",
    "line_through",
    "mean",
    "percentile",
    "reliability_bins",
    "summary",
    "wilson",
]

_Z95 = 1.959963984540054  # the two-sided 95 % point of the normal distribution


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; nan for no values."""
    return math.fsum(values) / len(values) if values else math.nan


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, interpolated."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, p50, p95, and p99 where at least 100 samples carry it."""
    return {
        "samples": len(values),
        "p50": percentile(values, 0.50) if values else None,
        "p95": percentile(values, 0.95) if values else None,
        "p99": percentile(values, 0.99) if len(values) >= 100 else None,
    }


@dataclass(frozen=True, slots=True)
class Interval:
    """A share with its 95 % interval."""

    share: float
    low: float
    high: float


def wilson(hits: int, total: int) -> Interval:
    """The Wilson 95 % interval of a share; it stays inside 0..1 at the edges."""
    if total == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = hits / total
    scale = 1 + _Z95**2 / total
    centre = (share + _Z95**2 / (2 * total)) / scale
    half = (
        _Z95 / scale * math.sqrt(share * (1 - share) / total + (_Z95 / total) ** 2 / 4)
    )
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line through two or more points."""
    mid_x = mean([x for x, _ in points])
    mid_y = mean([y for _, y in points])
    spread = math.fsum((x - mid_x) ** 2 for x, _ in points)
    if spread == 0:
        return 0.0, mid_y
    slope = math.fsum((x - mid_x) * (y - mid_y) for x, y in points) / spread
    return slope, mid_y - slope * mid_x


def brier(forecasts: Sequence[tuple[Sequence[float], int]]) -> float:
    """The mean squared distance to the truth, summed over options (0 best, 2 worst)."""
    return mean(
        [
            math.fsum((p - (place == truth)) ** 2 for place, p in enumerate(shares))
            for shares, truth in forecasts
        ]
    )


@dataclass(frozen=True, slots=True)
class Bin:
    """One confidence band of the reliability table: `low` < confidence <= `high`."""

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


def reliability_bins(
    outcomes: Sequence[tuple[float, bool]], bins: int = 10
) -> list[Bin]:
    """Group (confidence, was right) into equal bands; empty bands are left out."""
    filled: dict[int, list[tuple[float, bool]]] = {}
    for confidence, right in outcomes:
        place = min(max(math.ceil(confidence * bins) - 1, 0), bins - 1)
        filled.setdefault(place, []).append((confidence, right))
    return [
        Bin(
            low=place / bins,
            high=(place + 1) / bins,
            rows=len(rows),
            confidence=mean([confidence for confidence, _ in rows]),
            accuracy=mean([float(right) for _, right in rows]),
        )
        for place, rows in sorted(filled.items())
    ]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """The gap between confidence and accuracy, weighted by the rows of each band."""
    total = sum(band.rows for band in bins)
    if not total:
        return math.nan
    return (
        math.fsum(band.rows * abs(band.confidence - band.accuracy) for band in bins)
        / total
    )
