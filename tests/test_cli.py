"""The command line: what each subcommand is told, prints and exits with."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest

import intern_decision_serve
from intern_decision_serve import cli, lifecycle
from intern_decision_serve.errors import DeviceAbsent, StartupRefused
from intern_decision_serve.pins import FAMILY

TOKEN = "0123456789" * 4


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("INTERN_DECISION_"):
            monkeypatch.delenv(name)
    for name in cli.OFFLINE:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What `lifecycle.run` was called with; it announces one URL and exits 0."""
    seen: list[tuple[Any, Any]] = []

    def run(config: Any, pins: Any, announce: Any) -> int:
        seen.append((config, pins))
        announce("http://127.0.0.1:8100")
        return 0

    monkeypatch.setattr(lifecycle, "run", run)
    return seen


@pytest.mark.parametrize("arguments", [[], ["serve"]])
def test_serve_is_the_default_and_serves_the_pinned_family(
    arguments: list[str], runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    assert cli.main(arguments) == 0
    [(config, pins)] = runs
    assert pins is FAMILY["Intern-Decision-4B"]
    assert config.checkpoint == pins.default_checkpoint


def test_the_offline_environment_is_set_before_anything_else(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    cli.main(["serve"])
    assert {name: os.environ[name] for name in cli.OFFLINE} == {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "USE_HUB_KERNELS": "0",
    }


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("API_TOKEN", "short", "INTERN_DECISION_API_TOKEN"),
        ("PORT", "80x", "INTERN_DECISION_PORT='80x': must be an integer"),
        ("VRAM_CAP_GIB", "nan", "INTERN_DECISION_VRAM_CAP_GIB='nan': must be"),
    ],
)
def test_a_bad_setting_exits_78_with_one_line(
    name: str,
    value: str,
    said: str,
    runs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.setenv("INTERN_DECISION_" + name, value)
    assert cli.main([]) == 78
    assert runs == []
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"intern-decision-serve: {said}")
    assert "short" not in line and TOKEN not in line


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(StartupRefused("no\nsnapshot"), 78), (DeviceAbsent("no\ndevice"), 75)],
)
def test_a_refused_start_exits_with_its_status_and_one_line(
    refusal: StartupRefused,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*_: Any) -> int:
        raise refusal

    monkeypatch.setattr(lifecycle, "run", run)
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    assert cli.main([]) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("intern-decision-serve: no ")


def test_an_unknown_setting_is_one_warning_line(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.setenv("INTERN_DECISION_MAX_QUEU", "3")
    monkeypatch.setenv("INTERN_DECISION_ZEAL", "3")
    assert cli.main([]) == 0
    [record] = [one for one in caplog.records if one.levelname == "WARNING"]
    assert record.getMessage() == (
        "not a setting, ignored: INTERN_DECISION_MAX_QUEU, INTERN_DECISION_ZEAL"
    )


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == intern_decision_serve.__version__


class TestDemo:
    @pytest.fixture(autouse=True)
    def _checkpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from intern_decision_serve import demo

        made = types.SimpleNamespace(path="/made/here", pins="the demo's pins")
        monkeypatch.setattr(demo, "make_checkpoint", lambda *_, **__: made)

    def test_it_serves_its_own_checkpoint_and_pins_on_the_cpu(
        self, runs: list[Any], tmp_path: Path
    ) -> None:
        assert cli.main(["demo", "--port", "9", "--dir", str(tmp_path)]) == 0
        [(config, pins)] = runs
        assert (config.checkpoint, config.device, config.port) == (
            "/made/here",
            "cpu",
            9,
        )
        assert pins == "the demo's pins"

    def test_a_device_that_is_set_is_served_and_made_on_in_a_process_of_its_own(
        self, runs: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        made_by: list[list[str]] = []
        monkeypatch.setattr(
            cli.subprocess, "run", lambda argv, check: made_by.append(argv)
        )
        monkeypatch.setenv("INTERN_DECISION_DEVICE", "cuda:1")
        assert cli.main(["demo", "--dir", str(tmp_path)]) == 0
        assert runs[0][0].device == "cuda:1"
        [argv] = made_by
        assert argv[1:] == [
            *("-m", "intern_decision_serve.demo"),
            *(str(tmp_path), "tiny", "cuda:1"),
        ]

    def test_it_makes_a_token_and_prints_it_with_a_ready_line_per_endpoint(
        self, runs: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        cli.main(["demo", "--dir", str(tmp_path)])
        token = runs[0][0].api_token
        lines = capsys.readouterr().out.splitlines()
        assert f"token: {token}" in lines
        words = [shlex.split(line) for line in lines if line.startswith("curl ")]
        assert [word[2].removeprefix("http://127.0.0.1:8100") for word in words] == [
            "/health",
            "/decide",
            "/decide/shared",
            "/v1/systemone",
        ]
        for word in words[1:]:
            assert word[4] == f"Authorization: Bearer {token}"
            json.loads(word[6])

    def test_a_credentials_directory_without_a_token_is_no_token(
        self,
        runs: list[Any],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
        assert cli.main(["demo", "--dir", str(tmp_path)]) == 0
        assert f"token: {runs[0][0].api_token}" in capsys.readouterr().out

    def test_it_never_prints_a_token_it_did_not_make(
        self,
        runs: list[Any],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
        cli.main(["demo", "--dir", str(tmp_path)])
        assert runs[0][0].api_token == TOKEN
        printed = capsys.readouterr().out
        assert TOKEN not in printed
        assert "token: " not in printed
        assert "$INTERN_DECISION_API_TOKEN" in printed

    def test_its_lines_read_a_token_from_where_it_is(
        self,
        runs: list[Any],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        path = tmp_path / "a token"
        path.write_text(TOKEN + "\n")
        monkeypatch.setenv("INTERN_DECISION_API_TOKEN_FILE", str(path))
        cli.main(["demo", "--dir", str(tmp_path)])
        assert runs[0][0].api_token == TOKEN
        lines = capsys.readouterr().out.splitlines()
        [line] = [each for each in lines if "/decide/shared" in each]
        shown = subprocess.run(
            ["sh", "-c", line.replace("curl -s", "printf '%s|'", 1)],
            capture_output=True,
            check=True,
            text=True,
        )
        assert shown.stdout.split("|")[2] == f"Authorization: Bearer {TOKEN}"
