"""A real Prometheus over two instances, with the shipped settings and alert rules."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo_server import TOKEN, DemoServer
from instances import LOSE, start_instance
from packaging_tools import SYSTEMD, find_tool

from intern_decision_serve.errors import EXIT_ENGINE_LOST

SETTINGS = SYSTEMD / "prometheus.yml"
RULES = SYSTEMD / "prometheus-rules.yml"
JOB = "intern-decision-serve"
WAIT = 25.0  # seconds until a test that hangs fails; nothing waits so long when well
BODY = {
    "state": "s",
    "id": "d",
    "question": "q",
    "options": [{"id": "a", "description": ""}, {"id": "b", "description": ""}],
}
Instances = tuple[DemoServer, DemoServer]


# Each alert: what it sees, samples every 15 s, and from which minute on it must fire.
ALERTS: dict[str, tuple[dict[str, str], int]] = {
    "InstanceDown": ({f'up{{job="{JOB}"}}': "1 0x80"}, 4),
    "InstanceRestarts": (
        {f'process_start_time_seconds{{job="{JOB}"}}': "1x8 _ _ 2x8 _ _ 3x80"},
        6,
    ),
    "CallHangs": ({"intern_decision_running_call_seconds": "0+15x80"}, 2),
    "ScoringFails": (
        {'intern_decision_refused_total{reason="scoring_failed"}': "0x8 1x80"},
        3,
    ),
    "AddAnInstance": (
        {
            f'intern_decision_scoring_seconds_sum{{instance="{n}"}}': "0+12x300"
            for n in "ab"
        },
        50,
    ),
    "RequestsWait": (
        {
            f'intern_decision_queue_seconds_bucket{{le="{le}"}}': f"0+{step}x200"
            for le, step in (("2.0", 10), ("3.0", 20), ("+Inf", 20))
        },
        20,
    ),
    "RequestsRefused": (
        {'intern_decision_refused_total{reason="busy"}': "0+15x200"},
        15,
    ),
    "ClientsGiveUp": (
        {
            "intern_decision_skipped_requests_total": "0+1x200",
            'intern_decision_requests_total{route="/decide"}': "0+30x200",
        },
        15,
    ),
    "OutOfMemory": (
        {'intern_decision_refused_total{reason="out_of_memory"}': "0x8 1x80"},
        3,
    ),
    "WrongToken": (
        {'intern_decision_refused_total{reason="unauthorized"}': "0+30x200"},
        20,
    ),
    "SlowKernels": ({'intern_decision_kernel_info{fast="false"}': "1x80"}, 1),
    "InstancesDiffer": (
        {f'intern_decision_build_info{{version="{n}"}}': "1x300" for n in "12"},
        31,
    ),
    "BalancerDown": ({'up{job="haproxy"}': "1 0x80"}, 2),
    "NoInstance": ({'haproxy_backend_active_servers{proxy="instances"}': "1 0x80"}, 2),
    "BalancerWaits": (
        {
            'haproxy_backend_queue_time_average_seconds{proxy="instances"}': "3x200",
        },
        16,
    ),
    "BalancerRefuses": (
        {
            'haproxy_frontend_intercepted_requests_total{proxy="decisions"}': "0+3x200",
        },
        20,
    ),
}


def write_settings(directory: Path, instances: tuple[str, str]) -> Path:
    """The shipped settings with this machine's names, and without patience."""
    token = directory / "token"
    token.write_text(TOKEN)
    (directory / RULES.name).write_text(RULES.read_text())
    text = SETTINGS.read_text()
    for old, new in [
        ("scrape_interval: 15s", "scrape_interval: 200ms"),
        ("evaluation_interval: 15s", "evaluation_interval: 200ms"),
        ("/etc/prometheus/intern-decision-serve.token", str(token)),
        ("- 127.0.0.1:8100\n", f"- {instances[0]}\n"),
        ("- 127.0.0.1:8101\n", f"- {instances[1]}\n"),
    ]:
        assert text.count(old) == 1, f"prometheus.yml: {old!r}"
        text = text.replace(old, new)
    path = directory / "prometheus.yml"
    path.write_text(text)
    return path


@dataclass(slots=True)
class Prometheus:
    """A running Prometheus, asked over its API."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(
            f"{self.url}{path}?{query}", timeout=WAIT
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[float]:
        """The values of an expression now, smallest first."""
        result = self.ask("/api/v1/query", query=expression)["result"]
        return sorted(float(sample["value"][1]) for sample in result)

    def wait_for(self, expression: str, *values: float) -> None:
        """Block until an expression has these values."""
        wait_until(lambda: self.query(expression) == list(values), expression)

    def health(self) -> dict[str, str]:
        """What Prometheus thinks of our targets: instance -> up or the reason."""
        targets = self.ask("/api/v1/targets", state="active")["activeTargets"]
        return {
            target["labels"]["instance"]: target["lastError"] or target["health"]
            for target in targets
            if target["labels"]["job"] == JOB
        }

    def firing(self) -> set[tuple[str, str]]:
        """The alerts that fire: their name and the instance they name."""
        return {
            (alert["labels"]["alertname"], alert["labels"].get("instance", ""))
            for alert in self.ask("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing"
        }


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instances]:
    find_tool("prometheus", "prometheus")
    directory = tmp_path_factory.mktemp("instances")
    first, second = (
        start_instance(directory / name, stay_lost=True) for name in ("one", "two")
    )
    try:
        first.wait_until_ready()
        second.wait_until_ready()
        yield first, second
    finally:
        for instance in (first, second):
            instance.process.kill()
            instance.process.wait()


def address(instance: DemoServer) -> str:
    return instance.url.removeprefix("http://")


@contextlib.contextmanager
def run_prometheus(settings: Path) -> Iterator[Prometheus]:
    log = settings.parent / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                find_tool("prometheus", "prometheus"),
                f"--config.file={settings}",
                f"--storage.tsdb.path={settings.parent / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=output,
        )
    listening = re.compile(r'msg="Listening on" address=(\S+)')
    try:
        wait_until(
            lambda: "is ready" in log.read_text() or process.poll() is not None,
            "ready",
        )
        found = listening.search(log.read_text())
        assert found is not None, log.read_text()
        yield Prometheus(f"http://{found[1]}")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def prometheus(
    instances: Instances, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    first, second = instances
    settings = write_settings(directory, (address(first), address(second)))
    with run_prometheus(settings) as running:
        yield running


class TestTheFiles:
    def test_promtool_accepts_them(self, tmp_path: Path) -> None:
        promtool = find_tool("promtool", "prometheus")
        settings = write_settings(tmp_path, ("127.0.0.1:8100", "127.0.0.1:8101"))
        done = subprocess.run(
            [promtool, "check", "config", str(settings)],
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert f"SUCCESS: {len(ALERTS)} rules found" in done.stdout

    @pytest.mark.parametrize("alert", ALERTS)
    def test_each_alert_fires_in_its_time_and_not_at_once(
        self, alert: str, tmp_path: Path
    ) -> None:
        promtool = find_tool("promtool", "prometheus")
        series, minute = ALERTS[alert]
        firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'

        def expect(time: str, *samples: dict[str, Any]) -> dict[str, Any]:
            return {"expr": firing, "eval_time": time, "exp_samples": list(samples)}

        once = {"labels": "{}", "value": 1}
        first = [expect("0s")] if alert != "SlowKernels" else []
        case = {
            "interval": "15s",
            "input_series": [
                {"series": name, "values": values} for name, values in series.items()
            ],
            "promql_expr_test": [*first, expect(f"{minute}m", once)],
        }
        path = tmp_path / "test.yml"  # JSON is YAML
        path.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [case]}))
        done = subprocess.run(
            [promtool, "test", "rules", str(path)],
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_the_instances_are_those_of_the_balancer(self) -> None:
        servers = re.findall(
            r"^    server \S+ (\S+)$", (SYSTEMD / "haproxy.cfg").read_text(), re.M
        )
        assert re.findall(r"- (127\S+:81\d\d)$", SETTINGS.read_text(), re.M) == servers


def test_every_metric_the_rules_name_is_shown(instances: Instances) -> None:
    connection = instances[0].connect()
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        connection.request("GET", "/metrics", headers=headers)
        text = connection.getresponse().read().decode()
    named = set(re.findall(r"\bintern_decision_\w+", RULES.read_text()))
    assert named
    assert named <= set(re.findall(r"^(intern_decision_\w+)", text, re.M))


class TestARealPrometheus:
    def test_it_scrapes_every_instance_with_the_bearer(
        self, prometheus: Prometheus, instances: Instances
    ) -> None:
        up = {address(instance): "up" for instance in instances}
        wait_until(lambda: prometheus.health() == up, str(up))
        prometheus.wait_for('intern_decision_engine_state{state="ok"}', 1, 1)

    def test_its_sums_are_what_was_asked(
        self, prometheus: Prometheus, instances: Instances
    ) -> None:
        for instance, count in zip(instances, (1, 3), strict=True):
            for _ in range(count):
                assert instance.ask("/decide", BODY)[0] == 200
        done = 'intern_decision_requests_total{route="/decide",status="200"}'
        prometheus.wait_for(done, 1, 3)
        prometheus.wait_for("sum(intern_decision_scoring_seconds_count)", 4)
        prometheus.wait_for("count(intern_decision_build_info)", 2)

    def test_every_rule_can_be_evaluated_and_none_fires_when_all_is_well(
        self, prometheus: Prometheus
    ) -> None:
        def rules() -> list[dict[str, Any]]:
            groups = prometheus.ask("/api/v1/rules")["groups"]
            return [rule for group in groups for rule in group["rules"]]

        wait_until(lambda: all(rule["health"] == "ok" for rule in rules()), "health")
        assert {rule["name"] for rule in rules()} == set(ALERTS)
        # No HAProxy stands in front of these two.
        assert prometheus.firing() <= {("BalancerDown", "127.0.0.1:8404")}

    def test_a_lost_engine_is_seen(
        self, prometheus: Prometheus, instances: Instances
    ) -> None:
        lost, other = instances
        lost.process.send_signal(LOSE)
        wait_until(lambda: lost.ask("/decide", BODY)[0] == 503, "lost")
        prometheus.wait_for('intern_decision_engine_state{state="engine_failed"}', 0, 1)
        assert other.ask("/decide", BODY)[0] == 200


def test_engines_that_are_lost_again_and_again_are_told(tmp_path: Path) -> None:
    """Each process is gone two seconds later, between two scrapes."""
    find_tool("prometheus", "prometheus")
    started = [start_instance(tmp_path / "0")]
    try:
        started[0].wait_until_ready()
        where = address(started[0])
        told = ("InstanceRestarts", where)
        settings = write_settings(tmp_path, (where, "127.0.0.1:9"))
        with run_prometheus(settings) as prometheus:
            for number in (1, 2):
                wait_until(lambda: prometheus.health().get(where) == "up", "scraped")
                assert told not in prometheus.firing()
                lose(started[-1])
                wait_until(lambda: prometheus.health()[where] != "up", "gone")
                port = where.rpartition(":")[2]
                started.append(start_instance(tmp_path / str(number), PORT=port))
                started[-1].wait_until_ready()
            wait_until(lambda: told in prometheus.firing(), "InstanceRestarts")
    finally:
        started[-1].process.kill()
        started[-1].process.wait()


def lose(instance: DemoServer) -> None:
    """Let the instance lose its engine, and with it end."""
    instance.process.send_signal(LOSE)
    wait_until(lambda: instance.ask("/decide", BODY)[0] == 503, "lost")
    assert instance.wait() == EXIT_ENGINE_LOST
