"""Which implementation each kernel is bound to, and Triton's needs: kernels.py."""

from __future__ import annotations

import errno
import logging
import os
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from engine_harness import make_modeling

from intern_decision_serve import kernels
from intern_decision_serve.errors import StartupRefused
from intern_decision_serve.kernels import (
    KERNELS,
    check_kernels,
    check_triton,
    find_kernels,
    log_kernels,
)

Bind = Callable[..., None]
SLOW_MODULE = kernels.MODELING


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Bind:
    """Put a modeling module in place, with fla seeing `platform`."""

    def put(platform: str = "cuda", **modules: str) -> None:
        fla = types.SimpleNamespace(device_platform=platform)
        monkeypatch.setitem(sys.modules, "fla.utils", fla)
        monkeypatch.setitem(sys.modules, kernels.MODELING, make_modeling(**modules))
        versions = {"fla-core": "0.5.2", "causal-conv1d": "1.7.0"}
        versions["transformers"] = "5.17.0"

        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    return put


def implementation(module: str) -> str:
    return f"{module}._kernel.<locals>.kernel"


def test_each_kernel_is_reported_with_package_and_version(bind: Bind) -> None:
    bind()
    fla = {
        "implementation": implementation("fla.ops.fake"),
        "package": "fla-core",
        "version": "0.5.2",
        "fast": True,
    }
    conv = {
        "implementation": implementation("causal_conv1d.fake"),
        "package": "causal-conv1d",
        "version": "1.7.0",
        "fast": True,
    }
    assert find_kernels() == {
        "chunk_gated_delta_rule": fla,
        "fused_recurrent_gated_delta_rule": fla,
        "causal_conv1d_fn": conv,
        "causal_conv1d_update": conv,
    }


def test_transformers_own_function_is_slow(bind: Bind) -> None:
    bind(causal_conv1d_fn=SLOW_MODULE)
    report = find_kernels()
    assert report["causal_conv1d_fn"] == {
        "implementation": implementation(SLOW_MODULE),
        "package": "transformers",
        "version": "5.17.0",
        "fast": False,
    }
    assert report["causal_conv1d_update"]["fast"]


@pytest.mark.parametrize("name", KERNELS)
def test_one_fallback_refuses_and_is_named(bind: Bind, name: str) -> None:
    bind(**{name: SLOW_MODULE})
    with pytest.raises(StartupRefused, match=f"bound for {name}: ") as refusal:
        check_kernels(find_kernels(), allow_slow=False)
    assert "INTERN_DECISION_ALLOW_SLOW_KERNELS=1" in str(refusal.value)


def test_a_triton_that_fell_back_to_the_cpu_counts_as_a_fallback(bind: Bind) -> None:
    bind(platform="cpu")
    report = find_kernels()
    slow = [name for name, bound in report.items() if not bound["fast"]]
    assert slow == ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


def test_what_cannot_be_told_counts_as_a_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modeling = types.ModuleType(kernels.MODELING)
    modeling.causal_conv1d_fn = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.MODELING, modeling)
    unknown = {
        "implementation": None,
        "package": None,
        "version": None,
        "fast": False,
    }
    assert find_kernels() == dict.fromkeys(KERNELS, unknown)


def test_without_the_modeling_module_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, kernels.MODELING, raising=False)
    assert not any(bound["fast"] for bound in find_kernels().values())


def test_the_switch_lets_a_fallback_serve_and_marks_it_loudly(
    bind: Bind, caplog: pytest.LogCaptureFixture
) -> None:
    bind(causal_conv1d_fn=SLOW_MODULE)
    report = find_kernels()
    with caplog.at_level(logging.WARNING):
        check_kernels(report, allow_slow=True)
    switch = "INTERN_DECISION_ALLOW_SLOW_KERNELS=1"
    assert report["causal_conv1d_fn"]["allowed_by"] == switch
    assert "allowed_by" not in report["causal_conv1d_update"]
    assert "SLOW KERNELS ALLOWED" in caplog.text


def test_fast_kernels_pass_without_a_word(
    bind: Bind, caplog: pytest.LogCaptureFixture
) -> None:
    bind()
    check_kernels(find_kernels(), allow_slow=False)
    assert caplog.records == []


def test_the_log_has_a_line_per_kernel(
    bind: Bind, caplog: pytest.LogCaptureFixture
) -> None:
    bind(causal_conv1d_update=SLOW_MODULE)
    with caplog.at_level(logging.INFO):
        log_kernels(find_kernels())
    fla, conv = implementation("fla.ops.fake"), implementation("causal_conv1d.fake")
    slow = implementation(SLOW_MODULE)
    assert caplog.messages == [
        f"kernel chunk_gated_delta_rule: {fla} (fla-core 0.5.2)",
        f"kernel fused_recurrent_gated_delta_rule: {fla} (fla-core 0.5.2)",
        f"kernel causal_conv1d_fn: {conv} (causal-conv1d 1.7.0)",
        f"kernel causal_conv1d_update: {slow} (transformers 5.17.0), slow",
    ]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which Triton finds all it needs, fla included."""
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    tools, headers = tmp_path / "bin", tmp_path / "include"
    tools.mkdir()
    headers.mkdir()
    compiler = tools / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    (headers / "Python.h").touch()
    monkeypatch.setattr(
        kernels.sysconfig, "get_paths", lambda scheme: {"include": str(headers)}
    )
    return {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }


def test_a_machine_with_all_of_it_passes(machine: dict[str, str]) -> None:
    check_triton(machine)
    assert os.listdir(machine["TRITON_CACHE_DIR"]) == []


def test_without_fla_nothing_of_triton_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    check_triton({"PATH": "", "TRITON_CACHE_DIR": "/nowhere/at/all"})


def test_the_default_cache_is_below_home(machine: dict[str, str]) -> None:
    del machine["TRITON_CACHE_DIR"]
    check_triton(machine)
    assert (Path(machine["HOME"]) / ".triton" / "cache").is_dir()


def test_a_cache_on_a_read_only_mount_refuses(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(kernels.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(StartupRefused, match="is not writable: Read-only file system"):
        check_triton(machine)


def test_a_cache_that_cannot_be_written_refuses(
    machine: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    machine["TRITON_CACHE_DIR"] = str(tmp_path / "file" / "cache")
    with pytest.raises(StartupRefused) as refusal:
        check_triton(machine)
    assert str(refusal.value) == (
        f"Triton's cache {machine['TRITON_CACHE_DIR']!r} is not writable: "
        "Not a directory; set TRITON_CACHE_DIR"
    )


def test_a_cache_on_a_noexec_mount_refuses(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noexec: Any = types.SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    with pytest.raises(StartupRefused, match="noexec mount.*set TRITON_CACHE_DIR"):
        check_triton(machine)


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"PATH": "/nowhere"}, "gcc or clang"), ({"CC": "no-such-cc"}, "no-such-cc")],
)
def test_no_c_compiler_refuses(
    machine: dict[str, str], changes: dict[str, str], names: str
) -> None:
    with pytest.raises(StartupRefused) as refusal:
        check_triton({**machine, **changes})
    assert str(refusal.value) == (
        f"Triton needs a C compiler: {names} is not on PATH; set CC"
    )


def test_no_python_header_refuses(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels.sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"}
    )
    with pytest.raises(StartupRefused) as refusal:
        check_triton({**machine, "CPATH": "/nowhere/else"})
    assert str(refusal.value) == (
        "Triton needs Python.h of this Python: not in /nowhere, /nowhere/else; "
        "install the headers or set CPATH"
    )


def test_headers_on_the_compiler_path_count(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = kernels.sysconfig.get_paths(scheme="posix_prefix")["include"]
    monkeypatch.setattr(
        kernels.sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"}
    )
    check_triton({**machine, "C_INCLUDE_PATH": f"/nowhere/else:{headers}"})
