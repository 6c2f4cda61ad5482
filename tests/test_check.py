"""`check` finds what would stop or falsify a start, without loading a weight."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from intern_decision_serve import check
from intern_decision_serve.check import run_checks
from intern_decision_serve.config import Config, load_config
from intern_decision_serve.pins import FAMILY, PINNED_STACK, ModelPins

SOURCE = b"ANSWER = 42\n"
REVISION = "0123456789abcdef0123456789abcdef01234567"
PINS = ModelPins(
    name="Tiny",
    source="ours/Tiny",
    revision=REVISION,
    inference_sha256=hashlib.sha256(SOURCE).hexdigest(),
    temperature=2.0,
    min_python=(3, 11),
)
FAMILY_PINS = FAMILY["Intern-Decision-4B"]
PYTHON = platform.python_version()
STACK = PINNED_STACK | {"torchvision": "0.25.0", "pillow": "12.0.0"}

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensor_file(tensors: dict[str, int], header: bytes | None = None) -> bytes:
    """Write a safetensors file of uint8 tensors, `tensors` being name -> bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors.items():
        offsets = [end, end + size]
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
        end += size
    if header is None:
        header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(end)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    directory = tmp_path / "models--ours--Tiny" / "snapshots" / REVISION
    directory.mkdir(parents=True)
    placed = {"weight_map": {"a": ONE, "b": ONE, "c": TWO}}
    files = {
        "inference.py": SOURCE,
        "config.json": b'{"model_type": "qwen3_5"}',
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps(placed).encode(),
        ONE: tensor_file({"a": 3, "b": 5}),
        TWO: tensor_file({"c": 7}),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stand in for the installed libraries: the pinned stack, free to be changed."""
    versions = dict(STACK)
    monkeypatch.setattr(check, "_find_version", versions.get)
    return versions


def config_for(snapshot: Path, **changes: Any) -> Config:
    environ = {
        "INTERN_DECISION_API_TOKEN": "t" * 32,
        "INTERN_DECISION_CHECKPOINT": str(snapshot),
        "INTERN_DECISION_DEVICE": "cpu",
    }
    return dataclasses.replace(load_config(environ), **changes)


def run(
    config: Config, pins: ModelPins = PINS, *, deep: bool = False
) -> tuple[bool, list[str]]:
    lines: list[str] = []
    passed = run_checks(config, pins, deep=deep, report=lines.append)
    for line in lines:
        assert line.startswith(("ok    ", "warn  ", "FAIL  "))
        assert line.splitlines() == [line]
    assert passed is not any(line.startswith("FAIL") for line in lines)
    return passed, lines


def failures(config: Config, *, deep: bool = False) -> list[str]:
    return [
        line.removeprefix("FAIL  ")
        for line in run(config, deep=deep)[1]
        if line.startswith("FAIL")
    ]


def link_into_blobs(snapshot: Path, names: Callable[[str, bytes], str]) -> None:
    """Turn every file into a link to a blob, as the cache lays a snapshot out."""
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for path in sorted(snapshot.iterdir()):
        content = path.read_bytes()
        blob = blobs / names(path.name, content)
        path.rename(blob)
        path.symlink_to(f"../../blobs/{blob.name}")


def cache_name(name: str, content: bytes) -> str:
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.mark.usefixtures("installed")
def test_a_sound_snapshot_passes_line_by_line(snapshot: Path) -> None:
    passed, lines = run(config_for(snapshot))
    assert passed
    assert lines == [
        "ok    settings: Tiny on cpu",
        f"ok    Python: {PYTHON}, 3.11 or later needed",
        "ok    library: torch 2.10.0",
        "ok    library: transformers 5.17.0",
        f"ok    snapshot: {snapshot}",
        f"ok    inference.py: sha256 {PINS.inference_sha256}",
        "ok    config.json: model_type 'qwen3_5'",
        f"ok    {ONE}: 2 tensors, {(snapshot / ONE).stat().st_size} bytes",
        f"ok    {TWO}: 1 tensors, {(snapshot / TWO).stat().st_size} bytes",
        "ok    tokenizer: tokenizer.json",
        "ok    tokenizer: tokenizer_config.json",
        "ok    tokenizer: chat template in chat_template.jinja",
    ]


def test_it_runs_against_the_real_library_metadata(snapshot: Path) -> None:
    lines = run(config_for(snapshot))[1]
    assert len([line for line in lines if " library: " in line]) == 2


@pytest.mark.usefixtures("installed")
def test_a_weak_token_fails_and_is_not_shown(snapshot: Path) -> None:
    config = config_for(snapshot, api_token="hunter2")
    (line,) = failures(config)
    assert line == (
        "settings: INTERN_DECISION_API_TOKEN: the token must be at least 32 visible "
        "ASCII characters (33-126)"
    )


@pytest.mark.usefixtures("installed")
def test_a_python_too_old_for_the_pins_fails(snapshot: Path) -> None:
    pins = dataclasses.replace(PINS, min_python=(9, 12))
    passed, lines = run(config_for(snapshot), pins)
    assert not passed
    assert lines[1] == (
        f"FAIL  Python: inference.py of Tiny needs Python 9.12 or later, "
        f"this is {PYTHON}"
    )


class TestLibraries:
    """A difference warns; what the start cannot do without fails."""

    def find(self, config: Config, pins: ModelPins) -> dict[str, str]:
        lines = [line for line in run(config, pins)[1] if " library: " in line]
        return {line.split()[2]: line for line in lines}

    def test_the_family_needs_the_image_libraries_and_wants_the_kernels(
        self, snapshot: Path, installed: dict[str, str]
    ) -> None:
        config = config_for(snapshot)
        assert set(self.find(config, FAMILY_PINS)) == set(STACK)
        assert set(self.find(config, PINS)) == {"torch", "transformers"}
        on_cuda = config_for(snapshot, device="cuda:1")
        assert set(self.find(on_cuda, PINS)) == set(PINNED_STACK)

    @pytest.mark.parametrize("name", ["torch", "transformers", "torchvision", "pillow"])
    def test_a_missing_need_fails(
        self, snapshot: Path, installed: dict[str, str], name: str
    ) -> None:
        del installed[name]
        found = self.find(config_for(snapshot), FAMILY_PINS)
        assert found[name] == f"FAIL  library: {name} is not installed"

    @pytest.mark.parametrize(
        ("device", "allowed", "level"),
        [("cuda", False, "FAIL"), ("cuda", True, "warn"), ("cpu", False, "warn")],
    )
    @pytest.mark.parametrize("name", ["flash-linear-attention", "causal-conv1d"])
    def test_a_missing_kernel_package_fails_where_the_start_refuses_it(
        self,
        snapshot: Path,
        installed: dict[str, str],
        name: str,
        device: str,
        allowed: bool,
        level: str,
    ) -> None:
        del installed[name]
        config = config_for(snapshot, device=device, allow_slow_kernels=allowed)
        assert self.find(config, FAMILY_PINS)[name] == (
            f"{level}  library: {name} is not installed: slow torch code, other numbers"
        )

    @pytest.mark.parametrize("name", PINNED_STACK)
    def test_another_version_warns(
        self, snapshot: Path, installed: dict[str, str], name: str
    ) -> None:
        installed[name] = "0.0.1"
        assert self.find(config_for(snapshot), FAMILY_PINS)[name] == (
            f"warn  library: {name} 0.0.1, {PINNED_STACK[name]} was measured"
        )

    def test_a_build_suffix_is_the_same_version(
        self, snapshot: Path, installed: dict[str, str]
    ) -> None:
        installed["torch"] = "2.10.0+cu128"
        found = self.find(config_for(snapshot), PINS)
        assert found["torch"] == "ok    library: torch 2.10.0+cu128"

    def test_versions_come_from_the_installed_metadata(self) -> None:
        assert check._find_version("pytest") == pytest.__version__
        assert check._find_version("no-such-distribution-here") is None


@pytest.mark.usefixtures("installed")
class TestSnapshot:
    """One planted fault, one FAIL line."""

    def test_a_wrong_revision_directory_ends_the_file_checks(
        self, snapshot: Path
    ) -> None:
        other = snapshot.with_name("f" * 40)
        snapshot.rename(other)
        assert failures(config_for(other)) == [
            f"snapshot: checkpoint '{other}': the path must end in snapshots/{REVISION}"
        ]

    def test_a_missing_snapshot_is_one_line(self, snapshot: Path) -> None:
        snapshot.rename(snapshot.with_name("gone"))
        assert failures(config_for(snapshot)) == [
            f"snapshot: checkpoint '{snapshot}': No such file or directory"
        ]

    def test_one_flipped_byte_in_inference_py_fails(self, snapshot: Path) -> None:
        (snapshot / "inference.py").write_bytes(SOURCE.replace(b"2", b"3"))
        (line,) = failures(config_for(snapshot))
        assert line.startswith(f"inference.py: '{snapshot}/inference.py': sha256 is ")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("config.json", b"[]", "config.json: config.json: not a JSON object"),
            ("config.json", b"{", "config.json: config.json: not JSON: "),
            ("config.json", b"\xff", "config.json: config.json: not JSON: "),
            ("config.json", b"[" * 9**5, "config.json: config.json: not JSON: "),
            ("tokenizer.json", b"", "tokenizer: tokenizer.json: not JSON: "),
            ("tokenizer_config.json", b"x", "tokenizer: tokenizer_config.json: not"),
            ("chat_template.jinja", b"", "tokenizer: no chat template ("),
            ("chat_template.jinja", b"\xff", "tokenizer: 'utf-8' codec can't decode"),
            (
                "model.safetensors.index.json",
                b"{}",
                "weights: model.safetensors.index.json: no weight_map",
            ),
            (
                "model.safetensors.index.json",
                b'{"weight_map": {"a": "../x.safetensors"}}',
                "weights: model.safetensors.index.json: '../x.safetensors' is not a",
            ),
            (
                "model.safetensors.index.json",
                b'{"weight_map": {"a": 1}}',
                "weights: model.safetensors.index.json: 1 is not a file name",
            ),
        ],
    )
    def test_a_bad_file_fails(
        self, snapshot: Path, name: str, content: bytes, message: str
    ) -> None:
        (snapshot / name).write_bytes(content)
        (line,) = failures(config_for(snapshot))
        assert line.startswith(message)

    @pytest.mark.parametrize(
        ("name", "subject"),
        [
            ("config.json", "config.json"),
            ("tokenizer.json", "tokenizer"),
            ("tokenizer_config.json", "tokenizer"),
            (ONE, ONE),
        ],
    )
    def test_a_missing_file_fails(
        self, snapshot: Path, name: str, subject: str
    ) -> None:
        (snapshot / name).unlink()
        assert failures(config_for(snapshot)) == [
            f"{subject}: [Errno 2] No such file or directory: '{snapshot / name}'"
        ]

    def test_a_missing_chat_template_fails(self, snapshot: Path) -> None:
        (snapshot / "chat_template.jinja").unlink()
        assert failures(config_for(snapshot)) == [
            "tokenizer: no chat template (chat_template.jinja or tokenizer_config.json)"
        ]

    def test_the_chat_template_may_be_in_the_tokenizer_config(
        self, snapshot: Path
    ) -> None:
        (snapshot / "chat_template.jinja").unlink()
        (snapshot / "tokenizer_config.json").write_text('{"chat_template": "x"}')
        passed, lines = run(config_for(snapshot))
        assert passed
        assert lines[-1] == ("ok    tokenizer: chat template in tokenizer_config.json")


@pytest.mark.usefixtures("installed")
class TestWeights:
    """Each shard's header accounts for its bytes and for the index."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "0 bytes are too few for a safetensors header"),
            (b"\0" * 7, "7 bytes are too few for a safetensors header"),
            (b"\0" * 8, "not safetensors: a header of 0 bytes"),
            (
                b"\xff" * 64,
                "not safetensors: a header of 18446744073709551615 bytes",
            ),
            (
                b"version https://git-lfs.github.com/spec/v1\n",
                "not safetensors: a header of 2336927755350992246 bytes",
            ),
            (tensor_file({}, b"[]"), "safetensors header: not a JSON object"),
            (
                tensor_file({}, b'{"c": []}'),
                "not safetensors: tensor 'c' has no offsets",
            ),
            (
                tensor_file({}, b'{"c": {"data_offsets": [0, "7"]}}'),
                "not safetensors: tensor 'c' has no offsets",
            ),
            (
                tensor_file({}, b'{"c": {"data_offsets": [7, 0]}}'),
                "not safetensors: tensor 'c' has no offsets",
            ),
            (tensor_file({"d": 7}), "lacks 1 tensors of the index: 'c'"),
        ],
    )
    def test_a_bad_shard_fails(
        self, snapshot: Path, content: bytes, message: str
    ) -> None:
        (snapshot / TWO).write_bytes(content)
        assert failures(config_for(snapshot)) == [f"{TWO}: {message}"]

    @pytest.mark.parametrize("change", [-1, 1])
    def test_a_shard_of_another_size_than_its_header_says_fails(
        self, snapshot: Path, change: int
    ) -> None:
        whole = tensor_file({"c": 7})
        changed = whole[:-1] if change < 0 else whole + b"\0"
        (snapshot / TWO).write_bytes(changed)
        assert failures(config_for(snapshot)) == [
            f"{TWO}: {len(changed)} bytes, its header says {len(whole)}"
        ]

    def test_a_dangling_link_fails(self, snapshot: Path) -> None:
        (snapshot / TWO).unlink()
        (snapshot / TWO).symlink_to("../../blobs/none")
        (line,) = failures(config_for(snapshot))
        assert line.startswith(f"{TWO}: [Errno 2] No such file or directory")

    def test_a_single_file_needs_no_index(self, snapshot: Path) -> None:
        (snapshot / "model.safetensors.index.json").unlink()
        single = snapshot / "model.safetensors"
        assert failures(config_for(snapshot)) == [
            f"{single.name}: [Errno 2] No such file or directory: '{single}'"
        ]
        (snapshot / "model.safetensors").write_bytes(tensor_file({"a": 1}))
        assert run(config_for(snapshot))[0]

    def test_a_single_file_beside_an_index_is_checked_too(self, snapshot: Path) -> None:
        # transformers would load it in place of the shards
        (snapshot / "model.safetensors").write_bytes(b"")
        (line,) = failures(config_for(snapshot))
        assert line.startswith("model.safetensors: 0 bytes are too few")


@pytest.mark.usefixtures("installed")
class TestDeep:
    """A cache blob is named by its hash, so its bytes can be verified offline."""

    def test_every_blob_is_hashed(self, snapshot: Path) -> None:
        link_into_blobs(snapshot, cache_name)
        passed, lines = run(config_for(snapshot), deep=True)
        assert passed
        shallow = run(config_for(snapshot))[1]
        assert lines[: len(shallow)] == shallow
        expected = []
        for path in sorted(snapshot.iterdir()):
            kind = "sha256" if path.suffix == ".safetensors" else "git blob"
            if path.name != "inference.py":
                expected.append(f"ok    {path.name}: {kind} {path.resolve().name}")
        assert lines[len(shallow) :] == expected

    @pytest.mark.parametrize("name", [ONE, TWO, "config.json", "tokenizer.json"])
    def test_one_flipped_byte_fails(self, snapshot: Path, name: str) -> None:
        link_into_blobs(snapshot, cache_name)
        blob = (snapshot / name).resolve()
        content = bytearray(blob.read_bytes())
        if name.endswith(".safetensors"):
            content[-1] ^= 1
        else:
            content += b" "
        blob.write_bytes(content)
        kind = "sha256" if name.endswith(".safetensors") else "git blob"
        found = cache_name(name, bytes(content))
        config = config_for(snapshot)
        assert failures(config) == []
        assert failures(config, deep=True) == [
            f"{name}: {kind} is {found}, its blob is {blob.name}"
        ]

    def test_weights_outside_a_cache_warn(self, snapshot: Path) -> None:
        passed, lines = run(config_for(snapshot), deep=True)
        assert passed
        assert [line for line in lines if line.startswith("warn")] == [
            f"warn  {name}: not a cache blob, nothing to compare with"
            for name in (ONE, TWO)
        ]

    def test_a_large_file_reports_progress(
        self, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(check, "_CHUNK_BYTES", 64)
        monkeypatch.setattr(check, "_PROGRESS_BYTES", 64)
        link_into_blobs(snapshot, cache_name)
        lines = run(config_for(snapshot), deep=True)[1]
        size = (snapshot / ONE).stat().st_size
        progress = f"ok    {ONE}: 0 of 0.0 GiB read"
        assert lines.count(progress) == size // 64

    def test_a_dangling_link_fails(self, snapshot: Path) -> None:
        (snapshot / "extra.json").symlink_to("../../blobs/none")
        (line,) = failures(config_for(snapshot), deep=True)
        assert line.startswith("extra.json: [Errno 2] No such file or directory")


def test_a_control_character_in_a_path_stays_on_one_line(snapshot: Path) -> None:
    odd = snapshot.parent.parent / "a\nb" / "snapshots" / REVISION
    odd.parent.mkdir(parents=True)
    snapshot.rename(odd)
    run(config_for(odd))


def test_nothing_is_loaded_executed_or_written(snapshot: Path) -> None:
    before = {path: path.read_bytes() for path in snapshot.rglob("*")}
    script = (
        "import sys\n"
        "from intern_decision_serve import check, config\n"
        "loaded = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    run(config_for(snapshot), deep=True)
    assert {path: path.read_bytes() for path in snapshot.rglob("*")} == before
