"""The written report: the same facts three times, with their conditions, no token."""

from __future__ import annotations

import html
import http.client
import io
import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import probe_fakes
import pytest
from probe_fakes import TOKEN, serving

from intern_decision_serve import probe
from intern_decision_serve.probe import expect
from intern_decision_serve.probe.client import read_answer
from intern_decision_serve.probe.findings import Findings
from intern_decision_serve.probe.foreign import decode, to_json
from intern_decision_serve.probe.markdown import to_markdown
from intern_decision_serve.probe.page import to_html
from intern_decision_serve.probe.report import Report, conditions, document

SUFFIXES = (".md", ".json", ".html")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A whole run's reports, of a server that echoes the token in its errors."""
    out = tmp_path_factory.mktemp("reports") / "probe.report"
    arguments = ["--seconds", "0.05", "--repeats", "2", "--client", "the test"]
    with pytest.MonkeyPatch.context() as patch, serving("echoes the token") as fake:
        patch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
        assert probe.main([fake.url, "--out", str(out), *arguments]) == 0
    return {end: Path(f"{out}{end}").read_text("utf-8") for end in SUFFIXES}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_token_is_in_no_report(written: dict[str, str], suffix: str) -> None:
    assert "a-token-of-the-tests" not in written[suffix]
    assert "[token]" in written[suffix]


@pytest.mark.parametrize("token", ["client-token-zzz", 'part|one\\two"&<x>'])
@pytest.mark.parametrize("spelling", ["plain", "escaped"])
def test_no_echo_of_the_token_leaves(
    token: str,
    spelling: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that puts it into `/health`, into names and into error codes."""
    echo = json.dumps(token)
    if spelling == "escaped":
        echo = '"' + "".join(f"\\u{ord(letter):04x}" for letter in token) + '"'
    plain = probe_fakes.to_bytes
    marked = re.compile(rb'"(0\.0-fake|Fake|unauthorized|MARK)"')

    def echoing(body: object) -> bytes:
        if isinstance(body, dict) and "status" in body:
            body = {**body, "MARK": 1, "chunking": ["MARK", {"a": "MARK"}]}
        return marked.sub(lambda _: echo.encode(), plain(body))

    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", token)
    monkeypatch.setattr(probe_fakes, "TOKEN", token)
    monkeypatch.setattr(probe_fakes, "to_bytes", echoing)
    monkeypatch.setattr(expect, "_ROUNDS", 1)
    arguments = ["--out", str(tmp_path / "r"), "--record", str(tmp_path / "e.json")]
    with serving() as fake:
        probe.main([fake.url, *arguments, "--sections", "limits"])
        monkeypatch.setattr(probe_fakes, "TOKEN", "another")
        assert probe.main([fake.url, *arguments]) == 2
    said = capsys.readouterr()
    texts = [path.read_text("utf-8") for path in sorted(tmp_path.iterdir())]
    assert len(texts) == 4
    assert said.err == f"probe: {fake.url} refuses the token: 401 [token]\n"
    for text in (*texts, said.out):
        assert "[token]" in text
        for spelt in (token, json.dumps(token)[1:-1], html.escape(token)):
            assert spelt not in text
            assert spelt.replace("|", "\\|") not in text


def test_a_token_that_ends_otherwise_is_blotted_out_too() -> None:
    for echo in ("client-token-zzz", "client-token-zz", "client-token-zzy"):
        raw = json.dumps({echo: f"no {echo}"}).encode()
        assert "client-token-zz" not in str(decode(raw, "client-token-zzz"))


def test_an_echoed_header_is_not_passed_on() -> None:
    reply = b"HTTP/1.1 429 X\r\nRetry-After: <%s>\r\nContent-Length: 0\r\n\r\n"
    response = http.client.HTTPResponse(cast(Any, _Bytes(reply % TOKEN.encode())))
    response.begin()
    assert read_answer(response, 0.0, TOKEN).headers["retry-after"] == "<[token]>"


class _Bytes:
    """A socket as far as http.client's reader needs one."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_report_names_its_conditions(
    written: dict[str, str], suffix: str
) -> None:
    for words in ("0.0-fake", "f" * 40, "the test: ", "Python 3.", " UTC", "samples"):
        assert words in written[suffix]


def test_the_json_holds_every_section_and_every_answer(
    written: dict[str, str],
) -> None:
    report = json.loads(written[".json"])
    assert report["format"] == "intern-decision-serve probe 1"
    assert report["health"]["version"] == "0.0-fake"
    latency = next(s for s in report["sections"] if s["name"] == "latency")["facts"]
    assert {"by_tokens", "by_questions", "named_shapes", "by_clients"} <= set(latency)
    [point, *_] = latency["by_tokens"]
    assert set(point) == {
        "label", "tokens", "wall_ms", "server_ms", "queue_share", "per_second",
        "not_200",
    }  # fmt: skip
    assert set(point["wall_ms"]) == {"samples", "p50", "p95", "p99"}
    refusals = [a for a in report["answers"] if a["answer"] == "429 busy"]
    assert refusals == [
        {"section": "limits", "answer": "429 busy", "count": 3, "expected": True}
    ]


def test_markdown_tables_have_as_many_cells_as_columns(
    written: dict[str, str],
) -> None:
    width = 0
    for line in written[".md"].splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line))
        if re.fullmatch(r"(\|---)+\|", line):
            width = cells
        elif line.startswith("|") and width:
            assert cells == width, line
        elif not line:
            width = 0


class _Page(HTMLParser):
    """Collects what a browser would fetch, and whether tags are balanced."""

    VOID = frozenset({"meta", "link", "line", "circle", "rect", "path", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.fetched.append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_balanced_and_names_no_resource(written: dict[str, str]) -> None:
    page = _Page()
    page.feed(written[".html"])
    assert page.open == []
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags
    assert all(target == "data:," or target[:1] == "#" for target in page.fetched)
    assert not re.search(r"url\(|@import", written[".html"])


def test_text_of_a_server_is_never_markup() -> None:
    findings = Findings("control", "A <b>title</b>", "conditions & more")
    findings.check("rule", False, "<script>alert(1)</script> | \\")
    findings.table("t", ["a|b", "c"], [["<i>", None]])
    report = Report(datetime.now(UTC), [("server", "<u>"), ("started", "now")])
    report.sections.append(findings)
    page = to_html(report)
    assert not re.search(r"<script|<i>|<u>|<b>title", page)
    markdown = to_markdown(report)
    assert "| rule | **fail** | <script>alert(1)</script> \\| \\\\ |" in markdown
    assert "| <i> | – |" in markdown


ESCAPES = "\x1b[2J\x1b]0;pwned\x07\r\nfake  pass all\x9b\u2028\u202e\x00\ud800"


def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose version, tops and error codes are control characters."""
    plain = probe_fakes.to_bytes
    monkeypatch.setattr(
        probe_fakes,
        "to_bytes",
        lambda body: re.sub(
            rb'"(0\.0-fake|unauthorized|not_found)"',
            lambda _: json.dumps(ESCAPES).encode(),
            plain(body),
        ).replace(b'"top": "yes"', b'"top": "\\ud800"'),
    )


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_text_of_a_server_moves_no_cursor_and_loses_no_report(
    encoding: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hostile(monkeypatch)
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in "ab")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    stem = str(tmp_path / "r–\udcff")
    arguments = ["--out", stem, "--client", "\udcff–", "--sections", "control,limits"]
    with serving() as fake:
        assert probe.main([fake.url, *arguments]) == 1
        monkeypatch.setenv("INTERN_DECISION_API_TOKEN", "another-token")
        assert probe.main([fake.url, *arguments]) == 2
    out.flush()
    err.flush()
    texts = [path.read_bytes().decode("utf-8") for path in tmp_path.iterdir()]
    assert len(texts) == 3
    texts += [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]  # type: ignore[attr-defined]
    for text in texts:
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", text)
        assert "\nfake  pass all" not in text or text.startswith("<!doctype html>")
    assert "\\u001b[2J\\u001b]0;pwned\\u0007\\u000d\\nfake  pass all" in texts[4]


def test_the_json_holds_what_it_was_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hostile(monkeypatch)
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    with serving() as fake:
        probe.main([fake.url, "--out", str(tmp_path / "r"), "--sections", "control"])
        monkeypatch.setattr(expect, "_ROUNDS", 1)
        out = ["--out", str(tmp_path / "s"), "--record", str(tmp_path / "e.json")]
        assert probe.main([fake.url, *out]) == 0
    report = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert report["health"]["version"] == ESCAPES
    recorded = json.loads((tmp_path / "e.json").read_text("utf-8"))
    assert recorded["server_version"] == ESCAPES


def test_what_is_not_finite_is_null_in_json() -> None:
    value = {"a": [float("inf"), (float("nan"), 1.5)], "b": {"c": -float("inf")}}
    shown = json.loads(to_json(value), parse_constant=pytest.fail)
    assert shown == {"a": [None, [None, 1.5]], "b": {"c": None}}


def test_an_incomplete_report_says_so_everywhere() -> None:
    report = Report(datetime.now(UTC), [("server", "s"), ("started", "now")])
    report.sections.append(Findings("control", "Control"))
    report.complete = False
    assert "**Incomplete: the run was interrupted.**" in to_markdown(report)
    assert "Incomplete, interrupted: 0 checks pass" in to_html(report)
    assert document(report)["complete"] is False


def told(health: dict[str, Any]) -> dict[str, str]:
    """The conditions of a report on a server with this `/health`."""
    session = SimpleNamespace(
        health=health,
        target=SimpleNamespace(url="http://h:1"),
        options=SimpleNamespace(client=""),
    )
    return dict(conditions(cast(Any, session), datetime.now(UTC)))


def test_kernels_are_told_with_their_fallbacks() -> None:
    shown = told(
        {
            "kernels": {
                "conv": {"package": "causal-conv1d", "version": "1.7.0", "fast": True},
                "delta": {
                    "package": "transformers",
                    "version": "5.17.0",
                    "fast": False,
                },
                "bare": "torch",
            },
            "vram_cap_gib": None,
        }
    )
    assert shown["kernel conv"] == "causal-conv1d 1.7.0"
    assert shown["kernel delta"] == "transformers 5.17.0, the slow fallback"
    assert shown["kernel bare"] == "torch"
    assert shown["vram_cap_gib"] == "none"
    assert shown["server version"] == "not reported"


def test_the_warmup_is_told_in_a_line() -> None:
    rungs = [
        {"tokens": 256, "questions": 1, "seconds": 1.527, "outcome": "scored"},
        {"tokens": 8192, "questions": 16, "seconds": 10.25, "outcome": "out_of_memory"},
    ]
    warmup = {"settle_calls": 2, "settle_seconds": 44.6, "vision": "dropped"}
    start = "settle_calls 2, settle_seconds 44.6, vision dropped, "
    assert told({"warmup": {**warmup, "rungs": rungs}})["warmup"] == (
        start + "2 rungs up to 8192 tokens in 11.8 s, 8192 x 16 out_of_memory"
    )
    assert told({"warmup": {**warmup, "rungs": rungs[:1]}})["warmup"] == (
        start + "1 rungs up to 256 tokens in 1.5 s"
    )
    assert told({"warmup": {**warmup, "rungs": []}})["warmup"] == start + "no rungs"


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        (None, "not reported"),
        ("done", "done"),
        ({"rungs": [512]}, "rungs [512]"),
        ({"rungs": [{"tokens": "many"}]}, "rungs [{'tokens': 'many'}]"),
    ],
)
def test_another_servers_warmup_is_told_as_it_is(reported: Any, shown: str) -> None:
    assert told({"warmup": reported})["warmup"] == shown
