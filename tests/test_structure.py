"""The shape of the package: who may import whom, how long things are, what loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import intern_decision_serve

PACKAGE = Path(intern_decision_serve.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Module -> modules of ours it may import; imports go downward only.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "pins": set(),
    "notify": set(),
    "activation": set(),
    "pacing": set(),
    "accesslog": set(),
    "memory": set(),
    "config": {"errors", "pins"},
    "auth": {"errors"},
    "framing": {"errors"},
    "decoding": {"errors"},
    "document": {"errors"},
    "prompt": {"errors"},
    "admission": {"errors"},
    "connection": {"errors", "framing"},
    "checkpoint": {"errors", "pins"},
    "validation": {"document", "errors", "pins"},
    "answers": {"document", "errors"},
    "mapping": {"answers", "errors", "pins", "validation"},
    "systemone": {"answers", "document", "errors", "validation"},
    "jobs": set(),
    "worker": {"errors", "jobs", "pacing"},
    "health": {
        "__init__",
        "accesslog",
        "admission",
        "config",
        "errors",
        "pins",
        "worker",
    },
    "check": {"auth", "checkpoint", "config", "errors", "pins"},
    "device": {"errors"},
    "kernels": {"errors"},
    "encoder": {"errors", "memory", "prompt", "warmup"},
    "warmup": {"errors"},
    "loading": {"checkpoint", "device", "errors", "memory", "pins"},
    "graphs": set(),
    "replay": {"graphs", "memory"},
    "metrics": {"__init__", "accesslog", "admission", "errors", "health", "worker"},
    "engine": {
        "checkpoint",
        "device",
        "encoder",
        "errors",
        "kernels",
        "loading",
        "memory",
        "pins",
        "prompt",
        "replay",
        "warmup",
    },
    "handlers": {
        "config",
        "errors",
        "health",
        "jobs",
        "mapping",
        "metrics",
        "pins",
        "systemone",
        "validation",
        "worker",
    },
    "exchange": {
        "accesslog",
        "admission",
        "auth",
        "connection",
        "decoding",
        "errors",
        "framing",
        "handlers",
        "jobs",
        "pacing",
    },
    "server": {
        "accesslog",
        "admission",
        "connection",
        "exchange",
        "handlers",
        "pacing",
        "worker",
    },
    "lifecycle": {
        "accesslog",
        "activation",
        "admission",
        "config",
        "engine",
        "errors",
        "handlers",
        "health",
        "metrics",
        "notify",
        "pins",
        "server",
        "worker",
    },
    "cli": {
        "__init__",
        "auth",
        "check",
        "config",
        "demo",
        "errors",
        "lifecycle",
        "probe",
    },
    "__main__": {"cli"},
    "demo": {"demo", "pins"},
    "probe": {"probe"},
}
# engine and what engine alone imports, besides the demo.
MAY_NAME_TORCH = {"engine", "loading", "replay", "encoder", "demo"}


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Absolute dotted names of everything a file imports, wherever it does."""
    package = ["intern_decision_serve", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def _ours(path: Path) -> set[str]:
    names = set()
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "intern_decision_serve":
            known = len(parts) > 1 and (
                (PACKAGE / f"{parts[1]}.py").exists() or (PACKAGE / parts[1]).is_dir()
            )
            names.add(parts[1] if known else "__init__")
    return names


@pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE))
)
class TestEveryModule:
    def test_it_imports_only_what_the_table_allows(self, path: Path) -> None:
        assert _ours(path) - MAY_IMPORT[_name(path)] <= {_name(path)}

    def test_only_the_engine_and_the_demo_import_torch(self, path: Path) -> None:
        roots = {name.split(".")[0] for name in _imports(path)}
        if _name(path) not in MAY_NAME_TORCH:
            assert not roots & {"torch", "transformers", "tokenizers", "safetensors"}

    def test_it_is_one_thing(self, path: Path) -> None:
        assert len(path.read_text("utf-8").splitlines()) <= 320

    def test_no_function_is_two_things(self, path: Path) -> None:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert lines <= 40, f"{node.name} has {lines} lines"

    def test_it_says_what_it_owns(self, path: Path) -> None:
        tree = ast.parse(path.read_text("utf-8"))
        assert ast.get_docstring(tree)
        if path.name != "__main__.py" and path != PACKAGE / "demo" / "inference.py":
            assert "__all__" in path.read_text("utf-8")


def test_the_table_names_no_module_that_is_not_there() -> None:
    assert set(MAY_IMPORT) - {_name(path) for path in MODULES} <= {"replay", "metrics"}


def test_importing_the_whole_command_line_loads_no_torch() -> None:
    program = (
        "import sys, intern_decision_serve.cli as cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "import intern_decision_serve.demo, intern_decision_serve.probe\n"
        "import intern_decision_serve.engine\n"
        "heavy = {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
