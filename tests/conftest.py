"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_server import DemoServer, start_demo
from running import RunningService

from intern_decision_serve.demo import DemoCheckpoint, make_checkpoint

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads would fight the tests'

# Why a test may be skipped even where CI installs every tool.
MAY_SKIP = ("no CUDA device", "reaches the package index", "root reads everything")


def pytest_collection_finish() -> None:
    """Freeze what importing left: engines collect garbage after each failed call."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that CI had to skip."""
    report = yield
    _fail_skipped_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a file that CI had to skip."""
    report = yield
    _fail_skipped_in_ci(report)
    return report


def _fail_skipped_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = str(report.longrepr)
    if not any(allowed in reason for allowed in MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"skipped where CI may not skip: {reason}"


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> DemoCheckpoint:
    """The tiny demo checkpoint, made once. Its files are links to blobs: copy first."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return make_checkpoint(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session")
def demo_server(
    demo_checkpoint: DemoCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DemoServer]:
    """The demo as a process, over real HTTP; it must end well."""
    logs = tmp_path_factory.mktemp("demo-server")
    server = start_demo(Path(demo_checkpoint.path).parents[2], logs)
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture
def start_service() -> Iterator[Callable[..., RunningService]]:
    """Start services over fake engines; settings by their names in Config."""
    running: list[RunningService] = []

    def start(server: dict[str, Any] | None = None, **settings: Any) -> RunningService:
        running.append(RunningService(server or {}, settings))
        return running[-1]

    yield start
    for service in running:
        service.stop()


@pytest.fixture
def service(start_service: Callable[..., RunningService]) -> RunningService:
    """A running service over a fake engine, with every setting at its default."""
    return start_service()
