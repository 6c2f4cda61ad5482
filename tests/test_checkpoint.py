"""Only the pinned snapshot's hashed bytes are executed, and nothing else happens."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
import sys
from pathlib import Path

import pytest

from intern_decision_serve.checkpoint import execute_inference, read_inference
from intern_decision_serve.errors import StartupRefused
from intern_decision_serve.pins import ModelPins

SOURCE = b'''"""Stands in for the pinned file."""
from __future__ import annotations
from dataclasses import dataclass, KW_ONLY
ANSWER = 42
HERE = __file__
@dataclass
class Row:
    text: str
    _: KW_ONLY
    fields: tuple[str, ...] = ()
'''
REVISION = "0123456789abcdef0123456789abcdef01234567"


def pins_for(source: bytes, min_python: tuple[int, int] = (3, 11)) -> ModelPins:
    return ModelPins(
        name="Tiny",
        source="ours/Tiny",
        revision=REVISION,
        inference_sha256=hashlib.sha256(source).hexdigest(),
        temperature=2.0,
        min_python=min_python,
    )


PINS = pins_for(SOURCE)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    directory = tmp_path / "models--ours--Tiny" / "snapshots" / REVISION
    directory.mkdir(parents=True)
    (directory / "inference.py").write_bytes(SOURCE)
    return directory


def refusal(checkpoint: str, pins: ModelPins = PINS) -> str:
    with pytest.raises(StartupRefused) as caught:
        read_inference(checkpoint, pins)
    return one_line(caught.value)


def execution_refusal(source: bytes) -> str:
    with pytest.raises(StartupRefused) as caught:
        execute_inference(source, pins_for(source))
    assert module_name(pins_for(source)) not in sys.modules
    return one_line(caught.value)


def one_line(error: BaseException) -> str:
    message = str(error)
    assert message.splitlines() == [message]
    return message


def module_name(pins: ModelPins) -> str:
    return f"_pinned_inference_{pins.inference_sha256[:12]}"


class TestReading:
    """The path and the hash decide (INV-3)."""

    @pytest.mark.parametrize("ending", ["", "/", "//", "/."])
    def test_the_pinned_snapshot_is_read(self, snapshot: Path, ending: str) -> None:
        assert read_inference(f"{snapshot}{ending}", PINS) == SOURCE

    def test_a_relative_path_is_read(
        self, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(snapshot.parent.parent)
        assert read_inference(f"snapshots/{REVISION}", PINS) == SOURCE

    def test_links_into_the_blob_store_are_followed(self, snapshot: Path) -> None:
        blob = snapshot.parent.parent / "blob"
        (snapshot / "inference.py").rename(blob)
        (snapshot / "inference.py").symlink_to(blob)
        assert read_inference(str(snapshot), PINS) == SOURCE

    def test_wrong_inference_py_hash_refuses(self, snapshot: Path) -> None:
        other = SOURCE + b"\n"
        (snapshot / "inference.py").write_bytes(other)
        assert refusal(str(snapshot)) == (
            f"'{snapshot}/inference.py': sha256 is "
            f"{hashlib.sha256(other).hexdigest()}, "
            f"the pin of Tiny is {PINS.inference_sha256}"
        )

    @pytest.mark.parametrize("place", [0, 31, 63])
    def test_every_digit_of_the_pin_counts(self, snapshot: Path, place: int) -> None:
        digits = list(PINS.inference_sha256)
        digits[place] = "0" if digits[place] != "0" else "1"
        pins = dataclasses.replace(PINS, inference_sha256="".join(digits))
        with pytest.raises(StartupRefused, match="the pin of Tiny is"):
            read_inference(str(snapshot), pins)

    @pytest.mark.parametrize("place", [0, len(SOURCE) // 2, len(SOURCE) - 1])
    @pytest.mark.parametrize("bit", [0x01, 0x80])
    def test_one_flipped_byte_refuses(
        self, snapshot: Path, place: int, bit: int
    ) -> None:
        flipped = bytearray(SOURCE)
        flipped[place] ^= bit
        (snapshot / "inference.py").write_bytes(flipped)
        assert "the pin of Tiny is" in refusal(str(snapshot))

    @pytest.mark.parametrize(
        "ending",
        [
            "snapshots/" + "f" * 40,
            "snapshots/" + REVISION[:-1],
            "snapshots/" + REVISION.upper(),
            "snapshots",
            REVISION,
            "refs/" + REVISION,
            f"snapshots/{REVISION}/deeper",
            f"snapshots/{REVISION}/..",
        ],
    )
    def test_wrong_revision_directory_refuses(
        self, tmp_path: Path, ending: str
    ) -> None:
        directory = tmp_path / ending
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "inference.py").write_bytes(SOURCE)
        assert refusal(str(directory)) == (
            f"checkpoint '{directory}': the path must end in snapshots/{REVISION}"
        )

    def test_a_link_to_another_revision_refuses(self, snapshot: Path) -> None:
        other = snapshot.parent / ("f" * 40)
        snapshot.rename(other)
        snapshot.symlink_to(other)
        assert refusal(str(snapshot)) == (
            f"checkpoint '{snapshot}': a link to another revision, '{'f' * 40}'"
        )

    def test_a_link_under_another_name_refuses(self, snapshot: Path) -> None:
        link = snapshot.parent.parent / "current"
        link.symlink_to(snapshot)
        assert "must end in" in refusal(str(link))

    def test_a_link_of_the_pinned_name_to_a_plain_directory_is_read(
        self, snapshot: Path
    ) -> None:
        plain = snapshot.parent.parent / "data"
        snapshot.rename(plain)
        snapshot.symlink_to(plain)
        assert read_inference(str(snapshot), PINS) == SOURCE

    def test_a_missing_directory_refuses(self, tmp_path: Path) -> None:
        path = tmp_path / "snapshots" / REVISION
        assert refusal(str(path)) == f"checkpoint '{path}': No such file or directory"

    def test_a_file_in_its_place_refuses(self, tmp_path: Path) -> None:
        path = tmp_path / "snapshots" / REVISION
        path.parent.mkdir()
        path.write_text("")
        assert refusal(str(path)) == f"checkpoint '{path}': not a directory"

    def test_a_loop_of_links_refuses(self, tmp_path: Path) -> None:
        path = tmp_path / "snapshots" / REVISION
        path.parent.mkdir()
        path.symlink_to(path)
        assert refusal(str(path)).startswith(f"checkpoint '{path}': ")

    def test_a_nul_in_the_path_refuses(self) -> None:
        assert refusal(f"/a\0b/snapshots/{REVISION}").startswith("checkpoint ")

    def test_a_missing_file_refuses(self, snapshot: Path) -> None:
        (snapshot / "inference.py").unlink()
        assert refusal(str(snapshot)) == (
            f"'{snapshot}/inference.py': No such file or directory"
        )

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_an_unreadable_file_refuses(self, snapshot: Path) -> None:
        (snapshot / "inference.py").chmod(0)
        assert refusal(str(snapshot)) == (
            f"'{snapshot}/inference.py': Permission denied"
        )

    def test_a_file_the_system_will_not_open_refuses(
        self, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def deny(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", deny)
        assert refusal(str(snapshot)) == (
            f"'{snapshot}/inference.py': Permission denied"
        )


class TestExecuting:
    """The hashed bytes run as a module, and leave nothing else behind."""

    def test_the_bytes_become_a_module(self) -> None:
        module = execute_inference(SOURCE, PINS, filename="/x/inference.py")
        assert module.ANSWER == 42
        assert module.HERE == "/x/inference.py"
        assert module.Row("a").fields == ()
        assert sys.modules[module.__name__] is module
        assert module.__name__ == module_name(PINS)

    def test_a_file_changed_after_hashing_does_not_matter(self, snapshot: Path) -> None:
        source = read_inference(str(snapshot), PINS)
        (snapshot / "inference.py").write_bytes(b"raise SystemExit(1)")
        assert execute_inference(source, PINS).ANSWER == 42

    def test_sys_path_and_the_directory_stay_as_they_were(self, snapshot: Path) -> None:
        cache = snapshot / "__pycache__"
        cache.mkdir()
        (cache / f"inference.{sys.implementation.cache_tag}.pyc").write_bytes(b"junk")
        before_path, before_files = list(sys.path), listing(snapshot)
        source = read_inference(str(snapshot), PINS)
        execute_inference(source, PINS, filename=str(snapshot / "inference.py"))
        assert sys.path == before_path
        assert listing(snapshot) == before_files

    def test_a_read_only_snapshot_is_enough(self, snapshot: Path) -> None:
        (snapshot / "inference.py").chmod(stat.S_IRUSR)
        snapshot.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            module = execute_inference(read_inference(str(snapshot), PINS), PINS)
        finally:
            snapshot.chmod(stat.S_IRWXU)
        assert module.ANSWER == 42

    def test_our_future_imports_do_not_leak_into_it(self) -> None:
        source = b"def f(x: int) -> None: ...\nKIND = f.__annotations__['x']\n"
        assert execute_inference(source, pins_for(source)).KIND is int

    def test_a_python_that_is_too_old_is_told_before_compiling(self) -> None:
        pins = dataclasses.replace(pins_for(b"not python"), min_python=(9, 12))
        with pytest.raises(StartupRefused) as caught:
            execute_inference(b"not python", pins)
        running = ".".join(map(str, sys.version_info[:3]))
        assert one_line(caught.value) == (
            f"inference.py of Tiny needs Python 9.12 or later, this is {running}"
        )

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (
                b"import PIL.no_such_module_of_pillow",
                "inference.py needs the module ",
            ),
            (
                b"raise ModuleNotFoundError(\"No module\", name='PIL')",
                "inference.py needs the module 'PIL': install Pillow",
            ),
            (
                b"raise ModuleNotFoundError('No module', name='torchvision.io')",
                "inference.py needs the module 'torchvision.io': install torchvision",
            ),
            (
                b"raise ImportError('\\nAutoProcessor requires torchvision\\nmore')",
                "inference.py failed: ImportError: AutoProcessor requires torchvision",
            ),
            (b"from json import nothing_there", "inference.py failed: ImportError: "),
            (b"raise RuntimeError", "inference.py failed: RuntimeError: no message"),
            (b"1 / 0", "inference.py failed: ZeroDivisionError: division by zero"),
            (b"x = 1\nx = = 2\n", "inference.py does not compile on Python "),
            (b"x = 1\0", "inference.py "),
            (b"x = '\xff'\n", "inference.py does not compile on Python "),
        ],
    )
    def test_code_that_cannot_run_here_is_one_clear_line(
        self, source: bytes, message: str
    ) -> None:
        assert execution_refusal(source).startswith(message)

    def test_a_syntax_error_names_its_line(self) -> None:
        assert "line 2: " in execution_refusal(b"x = 1\nx = = 2\n")

    def test_an_exit_passes_through_and_leaves_no_module(self) -> None:
        source = b"raise SystemExit(3)"
        with pytest.raises(SystemExit):
            execute_inference(source, pins_for(source))
        assert module_name(pins_for(source)) not in sys.modules


def listing(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
