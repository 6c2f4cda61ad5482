"""Latency and throughput: by prompt length, by questions, by clients, named shapes.

Every sample is another prompt of the same size, so that no cache can flatter. The time
budget is shared out evenly between the points; a point takes at least three samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .findings import Findings
from .plots import Line, line_plot, step_plot
from .rows import Document
from .samples import filler
from .sampling import (
    CELLS,
    HealthWatch,
    Make,
    Point,
    sample,
    sample_at_once,
)
from .session import Probe
from .shapes import Build, Sizer, criteria, one_question
from .statistics import percentile
from .unfinished import reporting

__all__ = ["NAME", "TITLE", "measure"]

NAME = "latency"
TITLE = "Latency and throughput"

_LENGTHS = (250, 500, 1000, 2000, 4000, 8000, 16000, 32000)
_TOP_SHARE = 0.95  # of MAX_TOKENS: the sweep's last point
_QUESTIONS = (1, 2, 4, 8, 16, 32)
_CLIENTS = (1, 2, 4, 8, 16)
_SHORT_WORDS = 40
_POINTS = 20  # about as many as there are, for sharing out the budget


def measure(probe: Probe, findings: Findings) -> None:
    """Take all points, each group as soon as it is complete into the report."""
    seconds = probe.options.seconds / _POINTS
    findings.conditions = (
        "Wall time as this client saw it over one kept-alive connection each, no "
        f"retries; about {seconds:.1f} s or {probe.options.samples} samples a point, "
        "whichever comes first; a p99 only from 100 samples on. Queue share is 1 - "
        "server scoring seconds / wall seconds."
    )
    _by_length(probe, findings, seconds)
    _by_questions(probe, findings, seconds)
    _named_shapes(probe, findings, seconds)
    _by_clients(probe, findings, seconds)


def numbered(build: Build, words: int) -> Make:
    """A maker of requests of one size, each with another text."""

    def make(number: int) -> tuple[str, Document]:
        return build(filler(words, number + 1))

    return make


def _lengths(limit: int) -> list[int]:
    top = round(limit * _TOP_SHARE)
    return [length for length in _LENGTHS if length < top * 0.8] + [top]


def _by_length(probe: Probe, findings: Findings, seconds: float) -> None:
    limit = probe.limit("max_tokens", 8192)
    sizer = Sizer(probe, one_question)
    smallest = sizer.overhead()
    points: list[Point] = []

    def report() -> None:
        title = "By prompt length, one question"
        _report(findings, title, "by_tokens", points, shape="wanted")
        findings.plot(
            "Latency by prompt length",
            line_plot(_lines(points, [point.tokens for point in points]),
                      x_label="tokens of the call", y_label="milliseconds"),
            "The gap between p50 and server p50 is transport, parsing and queueing.",
        )  # fmt: skip

    with reporting(report):
        for wanted in _lengths(limit):
            if wanted < smallest:
                continue
            probe.progress.step(f"latency: {wanted} tokens, 1 question")
            make = numbered(one_question, sizer.words_for(wanted))
            points.append(Point(str(wanted)))
            sample(probe, points[-1], make, seconds)


def _by_questions(probe: Probe, findings: Findings, seconds: float) -> None:
    most = probe.limit("max_decisions", 64)
    counts = [count for count in _QUESTIONS if count <= most]
    points: list[Point] = []

    def report() -> None:
        title = "By number of questions, a short state"
        _report(findings, title, "by_questions", points, shape="questions")
        findings.plot(
            "Latency by number of questions",
            line_plot(_lines(points, [int(point.label) for point in points]),
                      x_label="questions in one request", y_label="milliseconds",
                      marks=[16.5]),
            "Over 16 questions a request is more than one call.",
        )  # fmt: skip

    with reporting(report):
        for count in counts:
            probe.progress.step(f"latency: {count} questions")
            make = numbered(criteria(count), _SHORT_WORDS)
            points.append(Point(str(count)))
            sample(probe, points[-1], make, seconds)


def _named_shapes(probe: Probe, findings: Findings, seconds: float) -> None:
    points: list[Point] = []
    most = probe.limit("max_decisions", 64)
    sizer = Sizer(probe, criteria(16))

    def report() -> None:
        note = (
            f"Of the tokens of the 16 criteria, {sizer.overhead()} are not the state's."
        )
        _report(
            findings, "Named shapes", "named_shapes", points, shape="shape", note=note
        )

    with reporting(report):
        if most >= 21:
            probe.progress.step("latency: 21 binary criteria")
            make = numbered(criteria(21), _SHORT_WORDS)
            points.append(Point("21 binary criteria"))
            sample(probe, points[-1], make, seconds)
        wanted = sizer.overhead() + 3900
        if wanted <= probe.limit("max_tokens", 8192):
            probe.progress.step("latency: 16 criteria over 3,900 tokens")
            make = numbered(criteria(16), sizer.words_for(wanted))
            points.append(Point("16 criteria, 3,900-token state"))
            sample(probe, points[-1], make, seconds)
    for missing in ("21 binary criteria", "16 criteria, 3,900-token state"):
        if missing not in [point.label for point in points]:
            findings.skip(missing, "over the server's limits")


def _by_clients(probe: Probe, findings: Findings, seconds: float) -> None:
    """Closed loops of 1..16 clients, with `/health` watched from beside."""
    places = probe.queue_places()
    counts = [count for count in _CLIENTS if count <= places]
    points: list[Point] = []
    changes: list[tuple[float, str]] = []
    make = numbered(one_question, _SHORT_WORDS)
    watch = HealthWatch(probe)

    def report() -> None:
        _report(findings, "By clients asking at once, one short question",
                "by_clients", points, shape="clients", with_rate=True)  # fmt: skip
        findings.plot(
            "Latency by clients",
            line_plot(_lines(points, [int(point.label) for point in points]),
                      x_label="clients asking at once", y_label="milliseconds"),
            "One inference thread: waiting grows with the clients, scoring must not.",
        )  # fmt: skip
        _report_watch(findings, watch, changes)

    with reporting(report), watch:
        for count in counts:
            probe.progress.step(f"latency: clients at once: {count}")
            changes.append((watch.now, f"{count}"))
            points.append(Point(str(count)))
            sample_at_once(probe, points[-1], make, seconds, count)


def _report_watch(
    findings: Findings, watch: HealthWatch, changes: Sequence[tuple[float, str]]
) -> None:
    times = [look.seconds for look in watch.samples]
    if times:
        findings.facts["health_under_load_ms"] = {
            "samples": len(times),
            "p50": percentile(times, 0.5) * 1000,
            "max": max(times) * 1000,
        }
        findings.table(
            "/health while clients ask",
            ("looks", "p50 ms", "longest ms", "not 200"),
            [(len(times), f"{percentile(times, 0.5) * 1000:.1f}",
              f"{max(times) * 1000:.1f}", watch.refused)],
        )  # fmt: skip
    queue = [(look.at, look.admitted) for look in watch.samples]
    known = [(at, float(count)) for at, count in queue if count is not None]
    if not known:
        findings.skip("queue under load", "/health does not report the queue")
        return
    shown = ", ".join(name for _, name in changes)
    findings.facts["queue_under_load"] = known
    findings.plot(
        "Queue under load",
        step_plot(known, changes, x_label="seconds", y_label="requests admitted"),
        f"What /health showed. The uprights are where {shown} clients began to ask.",
    )


def _lines(points: Sequence[Point], places: Sequence[int]) -> list[Line]:
    """p50 and p95 as seen here, p50 as the server says; empty points are left out."""

    def line(name: str, values: Iterator[tuple[float, float]]) -> Line:
        return Line(name, [(x, y * 1000) for x, y in values])

    kept = [(x, p) for x, p in zip(places, points, strict=True) if p.wall]
    return [
        line("p95", ((x, percentile(p.wall, 0.95)) for x, p in kept)),
        line("p50", ((x, percentile(p.wall, 0.50)) for x, p in kept)),
        line("server p50", ((x, percentile(p.server, 0.50)) for x, p in kept)),
    ]


def _report(
    findings: Findings,
    title: str,
    fact: str,
    points: list[Point],
    *,
    shape: str,
    note: str = "",
    with_rate: bool = False,
) -> None:
    rate = ("answers/s",) if with_rate else ()
    rows = [
        (p.label, p.tokens, *([f"{p.per_second:.1f}"] if with_rate else []), *p.cells())
        for p in points
    ]
    findings.facts[fact] = [point.facts() for point in points]
    findings.table(title, (shape, "tokens", *rate, *CELLS), rows, note)
    refused = sum(sum(point.refused.values()) for point in points)
    findings.check(
        f"every answer was a 200: {title[0].lower()}{title[1:]}",
        refused == 0,
        f"{refused} others",
    )
