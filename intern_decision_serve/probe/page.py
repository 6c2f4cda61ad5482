"""The report as one HTML page: no script, no font, no request to anywhere.

Light and dark come from the reader's own setting; the plots are part of the page and
take their colours from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .findings import (
    FAIL,
    NOT_MEASURED,
    PASS,
    Check,
    Findings,
)
from .report import Report

__all__ = ["to_html"]

# Colours keep 4.5:1 against their ground for text; s1..s3 differ in lightness as well
# as in hue, for eyes that do not tell red from green.
_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --panel: #f6f7f9; --ink: #1c2330;
  --soft: #5b6575; --rule: #dfe3ea; --grid: #e8ebf0; --s1: #1d5fb4; --s2: #c2560a;
  --s3: #6b7788; --pass: #14713d; --fail: #b3261e; --failground: #fdecea; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181f; --panel: #1b212b;
  --ink: #e6eaf1; --soft: #9aa6b8; --rule: #313a49; --grid: #262e3a; --s1: #6cb0ff;
  --s2: #ffa45c; --s3: #a9b4c4; --pass: #63cf8f; --fail: #ff8a80;
  --failground: #3a1d1c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 40px 24px 80px; max-width: 1000px; color: var(--ink);
  background: var(--ground); font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans",
  sans-serif; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em; }
h2 { font-size: 20px; margin: 52px 0 8px; padding-top: 20px;
  border-top: 1px solid var(--rule); }
h3 { font-size: 15px; margin: 28px 0 8px; }
p { margin: 6px 0 12px; max-width: 72ch; } p.soft, .note { color: var(--soft); }
.note { font-size: 13px; margin-top: 6px; }
.verdict { display: inline-block; margin: 12px 0 18px; padding: 7px 14px;
  border-radius: 6px; font-weight: 600; background: var(--panel); }
.verdict.pass { color: var(--pass); } .verdict.fail { color: var(--fail);
  background: var(--failground); }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 22px;
  font-size: 14px; }
a { color: var(--s1); text-decoration: none; } a:hover { text-decoration: underline; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; }
table.checks, table.about { width: 100%; }
table.checks td:nth-child(2) { width: 42%; }
th { text-align: left; font-weight: 600; color: var(--soft); white-space: nowrap; }
th, td { padding: 5px 26px 5px 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; overflow-wrap: anywhere; }
th { overflow-wrap: normal; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
td.k { color: var(--soft); white-space: nowrap; width: 1%; }
.pass { color: var(--pass); } .fail { color: var(--fail); font-weight: 600; }
.skip { color: var(--soft); } td.o { white-space: nowrap; width: 1%; }
details > summary { cursor: pointer; color: var(--soft); font-size: 14px;
  margin: 18px 0 8px; }
.plots { display: grid; gap: 18px; margin: 24px 0;
  grid-template-columns: repeat(auto-fill, minmax(min(460px, 100%), 1fr)); }
figure { margin: 0; padding: 14px 16px 12px; background: var(--panel);
  border-radius: 8px; } figcaption { font-size: 13px; color: var(--soft); }
figure b { display: block; margin-bottom: 8px; font-size: 14px; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, "Segoe UI",
  "DejaVu Sans", sans-serif; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.mark { stroke: var(--soft); stroke-dasharray: 2 4; }
.reference { stroke: var(--soft); stroke-dasharray: 6 5; fill: none; }
.tick { fill: var(--soft); font-variant-numeric: tabular-nums; }
.name { fill: var(--soft); } .value { fill: var(--ink); font-weight: 600;
  paint-order: stroke; stroke: var(--panel); stroke-width: 4px; }
.end { font-weight: 600; } .line { fill: none; stroke-width: 2.2;
  stroke-linejoin: round; } .line.thin { stroke-width: 1.4; }
path.s1 { stroke: var(--s1); } path.s2 { stroke: var(--s2); }
path.s3 { stroke: var(--s3); stroke-dasharray: 5 4; }
.dot { stroke: var(--panel); stroke-width: 1.5; }
.s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
path.line { fill: none; } path.area { stroke: none; fill-opacity: .16; }
.bubble { fill-opacity: .55; stroke: var(--s1); } .bar { fill-opacity: .85; }
"""

_LONG_TABLE = 14  # rows; longer ones start folded


def to_html(report: Report) -> str:
    """The whole page."""
    return "".join(_parts(report))


def _parts(report: Report) -> Iterator[str]:
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>Probe of a decision server</title>"
        '<link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body><h1>Probe of a decision server</h1>"
    )
    yield from _head(report)
    for section in report.sections:
        yield from _section(section)
    yield '<h2 id="answers">Every answer, counted</h2>'
    columns = ("section", "answer", "count", "expected")
    rows = [
        (section, named, str(count), "yes" if expected else "no")
        for section, named, count, expected in report.answers
    ]
    yield _table(columns, rows)
    yield "</body></html>\n"


def _head(report: Report) -> Iterator[str]:
    checks = [check for section in report.sections for check in section.checks]
    shown = dict(report.conditions)
    subject = f"{shown.get('model name', 'a server')} at {shown['server']}"
    yield f'<p class="soft">{escape(subject)}, {escape(shown["started"])}</p>'
    skipped = sum(check.outcome == NOT_MEASURED for check in checks)
    held = len(checks) - report.failed - skipped
    word = "fail" if report.failed or not report.complete else "pass"
    verdict = f"{held} checks pass, {report.failed} fail, {skipped} not measured"
    if not report.complete:
        verdict = f"Incomplete, interrupted: {verdict}"
    yield f'<div class="verdict {word}">{verdict}</div><nav>'
    for section in report.sections:
        yield f'<a href="#{section.name}">{escape(section.title)}</a>'
    yield '<a href="#answers">Every answer</a></nav>'
    rows = "".join(
        f'<tr><td class="k">{escape(name)}</td><td>{escape(value)}</td></tr>'
        for name, value in report.conditions
    )
    yield f'<div class="wide"><table class="about">{rows}</table></div>'


def _section(section: Findings) -> Iterator[str]:
    yield f'<h2 id="{section.name}">{escape(section.title)}</h2>'
    if not section.complete:
        yield '<p class="fail">Incomplete.</p>'
    yield f'<p class="soft">{escape(section.conditions)}</p>'
    if section.checks:
        rows = "".join(_check(check) for check in section.checks)
        yield (
            '<div class="wide"><table class="checks"><tr><th>outcome</th>'
            f"<th>check</th><th>seen</th></tr>{rows}</table></div>"
        )
    if section.plots:
        figures = (
            f"<figure><b>{escape(plot.title)}</b>{plot.svg}"
            f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
            for plot in section.plots
        )
        yield f'<div class="plots">{"".join(figures)}</div>'
    for table in section.tables:
        note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
        body = _table(table.columns, table.rows) + note
        if len(table.rows) > _LONG_TABLE:
            title = f"{escape(table.title)} ({len(table.rows)} rows)"
            yield f"<details><summary>{title}</summary>{body}</details>"
        else:
            yield f"<h3>{escape(table.title)}</h3>{body}"


def _check(check: Check) -> str:
    words = {PASS: ("pass", "pass"), FAIL: ("fail", "fail")}
    style, word = words.get(check.outcome, ("skip", check.outcome))
    return (
        f'<tr><td class="o {style}">{word}</td><td>{escape(check.rule)}</td>'
        f"<td>{escape(check.seen)}</td></tr>"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns that hold only numbers stand right."""
    numeric = [
        bool(rows) and all(_is_number(row[place]) for row in rows)
        for place in range(len(columns))
    ]

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if right else ''}>{escape(value)}</{tag}>"
            for value, right in zip(values, numeric, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><tr>{cells("th", columns)}</tr>{body}</table></div>'
    )


def _is_number(text: str) -> bool:
    return (
        text == "–" or text.strip("+-%").replace(".", "", 1).replace(",", "").isdigit()
    )
