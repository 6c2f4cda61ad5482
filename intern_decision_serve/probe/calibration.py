"""Calibration on labelled rows: Brier, expected calibration error, reliability.

It reads the probabilities as served, temperature included, and changes nothing.
"""

from __future__ import annotations

from .findings import Findings
from .plots import reliability_plot
from .refusals import report_unanswered
from .session import Probe
from .statistics import (
    Bin,
    brier,
    expected_calibration_error,
    mean,
    reliability_bins,
)
from .unfinished import reporting

__all__ = ["NAME", "TITLE", "measure"]

NAME = "calibration"
TITLE = "Calibration"


def measure(probe: Probe, findings: Findings) -> None:
    """Score the labelled rows (or reuse the control's answers) and compare."""
    rows = [row for row in probe.rows if row.label is not None]
    if not rows:
        findings.skip("calibration", "no row has a label")
        return
    findings.conditions = f"{len(rows)} labelled rows ({probe.rows_source})."
    forecasts: list[tuple[list[float], int]] = []
    outcomes: list[tuple[float, bool]] = []
    with reporting(lambda: _report(probe, findings, forecasts, outcomes)):
        for number, row in enumerate(rows, start=1):
            probe.progress.step(f"calibration: row {number} of {len(rows)}")
            result = probe.try_row(row)
            if result is None:
                continue
            shares: list[float] = result["probabilities"]
            forecasts.append((shares, result["option_ids"].index(row.label)))
            outcomes.append((max(shares), result["top"] == row.label))


def _report(
    probe: Probe,
    findings: Findings,
    forecasts: list[tuple[list[float], int]],
    outcomes: list[tuple[float, bool]],
) -> None:
    report_unanswered(findings, probe.token, "row", probe.refused)
    if not forecasts:
        findings.skip("calibration", "no labelled row was answered")
        return
    bands = reliability_bins(outcomes)
    uniform = [([1 / len(shares)] * len(shares), truth) for shares, truth in forecasts]
    facts = {
        "rows": len(forecasts),
        "brier": brier(forecasts),
        "brier_of_equal_shares": brier(uniform),
        "expected_calibration_error": expected_calibration_error(bands),
        "mean_confidence": mean([confidence for confidence, _ in outcomes]),
        "accuracy": mean([float(right) for _, right in outcomes]),
    }
    findings.facts.update(facts)
    findings.table(
        "Scores",
        ("rows", "Brier", "Brier of equal shares", "calibration error",
         "mean confidence", "accuracy"),
        [(facts["rows"], *(f"{value:.4f}" for value in list(facts.values())[1:]))],
        "Brier is summed over options (0 best); the error has ten equal bands.",
    )  # fmt: skip
    _report_bands(findings, bands)


def _report_bands(findings: Findings, bands: list[Bin]) -> None:
    findings.table(
        "Reliability",
        ("confidence", "rows", "mean confidence", "accuracy", "gap"),
        [
            (
                f"{band.low:.1f} to {band.high:.1f}",
                band.rows,
                f"{band.confidence:.3f}",
                f"{band.accuracy:.3f}",
                f"{band.accuracy - band.confidence:+.3f}",
            )
            for band in bands
        ],
    )
    findings.facts["reliability"] = [
        {
            "low": band.low,
            "high": band.high,
            "rows": band.rows,
            "confidence": band.confidence,
            "accuracy": band.accuracy,
        }
        for band in bands
    ]
    points = [(band.confidence, band.accuracy, band.rows) for band in bands]
    findings.plot(
        "Reliability",
        reliability_plot(points),
        "On the dashed line, stated confidence is what comes true; the area of a dot "
        "is its share of the rows.",
    )
