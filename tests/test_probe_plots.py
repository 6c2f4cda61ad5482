"""Plots are whole SVG elements that need nothing from outside."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from intern_decision_serve.probe import plots

LINES = [
    plots.Line("p95", [(1, 20.0), (2, 30.0)]),
    plots.Line('p50 <&"', [(1, 10.0), (2, 29.0)]),
    plots.Line("empty", []),
]

DRAWINGS = {
    "lines": plots.line_plot(LINES, x_label="x < y", y_label="ms", marks=[1.5, 99]),
    "no lines": plots.line_plot([], x_label="x", y_label="ms"),
    "one point": plots.line_plot(
        [plots.Line("p50", [(1, 0.2)])], x_label="x", y_label="ms"
    ),
    "steps": plots.step_plot(
        [(0.0, 0.0), (0.5, 4.0), (1.0, 2.0)],
        [(0.0, "1"), (0.5, "2")],
        x_label="seconds",
        y_label="admitted",
    ),
    "one step": plots.step_plot([(0.0, 0.0)], [], x_label="seconds", y_label="n"),
    "bars": plots.bar_plot(
        ["1", "2"],
        [0.6, 0.4],
        x_label="place",
        y_label="mean",
        reference=0.5,
        reference_label="1/2",
    ),
    "reliability": plots.reliability_plot([(0.9, 0.8, 30), (0.5, 0.5, 1)]),
    "no rows": plots.reliability_plot([]),
}


@pytest.mark.parametrize("svg", DRAWINGS.values(), ids=DRAWINGS.keys())
def test_every_plot_is_one_well_formed_element_inside_its_box(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    assert root.tag == "svg"
    assert root.get("role") == "img"
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for element in root.iter():
        for name, most in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            value = element.get(name)
            assert value is None or -20 <= float(value) <= most
    assert not re.search(r"(href|src|url\(|https?:|nan|inf)", svg)


@pytest.mark.parametrize(
    ("high", "count", "expected"),
    [
        (100, 5, [0, 20, 40, 60, 80, 100]),
        (7, 5, [0, 2, 4, 6, 8]),
        (0.9, 3, [0, 0.5, 1.0]),
        (0, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (float("nan"), 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (12000, 5, [0, 2500, 5000, 7500, 10000, 12500]),
        (0.0006, 5, [0, 0.002]),  # no digits that the margin has no room for
    ],
)
def test_ticks_are_round_and_reach_the_top(
    high: float, count: int, expected: list[float]
) -> None:
    assert plots.nice_ticks(high, count) == pytest.approx(expected)


def test_names_at_line_ends_do_not_touch() -> None:
    root = ElementTree.fromstring(
        plots.line_plot(
            [
                plots.Line(name, [(0, 1), (1, 5 + n / 100)])
                for n, name in enumerate("abc")
            ],
            x_label="x",
            y_label="y",
        )
    )
    heights = sorted(
        float(text.get("y", "0"))
        for text in root.iter("text")
        if text.get("class", "").startswith("end")
    )
    assert len(heights) == 3
    assert all(two - one >= 15 for one, two in zip(heights, heights[1:], strict=False))
