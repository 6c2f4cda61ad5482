"""Every setting is checked, and the refusal names variable, value and rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from intern_decision_serve.config import (
    PREFIX,
    SETTINGS,
    Config,
    load_config,
    unknown_settings,
)
from intern_decision_serve.pins import FAMILY

TOKEN = "t" * 32
LARGEST = 2147483647

INTEGERS = {
    "PORT": (0, 65535),
    "MAX_TOKENS": (1, LARGEST),
    "MAX_DECISIONS": (1, LARGEST),
    "MAX_BODY_BYTES": (1, LARGEST),
    "MAX_QUEUE": (1, LARGEST),
    "RELEASE_SLACK_MIB": (0, LARGEST),
    "CUDA_GRAPHS": (0, LARGEST),
    "CUDA_GRAPHS_MIB": (1, LARGEST),
}
SWITCHES = ("KEEP_VISION", "ALLOW_SLOW_KERNELS")

NOT_DIGITS = (
    "",
    " ",
    " 8",
    "8 ",
    "8\n",
    "+8",
    "-1",
    "1_0",
    "0x10",
    "8.0",
    "1e3",
    "abc",
    "None",
    "\N{SUPERSCRIPT TWO}",
    "\N{ARABIC-INDIC DIGIT EIGHT}",
    "\N{FULLWIDTH DIGIT EIGHT}",
    "9" * 11,
    "9" * 5000,
    "00000000008",
)

GOOD: list[tuple[str, str, Any]] = [
    ("HOST", "0.0.0.0", "0.0.0.0"),
    ("HOST", "::1", "::1"),
    ("HOST", "fv-ml1.example", "fv-ml1.example"),
    *((("MODEL"), name, name) for name in FAMILY),
    ("CHECKPOINT", "/models/a b/snapshots/x", "/models/a b/snapshots/x"),
    ("CHECKPOINT", "relative/", "relative/"),
    ("DEVICE", "cuda", "cuda"),
    ("DEVICE", "cuda:0", "cuda:0"),
    ("DEVICE", "cuda:15", "cuda:15"),
    ("DEVICE", "cpu", "cpu"),
    ("VRAM_CAP_GIB", "", None),
    ("VRAM_CAP_GIB", "10", 10.0),
    ("VRAM_CAP_GIB", "9.25", 9.25),
    ("VRAM_CAP_GIB", ".5", 0.5),
    ("VRAM_CAP_GIB", "1e1", 10.0),
    ("WARMUP_TOKENS", "0", ()),
    ("WARMUP_TOKENS", "300", (300,)),
    ("WARMUP_TOKENS", "300,1000,8192", (300, 1000, 8192)),
    *((name, str(low), low) for name, (low, _) in INTEGERS.items()),
    *((name, str(high), high) for name, (_, high) in INTEGERS.items()),
    *((name, "0", False) for name in SWITCHES),
    *((name, "1", True) for name in SWITCHES),
]

BAD: list[tuple[str, str]] = [
    *(("HOST", value) for value in ("", " ", "a b", "a\nb", "h\xf6st", "a" * 256)),
    *(("MODEL", value) for value in ("", "4B", "intern-decision-4b", "Other")),
    *(("CHECKPOINT", value) for value in ("", "a\0b")),
    *(
        ("DEVICE", value)
        for value in (
            "",
            "CPU",
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:01",
            "cuda:100",
            "cuda:\N{SUPERSCRIPT TWO}",
            "cuda 0",
            "cpu\n",
            "mps",
        )
    ),
    *(
        ("VRAM_CAP_GIB", value)
        for value in (
            " ",
            "0",
            "0.0",
            "-1",
            "+1",
            "nan",
            "inf",
            "-inf",
            "infinity",
            "1e999",
            "1e9999",
            "1e-999",
            "1_0",
            "1,5",
            "10GiB",
            " 10",
            "10\n",
            ".",
            "e1",
            "0x1p3",
            "\N{ARABIC-INDIC DIGIT EIGHT}",
            "9" * 41,
        )
    ),
    *(
        ("WARMUP_TOKENS", value)
        for value in (
            "",
            ",",
            "300,",
            ",300",
            "0,300",
            "300,0",
            "1000,300",
            "300,300",
            "300, 1000",
            "-1",
            "a",
            "8193",
            "300,8193",
            "9" * 5000,
        )
    ),
    *((name, value) for name in INTEGERS for value in NOT_DIGITS),
    *((name, str(low - 1)) for name, (low, _) in INTEGERS.items()),
    *((name, str(high + 1)) for name, (_, high) in INTEGERS.items()),
    *(
        (name, value)
        for name in SWITCHES
        for value in ("", "2", "true", "yes", "on", "01", " 1", "1\n", "-0")
    ),
]


def load(**settings: str) -> Config:
    environ = {PREFIX + name: value for name, value in settings.items()}
    return load_config({PREFIX + "API_TOKEN": TOKEN} | environ)


def rule_of(name: str) -> str:
    return next(setting.rule for setting in SETTINGS if setting.name == name)


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(environ)
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


def test_defaults_are_the_contracts() -> None:
    assert dataclasses.asdict(load()) == {
        "host": "127.0.0.1",
        "port": 8100,
        "api_token": TOKEN,
        "model": "Intern-Decision-4B",
        "checkpoint": "/hf/hub/models--internlm--Intern-Decision-4B/snapshots/"
        "0e5e6aa7d6d750e2b1504ba11a8136cb58aeb3cd",
        "device": "cuda",
        "vram_cap_gib": None,
        "max_tokens": 8192,
        "max_decisions": 64,
        "max_body_bytes": 1048576,
        "max_queue": 32,
        "release_slack_mib": 512,
        "keep_vision": False,
        "allow_slow_kernels": False,
        "warmup_tokens": None,
        "cuda_graphs": 0,
        "cuda_graphs_mib": 1024,
        "token_source": "INTERN_DECISION_API_TOKEN",
    }


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_every_config_value_validated_good(
    name: str, value: str, expected: Any
) -> None:
    found = getattr(load(**{name: value}), name.lower())
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_every_config_value_validated_bad(name: str, value: str) -> None:
    message = refusal({PREFIX + "API_TOKEN": TOKEN, PREFIX + name: value})
    shown = repr(value[:80]) + ("..." if len(value) > 80 else "")
    assert message == f"{PREFIX}{name}={shown}: must be {rule_of(name)}"


def test_the_tables_above_cover_every_setting() -> None:
    every = {setting.name for setting in SETTINGS} - {"API_TOKEN", "API_TOKEN_FILE"}
    assert {name for name, *_ in GOOD} == every
    assert {name for name, _ in BAD} == every


def test_every_setting_is_a_field_and_every_default_keeps_its_own_rule() -> None:
    fields = {field.name for field in dataclasses.fields(Config)}
    assert {s.name.lower() for s in SETTINGS} - {"api_token_file"} <= fields
    for setting in SETTINGS:
        if setting.default is not None:
            assert load(**{setting.name: setting.default}) == load()


@pytest.mark.parametrize("name", FAMILY)
def test_the_default_checkpoint_follows_the_model(name: str) -> None:
    config = load(MODEL=name)
    assert config.checkpoint == FAMILY[name].default_checkpoint
    assert config.pins is FAMILY[name]


def test_a_set_checkpoint_wins_over_the_models() -> None:
    assert load(MODEL="Intern-Decision-2B", CHECKPOINT="/c").checkpoint == "/c"


def test_a_rung_may_not_exceed_a_lowered_max_tokens() -> None:
    assert load(MAX_TOKENS="500", WARMUP_TOKENS="500").warmup_tokens == (500,)
    message = refusal(
        {
            PREFIX + "API_TOKEN": TOKEN,
            PREFIX + "MAX_TOKENS": "500",
            PREFIX + "WARMUP_TOKENS": "100,501",
        }
    )
    assert message == (
        f"INTERN_DECISION_WARMUP_TOKENS='100,501': must be {rule_of('WARMUP_TOKENS')}"
    )


def test_other_variables_are_ignored() -> None:
    assert load_config({PREFIX + "API_TOKEN": TOKEN, "VRAM_CAP_GIB": "x"}) == load()


def test_config_is_frozen_and_never_shows_the_token() -> None:
    config = load()
    assert TOKEN not in repr(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


class TestTokenSources:
    """Exactly one source; one trailing newline of a file is not part of the token."""

    def test_none_is_refused(self) -> None:
        assert refusal({}) == (
            "INTERN_DECISION_API_TOKEN is required (or INTERN_DECISION_API_TOKEN_FILE, "
            "or the systemd credential $CREDENTIALS_DIRECTORY/api-token)"
        )

    def test_an_empty_token_is_refused(self) -> None:
        assert refusal({PREFIX + "API_TOKEN": ""}) == (
            "INTERN_DECISION_API_TOKEN: the token is empty"
        )

    @pytest.mark.parametrize(
        ("content", "token"),
        [
            (TOKEN, TOKEN),
            (TOKEN + "\n", TOKEN),
            (TOKEN + "\r\n", TOKEN),
            (TOKEN + "\n\n", TOKEN + "\n"),
            (TOKEN + "\r", TOKEN + "\r"),
            (TOKEN + " \n", TOKEN + " "),
        ],
    )
    def test_one_trailing_newline_of_a_file_is_stripped(
        self, tmp_path: Path, content: str, token: str
    ) -> None:
        file = tmp_path / "token"
        file.write_bytes(content.encode())
        config = load_config({PREFIX + "API_TOKEN_FILE": str(file)})
        assert config.api_token == token
        assert config.token_source == "INTERN_DECISION_API_TOKEN_FILE"

    def test_nothing_is_stripped_from_the_variable(self) -> None:
        assert load(API_TOKEN=TOKEN + "\n").api_token == TOKEN + "\n"

    def test_the_systemd_credential_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "api-token").write_bytes(TOKEN.encode() + b"\n")
        config = load_config({"CREDENTIALS_DIRECTORY": str(tmp_path)})
        assert config.api_token == TOKEN
        assert config.token_source == "$CREDENTIALS_DIRECTORY/api-token"

    def test_a_credentials_directory_without_ours_is_no_source(
        self, tmp_path: Path
    ) -> None:
        environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
        assert load_config({PREFIX + "API_TOKEN": TOKEN} | environ) == load()
        assert "is required" in refusal(environ)

    @pytest.mark.parametrize(
        "sources",
        [
            (PREFIX + "API_TOKEN", PREFIX + "API_TOKEN_FILE"),
            (PREFIX + "API_TOKEN", "$CREDENTIALS_DIRECTORY/api-token"),
            (PREFIX + "API_TOKEN_FILE", "$CREDENTIALS_DIRECTORY/api-token"),
        ],
    )
    def test_two_sources_are_refused_by_name(
        self, tmp_path: Path, sources: tuple[str, str]
    ) -> None:
        file = tmp_path / "api-token"
        file.write_text(TOKEN)
        every = {
            PREFIX + "API_TOKEN": (PREFIX + "API_TOKEN", TOKEN),
            PREFIX + "API_TOKEN_FILE": (PREFIX + "API_TOKEN_FILE", str(file)),
            "$CREDENTIALS_DIRECTORY/api-token": (
                "CREDENTIALS_DIRECTORY",
                str(tmp_path),
            ),
        }
        environ = dict(every[source] for source in sources)
        assert refusal(environ) == f"set only one of {', '.join(sources)}"

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("missing", "cannot read the file: No such file or directory"),
            (".", "cannot read the file: Is a directory"),
            ("a\0b", "cannot read the file: not a path"),
            ("large", "the file is over 4096 bytes, not a token"),
            ("empty", "the token is empty"),
        ],
    )
    def test_a_bad_file_is_refused(
        self, tmp_path: Path, path: str, reason: str
    ) -> None:
        (tmp_path / "large").write_bytes(b"x" * 4097)
        (tmp_path / "empty").write_bytes(b"\n")
        message = refusal({PREFIX + "API_TOKEN_FILE": f"{tmp_path}/{path}"})
        assert message == f"INTERN_DECISION_API_TOKEN_FILE: {reason}"

    def test_a_token_set_in_place_of_a_path_is_not_shown(self) -> None:
        assert TOKEN not in refusal({PREFIX + "API_TOKEN_FILE": TOKEN})

    def test_bytes_that_are_not_ascii_are_left_for_the_strength_check(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "api-token").write_bytes(b"\xff" * 40)
        config = load_config({"CREDENTIALS_DIRECTORY": str(tmp_path)})
        assert config.api_token == "\xff" * 40


def test_unknown_settings_are_named_in_order() -> None:
    environ = {
        "INTERN_DECISION_ZZ": "1",
        "INTERN_DECISION_": "1",
        "INTERN_DECISION_MAX_TOKEN": "1",
        "INTERN_DECISION_max_tokens": "1",
        "INTERN_DECISION_MAX_TOKENS": "1",
        "INTERN_DECISION_API_TOKEN_FILE": "1",
        "OTHER": "1",
    }
    assert unknown_settings(environ) == (
        "INTERN_DECISION_",
        "INTERN_DECISION_MAX_TOKEN",
        "INTERN_DECISION_ZZ",
        "INTERN_DECISION_max_tokens",
    )
    assert unknown_settings({s.variable: "" for s in SETTINGS}) == ()
