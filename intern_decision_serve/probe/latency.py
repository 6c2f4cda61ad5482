"""Latency and throughput: by prompt length, by questions, by clients, named shapes.

Every sample is another prompt of the same size, in this run and against earlier ones,
so that no cache of answers can flatter. The time budget is shared out evenly between
the points; a point takes at least three samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from .findings import Findings
from .fitting import OverLimits, ask_fitting
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


def numbered(probe: Probe, build: Build, words: int) -> Make:
    """A maker of requests of one size, each with a text never sent before."""

    def make() -> tuple[str, Document]:
        return build(filler(words, next(probe.numbers)))

    return make


def _lengths(limit: int) -> list[int]:
    top = round(limit * _TOP_SHARE)
    return [length for length in _LENGTHS if length < top * 0.8] + [top]


@dataclass(slots=True)
class _Sweep:
    """Points taken one after another, each of a shape that fits the server."""

    probe: Probe
    findings: Findings
    seconds: float
    points: list[Point] = field(default_factory=list)

    def take(
        self,
        point: Point,
        shape: str,
        build: Build,
        words: Callable[[], int] = lambda: _SHORT_WORDS,
    ) -> None:
        """Sample one more point, or say which limit leaves the shape out."""
        self.probe.progress.step(f"latency: {shape}")
        try:
            make = numbered(self.probe, build, words())
            ask_fitting(self.probe, *make())
        except OverLimits as error:
            self.findings.skip(shape, str(error))
            return
        self.points.append(point)
        sample(self.probe, point, make, self.seconds)


def _by_length(probe: Probe, findings: Findings, seconds: float) -> None:
    limit = probe.limit("max_tokens", 8192)
    sizer = Sizer(probe, one_question)
    sweep = _Sweep(probe, findings, seconds)
    try:
        smallest = sizer.overhead()
    except OverLimits as error:
        findings.skip("by prompt length", str(error))
        return

    def report() -> None:
        title = "By prompt length, one question"
        _report(findings, title, "by_tokens", sweep.points, shape="wanted")
        findings.plot(
            "Latency by prompt length",
            line_plot(_lines(sweep.points, [point.tokens for point in sweep.points]),
                      x_label="tokens of the call", y_label="milliseconds"),
            "The gap between p50 and server p50 is transport, parsing and queueing.",
        )  # fmt: skip

    with reporting(report):
        for wanted in _lengths(limit):
            if wanted >= smallest:
                rule = f"{wanted} tokens, 1 question"
                words = partial(sizer.words_for, wanted)
                sweep.take(Point(str(wanted)), rule, one_question, words)


def _by_questions(probe: Probe, findings: Findings, seconds: float) -> None:
    sweep = _Sweep(probe, findings, seconds)

    def report() -> None:
        title = "By number of questions, a short state"
        _report(findings, title, "by_questions", sweep.points, shape="questions")
        findings.plot(
            "Latency by number of questions",
            line_plot(_lines(sweep.points, [int(p.label) for p in sweep.points]),
                      x_label="questions in one request", y_label="milliseconds",
                      marks=[16.5]),
            "Over 16 questions a request is more than one call.",
        )  # fmt: skip

    with reporting(report):
        for count in _QUESTIONS:
            sweep.take(Point(str(count)), f"{count} questions", criteria(count))


def _named_shapes(probe: Probe, findings: Findings, seconds: float) -> None:
    sweep = _Sweep(probe, findings, seconds)
    sizer = Sizer(probe, criteria(16))

    def report() -> None:
        note = ""
        if len(sizer.seen) > 1:
            of_them = f"{sizer.overhead()} are not the state's"
            note = f"Of the tokens of the 16 criteria, {of_them}."
        _report(findings, "Named shapes", "named_shapes", sweep.points, shape="shape",
                note=note)  # fmt: skip

    with reporting(report):
        binary, long = "21 binary criteria", "16 criteria, 3,900-token state"
        sweep.take(Point(binary), binary, criteria(21))
        sweep.take(Point(long), long, criteria(16), partial(_words_over, sizer, 3900))


def _words_over(sizer: Sizer, tokens: int) -> int:
    """Words for so many tokens of state; OverLimits where no call holds them."""
    wanted, most = sizer.overhead() + tokens, sizer.probe.limit("max_tokens", 8192)
    if wanted > most:
        raise OverLimits(f"over the server's limits: {wanted} tokens of {most}")
    return sizer.words_for(wanted)


def _by_clients(probe: Probe, findings: Findings, seconds: float) -> None:
    """Closed loops of 1..16 clients, with `/health` watched from beside."""
    places = probe.queue_places()
    counts = [count for count in _CLIENTS if count <= places]
    points: list[Point] = []
    changes: list[tuple[float, str]] = []
    make = numbered(probe, one_question, _SHORT_WORDS)
    try:
        ask_fitting(probe, *make())
    except OverLimits as error:
        findings.skip("by clients", str(error))
        return
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
    if not points:
        return  # each shape said why
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
    excess = max((point.excess for point in points), default=0.0)
    findings.check(
        f"the server's seconds are within this side's: {title[0].lower()}{title[1:]}",
        excess <= 0,
        f"{max(excess, 0.0):.3f} s more",
    )
