"""The HTML report in a real browser: it renders, and it asks nobody for anything."""

from __future__ import annotations

import json
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from packaging_tools import find_tool
from probe_fakes import TOKEN, serving

from intern_decision_serve import probe

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
    # Every name resolves to nothing: a page that needed one would show it in the log.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a whole run."""
    out = tmp_path_factory.mktemp("page") / "report"
    with pytest.MonkeyPatch.context() as patch, serving() as fake:
        patch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
        always = ["--seconds", "0.05", "--repeats", "1"]
        assert probe.main([fake.url, "--out", str(out), *always]) == 0
    return out.with_name("report.html")


def open_in_chromium(page: Path, tmp_path: Path, *arguments: str) -> str:
    command = [
        find_tool("chromium", "chromium"),
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [*command, *arguments, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_browser_lays_every_plot_out(page: Path, tmp_path: Path) -> None:
    """A script beside the page's own markup measures what the browser made of it."""
    measuring = tmp_path / "measured.html"
    script = (
        "<script>const box = e => e.getBoundingClientRect();"
        "document.title = JSON.stringify({"
        "plots: [...document.querySelectorAll('svg')].map(e => [Math.round("
        "box(e).width), Math.round(box(e).height)]),"
        "outside: [...document.querySelectorAll('svg text')].filter(e => {"
        "const s = box(e.ownerSVGElement), t = box(e);"
        "return t.left < s.left - 1 || t.right > s.right + 1 || t.top < s.top - 1 ||"
        " t.bottom > s.bottom + 1}).map(e => e.textContent),"
        "wide: document.documentElement.scrollWidth > window.innerWidth,"
        "requests: performance.getEntriesByType('resource').map(e => e.name)"
        "})</script>"
    )
    text = page.read_text("utf-8").replace("</body>", script + "</body>")
    measuring.write_text(text, "utf-8")
    dom = open_in_chromium(measuring, tmp_path, "--window-size=1100,900", "--dump-dom")
    title = dom.split("<title>")[1].split("</title>")[0].replace("&quot;", '"')
    measured = json.loads(title)
    assert len(measured["plots"]) == 6
    assert all(width > 300 and height > 200 for width, height in measured["plots"])
    assert measured["outside"] == []
    assert measured["wide"] is False
    assert measured["requests"] == []


def requests_of(page: Path, tmp_path: Path) -> list[str]:
    """What the page itself asked for, by the browser's own network log.

    The browser looks for updates of its own; such requests have no origin.
    """
    log = tmp_path / "net.json"
    open_in_chromium(page, tmp_path, f"--log-net-log={log}", "--dump-dom")
    # One event a line; the browser may end before it closes the list.
    lines = [line.rstrip(",") for line in log.read_text("utf-8").splitlines()]
    events = [json.loads(line) for line in lines if '"initiator"' in line]
    started = [event["params"] for event in events if "initiator" in event["params"]]
    return [
        params["url"]
        for params in started
        if params["initiator"] != "not an origin"
        and not params["url"].startswith("file:")
    ]


def test_the_browser_asks_the_network_for_nothing(page: Path, tmp_path: Path) -> None:
    assert requests_of(page, tmp_path) == []


def test_a_page_that_asks_would_be_found_out(page: Path, tmp_path: Path) -> None:
    asking = tmp_path / "asking.html"
    image = '<img src="http://pictures.invalid/x.png"></body>'
    text = page.read_text("utf-8").replace("</body>", image)
    asking.write_text(text, "utf-8")
    assert requests_of(asking, tmp_path) == ["http://pictures.invalid/x.png"]


def count_colours(png: bytes) -> int:
    """Distinct first bytes of the rows' pixels: a blank page has next to none."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    data, place = b"", 8
    while place < len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        if kind == b"IDAT":
            data += png[place + 8 : place + 8 + size]
        place += size + 12
    return len(set(zlib.decompress(data)))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn(page: Path, tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / "page.png"
    arguments = [f"--screenshot={picture}", "--window-size=1100,3000"]
    if scheme == "dark":
        arguments.append("--force-dark-mode")
    open_in_chromium(page, tmp_path, *arguments)
    assert count_colours(picture.read_bytes()) > 100


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_a_missing_browser_skips_here_and_fails_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    said = r"such-browser is not installed \(Debian package browser\)"
    with pytest.raises(outcome, match=said):
        find_tool("such-browser", "browser")
