"""Rotations against plain: is the average right, and where does position pull?

`averaging` recomputes the combined numbers from the orderings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from .client import Answer
from .contract import answer_problems
from .findings import Findings
from .fitting import OverLimits, ask_fitting
from .plots import bar_plot
from .refusals import report_unanswered
from .results import in_short, same_answer
from .rows import Document, Row
from .session import Probe, Reply, object_of
from .statistics import mean
from .unfinished import reporting

__all__ = ["NAME", "TITLE", "measure"]

NAME = "orderings"
TITLE = "Orderings"

_ROWS = 24
_SHARED = "/decide/shared"
_MOST_FOR_ALL = 4  # options


def measure(probe: Probe, findings: Findings) -> None:
    """Ask rows plain and with `rotations`; recompute, compare, look at places."""
    most = probe.limit("max_decisions", 64)
    first = probe.rows[:_ROWS]
    rows = [row for row in first if len(row.options) <= most]
    findings.conditions = f"The first {len(first)} rows ({probe.rows_source})."
    if len(rows) < len(first):
        reason = f"their rotations are over MAX_DECISIONS, {most}"
        findings.skip(f"{len(first) - len(rows)} rows", reason)
    found: list[str] = []
    averaged: list[tuple[Row, Reply]] = []
    refused: dict[str, Answer] = {}
    model = probe.health.get("model")
    with reporting(lambda: _report(probe, findings, averaged, found, refused)):
        for number, row in enumerate(rows, start=1):
            probe.progress.step(f"orderings: row {number} of {len(rows)}")
            plain = probe.try_row(row)
            if plain is None:
                refused[row.id] = probe.refused[row.id]
                continue
            result = probe.try_ask("/decide", row.request("rotations"))
            if isinstance(result, Answer):
                refused[row.id] = result
                continue
            found += _averaged_problems(row, plain, result, model)
            averaged.append((row, result))
    answered = [row for row, _ in averaged]
    _every_order(probe, findings, answered)
    _shared_waves(probe, findings, answered)


def _report(
    probe: Probe,
    findings: Findings,
    averaged: list[tuple[Row, Reply]],
    found: list[str],
    refused: dict[str, Answer],
) -> None:
    report_unanswered(findings, probe.token, "row", refused)
    if not averaged:
        findings.skip("orderings", "no row was answered")
        return
    findings.check(
        "rotations are the n shifts, each a result, combined as the contract says",
        not found,
        in_short(found) or f"{len(averaged)} rows",
    )
    _report_agreement(probe, findings, averaged)
    _report_places(findings, averaged)


def _averaged_problems(
    row: Row, plain: Reply, result: Reply, model: object
) -> list[str]:
    """What is wrong with one averaged `/decide` result."""
    found = answer_problems("/decide", row.request("rotations"), result, model)
    if not found and not same_answer({**result["orderings"][0], "id": row.id}, plain):
        found.append(f"{row.id}: ordering 0 is not the plain answer")
    return found


def _every_order(probe: Probe, findings: Findings, rows: Sequence[Row]) -> None:
    """`all` on the row with the most orderings the server takes."""
    rule = "all gives every permutation, combined as the contract says"
    most = min(probe.limit("max_decisions", 64), math.factorial(_MOST_FOR_ALL))
    fitting = [row for row in rows if math.factorial(len(row.options)) <= most]
    if not fitting:
        findings.skip(rule, "no row that was answered is short enough")
        return
    row = max(fitting, key=lambda row: len(row.options))
    body = row.request("all")
    probe.progress.step("orderings: every permutation of one row")
    result = probe.ask("/decide", body)
    found = answer_problems("/decide", body, result, probe.health.get("model"))
    seen = in_short(found) or f"{math.factorial(len(row.options))} orderings of one row"
    findings.check(rule, not found, seen)


def _shared_waves(probe: Probe, findings: Findings, rows: Sequence[Row]) -> None:
    """Three decisions with unlike orderings in one request: wave 0 is the plain one."""
    rule = "wave 0 of a mixed request is the plain request"
    most = probe.limit("max_decisions", 64)
    leads = [row for row in rows if len(row.options) < most]
    if len(rows) < 2 or not leads:
        findings.skip(rule, "no two rows were answered that fit one request")
        return
    lead = max(leads, key=lambda row: len(row.options))
    others = [row for row in rows if row is not lead][
        : min(2, most - len(lead.options))
    ]
    three = [lead, *others]
    unlike = [lead.decision("rotations"), *(row.decision() for row in others)]
    asked: Document = {"state": lead.state, "decisions": unlike}
    plain: Document = {"state": lead.state, "decisions": [r.decision() for r in three]}
    try:
        whole, others_alone = (
            object_of(_SHARED, ask_fitting(probe, _SHARED, body))
            for body in (asked, plain)
        )
    except OverLimits as error:
        findings.skip(rule, str(error))
        return
    found = answer_problems(_SHARED, asked, whole, probe.health.get("model"))
    seen = in_short(found) or f"{len(three)} decisions, the first with rotations"
    findings.check("a mixed request is answered as the contract says", not found, seen)
    mixed, alone = whole["results"], others_alone["results"]
    zero = [{**mixed[0]["orderings"][0], "id": lead.id}, *mixed[1:]]
    indexes = [one["call"]["index"] for one in mixed[0]["orderings"]]
    findings.check(
        rule,
        same_answer(zero, alone),
        f"{len(three)} decisions, the first with rotations",
    )
    findings.check(
        "each ordering has a wave, and so a call, of its own",
        indexes == list(range(len(lead.options))),
        f"call.index {indexes}",
    )


def _report_agreement(
    probe: Probe, findings: Findings, averaged: list[tuple[Row, Reply]]
) -> None:
    combined = [result["combined"] for _, result in averaged]
    widths = [
        max(one["max"] - one["min"] for one in part["spread"].values())
        for part in combined
    ]
    kept = sum(
        result["combined"]["top"] == probe.scored[row.id]["top"]
        for row, result in averaged
    )
    agreement = mean([part["agreement"] for part in combined])
    findings.facts.update(
        rows=len(averaged),
        mean_agreement=agreement,
        mean_widest_spread=mean(widths),
        combined_top_is_plain_top=kept,
    )
    findings.table(
        "Rotations against plain",
        ("rows", "mean agreement", "mean widest spread", "combined top is plain top"),
        [(len(averaged), f"{agreement:.3f}", f"{mean(widths):.4f}",
          f"{kept} of {len(averaged)}")],
        "Spread is the step of one option's probability over its places.",
    )  # fmt: skip


def _report_places(findings: Findings, averaged: list[tuple[Row, Reply]]) -> None:
    """Position bias: every option was in every place, so each should get 1/n."""
    sizes = Counter(len(row.options) for row, _ in averaged)
    places = {size: _places(averaged, size) for size in sorted(sizes)}
    findings.facts["places"] = {
        str(size): {"rows": sizes[size], "mean_probability": shares, "top": tops}
        for size, (shares, tops) in places.items()
    }
    findings.table(
        "Position bias",
        ("options", "rows", "place", "mean probability", "over 1/n", "is the top"),
        [
            (size, sizes[size], place, f"{share:.4f}", f"{share - 1 / size:+.4f}",
             f"{top:.1%}")
            for size, (shares, tops) in places.items()
            for place, (share, top) in enumerate(zip(shares, tops, strict=True), 1)
        ],
    )  # fmt: skip
    size = sizes.most_common(1)[0][0]
    findings.plot(
        f"Mean probability by place, {size} options",
        bar_plot(
            [f"{place + 1}" for place in range(size)],
            places[size][0],
            x_label="place in the prompt",
            y_label="mean probability",
            reference=1 / size,
            reference_label=f"1/{size}",
        ),
        "Every option stood once in every place: what leaves the dashed line is the "
        "pull of the place itself.",
    )


def _places(
    averaged: list[tuple[Row, Reply]], size: int
) -> tuple[list[float], list[float]]:
    """Mean probability, and share of tops, of each place among `size` options."""
    ones = [
        one
        for row, result in averaged
        if len(row.options) == size
        for one in result["orderings"]
    ]
    shares = [mean([one["probabilities"][n] for one in ones]) for n in range(size)]
    tops = [
        mean([float(one["option_ids"][n] == one["top"]) for one in ones])
        for n in range(size)
    ]
    return shares, tops
