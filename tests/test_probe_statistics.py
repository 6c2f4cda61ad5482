"""The report's arithmetic, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from intern_decision_serve.probe import statistics


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.95, 7.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.5),
        ([0.0, 10.0], 0.95, 9.5),
        ([1.0, 2.0, 3.0], 1.0, 3.0),
    ],
)
def test_percentiles_interpolate(
    values: list[float], share: float, expected: float
) -> None:
    assert statistics.percentile(values, share) == pytest.approx(expected)


def test_p99_needs_a_hundred_samples() -> None:
    few = [float(n) for n in range(99)]
    assert statistics.summary(few)["p99"] is None
    assert statistics.summary([*few, 99.0])["p99"] == pytest.approx(98.01)


def test_no_samples_have_no_percentiles() -> None:
    assert statistics.summary([]) == {
        "samples": 0,
        "p50": None,
        "p95": None,
        "p99": None,
    }
    assert math.isnan(statistics.percentile([], 0.5))
    assert math.isnan(statistics.mean([]))


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [(240, 259, 0.888, 0.953), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0)],
)
def test_wilson_interval(hits: int, total: int, low: float, high: float) -> None:
    interval = statistics.wilson(hits, total)
    assert interval.share == hits / total
    assert (round(interval.low, 3), round(interval.high, 3)) == (low, high)


def test_wilson_of_nothing_is_everything() -> None:
    interval = statistics.wilson(0, 0)
    assert math.isnan(interval.share)
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_line_through_points() -> None:
    assert statistics.line_through([(0, 5), (10, 25)]) == pytest.approx((2.0, 5.0))
    assert statistics.line_through([(3, 5), (3, 7)]) == (0.0, 6.0)


def test_brier_sums_over_options() -> None:
    assert statistics.brier([([1.0, 0.0], 0), ([0.5, 0.5], 1)]) == pytest.approx(0.25)
    assert statistics.brier([([1.0, 0.0], 1)]) == pytest.approx(2.0)


def test_reliability_bins_close_above() -> None:
    outcomes = [(0.5, True), (0.5, False), (0.51, True), (1.0, True), (0.0, False)]
    bands = statistics.reliability_bins(outcomes)
    assert [(band.low, band.high, band.rows) for band in bands] == [
        (0.0, 0.1, 1),
        (0.4, 0.5, 2),
        (0.5, 0.6, 1),
        (0.9, 1.0, 1),
    ]
    assert (bands[1].confidence, bands[1].accuracy) == (0.5, 0.5)


def test_calibration_error_weighs_bands_by_rows() -> None:
    bands = statistics.reliability_bins([(0.9, True), (0.9, True), (0.9, False)])
    assert statistics.expected_calibration_error(bands) == pytest.approx(0.9 - 2 / 3)
    assert math.isnan(statistics.expected_calibration_error([]))
