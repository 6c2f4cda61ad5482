"""The README says what the code does: tables, constants and commands are compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from intern_decision_serve import config, errors, pins

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def _rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its header."""
    section = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    table = lines
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return cells[2:]


def test_the_configuration_table_is_the_settings_table() -> None:
    written = {row[0].strip("`"): (row[1], row[3]) for row in _rows("Configuration")}
    expected = {
        setting.name: (
            "none" if setting.default is None else f"`{setting.default}`",
            setting.rule,
        )
        for setting in config.SETTINGS
    }
    assert written == expected


def test_the_errors_table_is_the_closed_list() -> None:
    written = {(int(row[0]), row[1].strip("`")) for row in _rows("Errors")}
    kinds = [
        kind
        for name in errors.__all__
        if isinstance(kind := getattr(errors, name), type)
        and issubclass(kind, errors.ServiceError)
        and kind is not errors.ServiceError
    ]
    assert written == {(kind.status, kind.code) for kind in kinds}


@pytest.mark.parametrize(
    "text",
    [
        pins.READOUT,
        pins.CHUNKING,
        pins.SERVING_CONFIG,
        pins.FAMILY[pins.DEFAULT_MODEL].prompt_version,
        pins.FAMILY[pins.DEFAULT_MODEL].probability_status,
    ],
)
def test_every_constant_string_is_written_out(text: str) -> None:
    assert f"`{text}`" in README


def test_every_pin_is_written_out() -> None:
    for model in pins.FAMILY.values():
        assert model.revision in README
        assert model.inference_sha256 in README


def test_the_deltas_are_numbered_without_a_gap() -> None:
    section = README.split("\n## Deltas\n", 1)[1]
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 14


def test_the_sections_stand_in_the_order_of_the_style_page() -> None:
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    wanted = [
        "Run it",
        "Endpoints",
        "Errors",
        "Configuration",
        "How a request flows",
        "Deploy",
        "Verify the pins",
        "Tests",
        "Deltas",
    ]
    assert [heading for heading in headings if heading in wanted] == wanted


@pytest.mark.parametrize("name", ["demo", "test"])
def test_each_set_up_command_is_one_line(name: str) -> None:
    block = README.split(f"<!-- {name} command -->\n```sh\n", 1)[1].split("```", 1)[0]
    assert len(block.strip().splitlines()) == 1


def test_every_link_inside_the_page_has_its_heading() -> None:
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    slugs = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= slugs


def test_every_file_it_names_is_there() -> None:
    for path in re.findall(r"`((?:nix|systemd|tests|\.ci)/[\w./@-]*)`", README):
        assert (ROOT / path).exists(), path
