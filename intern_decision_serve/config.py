"""The settings: the environment in, one frozen `Config` out, one row per variable.

The table `SETTINGS` is the whole surface; the README's table is checked against it.
This module never logs, never puts a token into a message and keeps no global state.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .pins import DEFAULT_MODEL, FAMILY, ModelPins

__all__ = [
    "CREDENTIAL",
    "PREFIX",
    "SETTINGS",
    "TOKEN_FILE_VARIABLE",
    "TOKEN_VARIABLE",
    "Config",
    "Setting",
    "load_config",
    "unknown_settings",
]

PREFIX = "INTERN_DECISION_"
TOKEN_VARIABLE = PREFIX + "API_TOKEN"
TOKEN_FILE_VARIABLE = PREFIX + "API_TOKEN_FILE"
CREDENTIAL = "$CREDENTIALS_DIRECTORY/api-token"

_LARGEST = 2**31 - 1  # a C int: a listen backlog or an allocator figure takes it
_MAX_TOKEN_FILE_BYTES = 4096
_SHOWN_CHARACTERS = 80

# int() and float() also take signs, underscores, blanks and other scripts' digits,
# and int() raises past 4300 digits: these patterns come first.
_DIGITS = re.compile(r"[0-9]{1,10}")
_DECIMAL = re.compile(r"(?=.{1,40}\Z)([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")
_HOST = re.compile(r"[!-~]{1,255}")


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting, checked. `token_source` names where the token came from."""

    host: str
    port: int
    api_token: str = field(repr=False)
    model: str
    checkpoint: str
    device: str
    vram_cap_gib: float | None
    max_tokens: int
    max_decisions: int
    max_body_bytes: int
    max_queue: int
    release_slack_mib: int
    keep_vision: bool
    allow_slow_kernels: bool
    warmup_tokens: tuple[int, ...] | None  # None: the default ladder; (): no ladder
    cuda_graphs: int
    cuda_graphs_mib: int
    token_source: str = TOKEN_VARIABLE

    @property
    def pins(self) -> ModelPins:
        """The pins of the configured model."""
        return FAMILY[self.model]


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable: `rule` completes "must be ...", `default` is as it would be set.

    `cast` raises ValueError when the rule is broken; it is None for the two token
    variables, which are read together. A `default` of None is described in `rule`.
    """

    name: str
    cast: Callable[[str], Any] | None
    default: str | None
    rule: str
    empty_is_unset: bool = False

    @property
    def variable(self) -> str:
        """The full name in the environment."""
        return PREFIX + self.name


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def cast(raw: str) -> str:
        if pattern.fullmatch(raw) is None:
            raise ValueError
        return raw

    return cast


def _one_of(allowed: Mapping[str, Any]) -> Callable[[str], Any]:
    def cast(raw: str) -> Any:
        if raw not in allowed:
            raise ValueError
        return allowed[raw]

    return cast


def _integer(name: str, default: int, low: int, high: int = _LARGEST) -> Setting:
    """Make the row of an integer from `low` to `high`."""

    def cast(raw: str) -> int:
        number = _parse_digits(raw)
        if not low <= number <= high:
            raise ValueError
        return number

    return Setting(name, cast, str(default), f"an integer from {low} to {high}")


def _switch(name: str) -> Setting:
    """Make the row of a switch that is off unless it is exactly 1."""
    return Setting(name, _one_of({"0": False, "1": True}), "0", "exactly 0 or 1")


def _parse_digits(raw: str) -> int:
    if _DIGITS.fullmatch(raw) is None:
        raise ValueError
    return int(raw)


def _parse_size(raw: str) -> float:
    if _DECIMAL.fullmatch(raw) is None:
        raise ValueError
    size = float(raw)
    if not math.isfinite(size) or size <= 0:
        raise ValueError
    return size


def _parse_path(raw: str) -> str:
    if not raw or "\0" in raw:
        raise ValueError
    return raw


def _parse_ladder(raw: str) -> tuple[int, ...]:
    if raw == "0":
        return ()
    ladder = tuple(_parse_digits(rung) for rung in raw.split(","))
    ascending = all(low < high for low, high in zip(ladder, ladder[1:], strict=False))
    if ladder[0] < 1 or not ascending:
        raise ValueError
    return ladder


SETTINGS: tuple[Setting, ...] = (
    Setting("API_TOKEN", None, None, "at least 32 visible ASCII characters (33-126)"),
    Setting(
        "API_TOKEN_FILE",
        None,
        None,
        f"a readable file of at most {_MAX_TOKEN_FILE_BYTES} bytes holding the token",
    ),
    Setting("HOST", _matching(_HOST), "127.0.0.1", "a host name or address"),
    _integer("PORT", 8100, 0, 65535),
    Setting(
        "MODEL",
        _one_of({name: name for name in FAMILY}),
        DEFAULT_MODEL,
        f"one of {', '.join(FAMILY)}",
    ),
    Setting(
        "CHECKPOINT",
        _parse_path,
        None,
        "a path that is not empty (unset: the model's pinned snapshot under /hf/hub)",
    ),
    Setting("DEVICE", _matching(_DEVICE), "cuda", "cuda, cuda:N or cpu"),
    Setting(
        "VRAM_CAP_GIB",
        _parse_size,
        None,
        "a finite number over 0 (unset or empty: uncapped)",
        empty_is_unset=True,
    ),
    _integer("MAX_TOKENS", 8192, 1),
    _integer("MAX_DECISIONS", 64, 1),
    _integer("MAX_BODY_BYTES", 1048576, 1),
    _integer("MAX_QUEUE", 32, 1),
    _integer("RELEASE_SLACK_MIB", 512, 0),
    _switch("KEEP_VISION"),
    _switch("ALLOW_SLOW_KERNELS"),
    Setting(
        "WARMUP_TOKENS",
        _parse_ladder,
        None,
        "token counts over 0, ascending, comma-separated, none over MAX_TOKENS, "
        "or 0 for no ladder (unset: the default ladder)",
    ),
    _integer("CUDA_GRAPHS", 0, 0),
    _integer("CUDA_GRAPHS_MIB", 1024, 1),
)


def load_config(environ: Mapping[str, str]) -> Config:
    """Read every setting once.

    Raises ValueError, always one line: the variable, the value (never a token's), the
    rule. The token's strength is not judged here: `auth.check_token_strength` does.
    """
    token, source = _read_token(environ)
    values = {
        setting.name.lower(): _read_setting(setting, environ)
        for setting in SETTINGS
        if setting.cast is not None
    }
    _relate(values, environ)
    return Config(api_token=token, token_source=source, **values)


def unknown_settings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables with our prefix that no row knows, sorted."""
    known = {setting.variable for setting in SETTINGS}
    return tuple(
        sorted(
            name for name in environ if name.startswith(PREFIX) and name not in known
        )
    )


def _read_setting(setting: Setting, environ: Mapping[str, str]) -> Any:
    raw = environ.get(setting.variable)
    if raw is None or (raw == "" and setting.empty_is_unset):
        raw = setting.default
    if raw is None or setting.cast is None:
        return None
    try:
        return setting.cast(raw)
    except ValueError:
        raise _refusal(setting, raw) from None


def _refusal(setting: Setting, raw: str) -> ValueError:
    # repr keeps a value with line breaks on one line
    more = "..." if len(raw) > _SHOWN_CHARACTERS else ""
    shown = repr(raw[:_SHOWN_CHARACTERS]) + more
    return ValueError(f"{setting.variable}={shown}: must be {setting.rule}")


# Rules across settings, all of them:
#   1. exactly one of API_TOKEN, API_TOKEN_FILE and the credential holds the token
#   2. an unset CHECKPOINT follows MODEL
#   3. no rung of WARMUP_TOKENS is over MAX_TOKENS


def _read_token(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the token and the name of its source (rule 1)."""
    directory = environ.get("CREDENTIALS_DIRECTORY", "")
    credential = os.path.join(directory, "api-token")
    found = [name for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE) if name in environ]
    if directory and os.path.lexists(credential):
        found.append(CREDENTIAL)
    if len(found) > 1:
        raise ValueError(f"set only one of {', '.join(found)}")
    if not found:
        raise ValueError(
            f"{TOKEN_VARIABLE} is required (or {TOKEN_FILE_VARIABLE}, or the systemd "
            f"credential {CREDENTIAL})"
        )
    source = found[0]
    if source == TOKEN_VARIABLE:
        token = environ[TOKEN_VARIABLE]
    else:
        path = credential if source == CREDENTIAL else environ[TOKEN_FILE_VARIABLE]
        token = _read_token_file(path, source)
    if not token:
        raise ValueError(f"{source}: the token is empty")
    return token, source


def _read_token_file(path: str, source: str) -> str:
    # The path stays out of the messages: the likeliest mistake is a token in its place.
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_TOKEN_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or "not a path"
        raise ValueError(f"{source}: cannot read the file: {reason}") from None
    if len(content) > _MAX_TOKEN_FILE_BYTES:
        raise ValueError(
            f"{source}: the file is over {_MAX_TOKEN_FILE_BYTES} bytes, not a token"
        )
    # echo and systemd-creds end the file with one line break. latin-1 maps every byte,
    # so that what is not ASCII is left for the strength check to refuse.
    for ending in (b"\r\n", b"\n"):
        if content.endswith(ending):
            content = content.removesuffix(ending)
            break
    return content.decode("latin-1")


def _relate(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Apply rules 2 and 3 to the values."""
    if values["checkpoint"] is None:
        values["checkpoint"] = FAMILY[values["model"]].default_checkpoint
    ladder = values["warmup_tokens"] or ()
    if any(rung > values["max_tokens"] for rung in ladder):
        setting = next(row for row in SETTINGS if row.name == "WARMUP_TOKENS")
        raise _refusal(setting, environ[setting.variable])
