"""One run of the probe: reach the server, measure section by section, write it down.

A section that cannot go on ends in words and the next one starts; an interrupt ends the
run and still writes what is there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from . import (
    calibration,
    chunking,
    control,
    expect,
    latency,
    limits,
    orderings,
    repeat,
)
from .client import Client, Tally
from .findings import FAIL, NOT_MEASURED, Findings
from .foreign import MISREAD, say, to_json, without_token
from .markdown import to_markdown
from .page import to_html
from .progress import Progress
from .report import (
    Report,
    conditions,
    document,
    make_sure_of,
    now,
    report_paths,
    write_reports,
)
from .rows import read_rows
from .samples import built_in_rows
from .session import Probe, Unanswered
from .wire import NoDescriptors, parse_target

__all__ = [
    "EXIT_DIFFERS",
    "EXIT_FINE",
    "EXIT_INTERRUPTED",
    "EXIT_USAGE",
    "Unusable",
    "run",
]

EXIT_FINE = 0
EXIT_DIFFERS = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

Measure = Callable[[Probe, Findings], None]

_SECTIONS: dict[str, tuple[str, Measure]] = {
    module.NAME: (module.TITLE, module.measure)
    for module in (control, repeat, orderings, chunking, latency, limits, calibration)
}


class Unusable(Exception):
    """Raised when there is no server to measure, or not with this token."""


def open_probe(options: argparse.Namespace, token: str, progress: Progress) -> Probe:
    """Reach the server and make sure of the token; Unusable says why not."""
    target = parse_target(options.url)
    tally = Tally("opening")
    with Client(target, token, tally, deadline=options.deadline) as client:
        answer = client.get("/health")
        if answer.status != 200 or not isinstance(answer.document, dict):
            raise Unusable(f"{target.url}/health: {answer.instead}")
        first = client.post("/decide", built_in_rows()[0].request())
    if first.status in (401, 403):
        raise Unusable(f"{target.url} refuses the token: {first.named}")
    if options.rows is not None:
        rows, source = read_rows(options.rows), options.rows.name
    else:
        rows, source = built_in_rows(), "built in, a sanity set"
    return Probe(target, token, options, answer.document, tally, progress, rows, source)


def run(options: argparse.Namespace, token: str, out: TextIO, err: TextIO) -> int:
    """Measure, write the reports and the verdict; the exit status."""
    expected = expect.read_expected(options.expect) if options.expect else None
    if options.compare is not None:
        control.earlier_rows(options.compare)
    recorded = [options.record] if options.record is not None else []
    make_sure_of([*report_paths(options.out), *recorded])  # now, not when all is done
    progress = Progress(err)
    started, clock = now(), time.monotonic()
    probe = open_probe(options, token, progress)
    report = Report(started, conditions(probe, started), probe.health)
    try:
        for name in options.sections:
            title, measure = _SECTIONS[name]
            _measure(probe, report, name, title, measure)
        _expectation(probe, report, expected)
    except KeyboardInterrupt:
        report.complete = False
    probe.close()
    progress.clear()
    _count_answers(probe, report)
    report.seconds = time.monotonic() - clock
    _write(report, options, token, out)
    if not report.complete:
        return EXIT_INTERRUPTED
    return EXIT_DIFFERS if report.failed else EXIT_FINE


def _measure(
    probe: Probe, report: Report, name: str, title: str, measure: Measure
) -> None:
    """Run one section; what it found stays in the report, however it ends."""
    findings = Findings(name, title)
    report.sections.append(findings)
    probe.tally.section = name
    started = time.monotonic()
    try:
        measure(probe, findings)
        findings.complete = True
    except Unanswered as error:
        findings.check("the section could go on", False, str(error))
    except NoDescriptors as error:
        findings.skip("the rest of the section", str(error))
    except Exception as error:  # whatever an answer did, the rest is still measured
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, MISREAD):
            words = f"an answer had another shape: {words}"
        findings.check("the section could go on", False, words)
    finally:
        findings.seconds = time.monotonic() - started


def _expectation(
    probe: Probe, report: Report, expected: dict[str, object] | None
) -> None:
    path = probe.options.record

    def work(probe: Probe, findings: Findings) -> None:
        if expected is not None:
            expect.expect(probe, findings, expected)
        if path is not None:
            expect.record(probe, findings, path)

    if expected is not None or path is not None:
        _measure(probe, report, expect.NAME, expect.TITLE, work)


def _count_answers(probe: Probe, report: Report) -> None:
    """Every answer into the report; one nobody asked for fails a check of its own."""
    counts = probe.tally.counts
    report.answers = [
        (section, named, count, wanted)
        for (section, named, wanted), count in counts.items()
    ]
    unexpected = probe.tally.unexpected()
    findings = Findings("all", "The whole run", complete=True)
    findings.check(
        "every answer is one the probe asked for",
        not unexpected,
        f"{unexpected} of {sum(counts.values())} answers are not",
    )
    report.sections.append(findings)


def _write(
    report: Report, options: argparse.Namespace, token: str, out: TextIO
) -> None:
    texts = [
        to_markdown(report),
        to_json(document(report)),
        to_html(report),
    ]
    paths = report_paths(options.out)
    try:
        write_reports(paths, texts, token)
    finally:
        for line in _verdict(report):
            say(out, without_token(line, token))
    say(out, "written: " + ", ".join(str(path) for path in paths))


def _verdict(report: Report) -> Iterator[str]:
    """What a person at a terminal wants: what failed, what was not measured."""
    for section in report.sections:
        for check in section.checks:
            if check.outcome in (FAIL, NOT_MEASURED):
                seen = f" ({check.seen})" if check.seen else ""
                yield f"{check.outcome:>12}  {section.name}: {check.rule}{seen}"
        differences = section.facts.get("differences")
        if isinstance(differences, list):
            yield from (f"  difference  {line}" for line in differences)
    checks = sum(len(section.checks) for section in report.sections)
    state = "" if report.complete else "incomplete, interrupted: "
    yield f"{state}{checks} checks, {report.failed} failed, {report.seconds:.0f} s"
