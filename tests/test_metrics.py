"""What Prometheus scrapes: every count and state, nothing of a client's text."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from instances import SleepingEngine
from packaging_tools import find_tool
from prometheus_client.parser import text_string_to_metric_families

from intern_decision_serve import __version__, errors
from intern_decision_serve.accesslog import AccessLog, Record
from intern_decision_serve.config import load_config
from intern_decision_serve.errors import EngineFailed, OutOfMemory, ServiceError
from intern_decision_serve.lifecycle import Service
from intern_decision_serve.metrics import BUCKETS, CONTENT_TYPE, ROUTES, Tally
from intern_decision_serve.pins import FAMILY

TOKEN = "t" * 40
SECRET = "only-in-the-prompt"
REQUEST_ID = "only-in-the-request-id"
PINS = FAMILY["Intern-Decision-4B"]
DECISION = {
    "id": "only-in-the-decision-id",
    "question": "q",
    "options": [{"id": "a", "description": ""}, {"id": "b", "description": ""}],
}
BODY = {"state": SECRET, **DECISION}


class Engine(SleepingEngine):
    """Fails with `failure` when it is set."""

    failure: Exception | None = None

    def score(self, request: Any, prepared: Any = None) -> tuple[dict[str, Any], str]:
        if self.failure is not None:
            raise self.failure
        return super().score(request, prepared)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def service(engine: Engine) -> Iterator[Service]:
    """A real server over the engine that sleeps, on a free port."""
    environ = {
        "INTERN_DECISION_API_TOKEN": TOKEN,
        "INTERN_DECISION_PORT": "0",
        "INTERN_DECISION_MAX_QUEUE": "3",
    }
    service = Service.build(load_config(environ), PINS, lambda: engine)
    service.worker.start()
    assert service.worker.ready.wait(20)
    service.serve()
    yield service
    service.close()
    service.worker.stop()
    assert service.worker.join(20)


class Client:
    """Keep-alive requests to one service, with the bearer unless told otherwise."""

    def __init__(self, service: Service) -> None:
        address = service.server.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(address, timeout=20)

    def ask(
        self, method: str, path: str, body: object = None, token: str = TOKEN
    ) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "X-Request-Id": REQUEST_ID}
        self._connection.request(method, path, data, headers)
        answer = self._connection.getresponse()
        self.content_type = answer.getheader("Content-Type")
        return answer.status, answer.read()

    def post(self, path: str = "/decide", body: object = BODY) -> int:
        return self.ask("POST", path, body)[0]

    def scrape(self) -> str:
        status, text = self.ask("GET", "/metrics")
        assert (status, self.content_type) == (200, CONTENT_TYPE)
        return text.decode()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    client = Client(service)
    yield client
    client._connection.close()


def wait_for(service: Service, code: str) -> None:
    """Block until one ended so: an answer that closes may be read before its count."""
    deadline = time.monotonic() + 20
    while code not in service.access_log.outcomes:
        assert time.monotonic() < deadline, f"no request ended with {code}"
        time.sleep(0.001)


def read(text: str) -> dict[tuple[str, ...], float]:
    """Every sample: (name, label values in the order of their names) -> value."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def samples(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one name that are not zero, by label values."""
    full = f"intern_decision_{name}"
    return {key[1:]: n for key, n in read(text).items() if key[0] == full and n}


def value(text: str, name: str) -> float:
    """A sample without labels."""
    return read(text)[(f"intern_decision_{name}",)]


class TestTheRoute:
    def test_it_needs_the_bearer(self, client: Client) -> None:
        status, body = client.ask("GET", "/metrics", token="wrong")
        assert (status, json.loads(body)["error"]["code"]) == (401, "unauthorized")

    def test_head_is_answered_where_get_is(self, client: Client) -> None:
        assert client.ask("HEAD", "/metrics") == (200, b"")

    def test_post_is_refused(self, client: Client) -> None:
        assert client.post("/metrics") == 405

    def test_every_route_of_the_api_has_a_label_of_its_own(
        self, service: Service
    ) -> None:
        api = service.api
        assert set(ROUTES) == {*api.posts, *api.gets, *api.open_gets}

    def test_the_openapi_document_lists_it(self, client: Client) -> None:
        document = json.loads(client.ask("GET", "/openapi.json")[1])
        assert set(document["paths"]) == set(ROUTES)

    def test_it_is_served_once_the_engine_is_lost(
        self, client: Client, service: Service, engine: Engine
    ) -> None:
        engine.failure = EngineFailed("lost")
        assert client.post() == 503
        wait_for(service, "engine_failed")
        text = client.scrape()
        assert samples(text, "engine_state") == {("engine_failed",): 1}
        assert samples(text, "refused_total") == {("engine_failed",): 1}
        assert value(text, "accepting") == 0

    def test_it_is_served_while_stopping(
        self, client: Client, service: Service
    ) -> None:
        service.worker.stop()
        assert client.post() == 503
        wait_for(service, "shutting_down")
        text = client.scrape()
        assert samples(text, "engine_state") == {("stopping",): 1}
        assert samples(text, "refused_total") == {("shutting_down",): 1}


class TestWhatIsCounted:
    def test_a_scored_request_is_counted_once_everywhere(self, client: Client) -> None:
        assert client.post() == 200
        text = client.scrape()
        assert samples(text, "requests_total") == {("/decide", "200"): 1}
        assert samples(text, "refused_total") == {}
        assert value(text, "calls_total") == 1
        assert value(text, "input_tokens_total") > 0
        assert value(text, "queue_seconds_count") == 1
        assert value(text, "scoring_seconds_count") == 1

    def test_calls_and_tokens_are_those_of_all_calls(self, client: Client) -> None:
        assert client.post() == 200
        one = value(client.scrape(), "input_tokens_total")
        assert client.post(body={**BODY, "orderings": "rotations"}) == 200
        text = client.scrape()
        assert value(text, "calls_total") == 3
        assert value(text, "input_tokens_total") == 3 * one
        assert value(text, "scoring_seconds_count") == 2

    def test_a_refusal_is_counted_by_its_code(
        self, client: Client, service: Service
    ) -> None:
        assert client.post(body={**BODY, "question": ""}) == 422
        assert client.post("/nowhere") == 404
        wait_for(service, "not_found")
        assert client.ask("DELETE", "/decide")[0] == 405
        text = client.scrape()
        assert samples(text, "refused_total") == {
            ("invalid_request",): 1,
            ("not_found",): 1,
            ("method_not_allowed",): 1,
        }
        assert samples(text, "requests_total") == {
            ("/decide", "405"): 1,
            ("/decide", "422"): 1,
            ("other", "404"): 1,
        }
        assert value(text, "queue_seconds_count") == 0

    def test_a_failed_call_counts_as_a_call_but_not_as_scored(
        self, client: Client, engine: Engine
    ) -> None:
        engine.failure = OutOfMemory("out of memory")
        assert client.post() == 503
        text = client.scrape()
        assert samples(text, "refused_total") == {("out_of_memory",): 1}
        assert value(text, "calls_total") == 1
        assert value(text, "scoring_seconds_count") == 0

    def test_unknown_paths_share_one_label(self, client: Client) -> None:
        for path in ("/decide/", "/v1/systemonex", "/" + "x" * 900):
            assert client.ask("GET", path)[0] == 404
        text = client.scrape()
        assert samples(text, "requests_total") == {("other", "404"): 3}

    def test_admitted_and_slots_show_the_queue(
        self, client: Client, service: Service
    ) -> None:
        service.admission.enter()
        text = client.scrape()
        assert value(text, "admitted_requests") == 1
        assert value(text, "slots") == 3
        assert value(text, "accepting") == 1
        service.admission.enter()
        service.admission.enter()
        assert client.post() == 429
        wait_for(service, "busy")
        text = client.scrape()
        assert value(text, "accepting") == 0
        assert samples(text, "engine_state") == {("ok",): 1}
        assert samples(text, "refused_total") == {("busy",): 1}

    def test_skipped_clients_are_shown(self, client: Client, service: Service) -> None:
        service.worker.skipped = 7
        assert value(client.scrape(), "skipped_requests_total") == 7

    def test_memory_is_in_bytes(self, client: Client) -> None:
        assert samples(client.scrape(), "memory_bytes") == {
            ("baseline",): 1 * 2**20,
            ("allocated",): 2 * 2**20,
            ("reserved",): 3 * 2**20,
            ("peak",): 4 * 2**20,
        }

    def test_on_the_cpu_no_memory_is_shown(
        self, client: Client, service: Service
    ) -> None:
        service.worker.memory = {"baseline_mib": None, "allocated_mib": None}
        assert samples(client.scrape(), "memory_bytes") == {}

    def test_version_model_and_kernels_are_labels(self, client: Client) -> None:
        text = client.scrape()
        assert (
            'intern_decision_build_info{device="none",model="Intern-Decision-4B",'
            f'revision="{"0" * 40}",torch="none",transformers="None",'
            f'version="{__version__}"}} 1.0\n'
        ) in text
        assert (
            'intern_decision_kernel_info{fast="true",'
            'implementation="causal_conv1d.interface.causal_conv1d_fn",'
            'kernel="causal_conv1d_fn",package="causal-conv1d",version="1.7.0"} 1.0\n'
        ) in text

    def test_every_series_that_can_be_known_starts_at_zero(
        self, client: Client
    ) -> None:
        shown = read(client.scrape())
        codes = {kind.code for kind in (ServiceError, *ServiceError.__subclasses__())}
        codes |= {getattr(errors, name).code for name in ("Busy", "EngineFailed")}
        for code in codes:
            assert shown["intern_decision_refused_total", code] == 0
        for route in ROUTES:
            assert shown["intern_decision_requests_total", route, "200"] == 0

    def test_the_process_is_shown(self, client: Client) -> None:
        assert read(client.scrape())[("process_resident_memory_bytes",)] > 0


class TestWhatIsNot:
    def test_no_prompt_id_or_token_is_ever_shown(self, client: Client) -> None:
        assert client.post() == 200
        shared = {"state": SECRET, "decisions": [DECISION]}
        assert client.post("/decide/shared", shared) == 200
        assert client.post("/" + SECRET) == 404
        assert client.post(body={**BODY, SECRET: SECRET, "workload": SECRET}) == 422
        text = client.scrape()
        for secret in (SECRET, REQUEST_ID, str(DECISION["id"]), TOKEN):
            assert secret not in text

    def test_hostile_requests_add_no_series_but_statuses(self, client: Client) -> None:
        before = set(read(client.scrape()))
        for number in range(20):
            client.ask("GET", f"/{number}")
            client.post(body={"state": str(number)})
        assert set(read(client.scrape())) - before == {
            ("intern_decision_requests_total", "other", "404"),
            ("intern_decision_requests_total", "/decide", "422"),
        }

    def test_two_services_of_one_process_share_nothing(self, client: Client) -> None:
        from prometheus_client import REGISTRY

        assert client.post() == 200
        names = {family.name for family in REGISTRY.collect()}
        assert not [name for name in names if name.startswith("intern_decision")]

    def test_the_engine_is_never_asked(self, client: Client, engine: Engine) -> None:
        engine.memory = engine.score = None  # type: ignore[assignment]
        assert client.scrape()


class TestTheHistograms:
    def record(self, **fields: Any) -> Record:
        return Record(path="/decide", status=200, code="ok", calls=1, **fields)

    def counts(self, tally: Tally, name: str) -> dict[str, float]:
        [family] = [f for f in tally.families() if f.name.endswith(name)]
        return {
            sample.labels["le"]: sample.value
            for sample in family.samples
            if sample.name.endswith("_bucket")
        }

    @pytest.mark.parametrize(
        ("seconds", "first"),
        [(0.0, "0.01"), (0.01, "0.01"), (0.0101, "0.02"), (60.0, "60.0"), (61, "+Inf")],
    )
    def test_a_time_is_in_every_bucket_from_its_own_up(
        self, seconds: float, first: str
    ) -> None:
        tally = Tally()
        tally.add(self.record(scoring_seconds=seconds))
        counts = self.counts(tally, "scoring_seconds")
        assert list(counts) == [*(str(bound) for bound in BUCKETS), "+Inf"]
        assert next(bound for bound, count in counts.items() if count) == first
        assert counts["+Inf"] == 1
        assert sorted(counts.values()) == list(counts.values())

    def test_the_sums_are_the_seconds_observed(self) -> None:
        tally = Tally()
        for seconds in (0.25, 0.5):
            tally.add(self.record(queued_seconds=seconds, scoring_seconds=2 * seconds))
        sums = {
            sample.name: sample.value
            for family in tally.families()
            for sample in family.samples
            if sample.name.endswith("_sum")
        }
        assert sums == {
            "intern_decision_queue_seconds_sum": 0.75,
            "intern_decision_scoring_seconds_sum": 1.5,
        }

    def test_the_bounds_reach_from_10_ms_to_a_minute(self) -> None:
        assert (BUCKETS[0], BUCKETS[-1]) == (0.01, 60.0)
        assert sorted(set(BUCKETS)) == list(BUCKETS)

    def test_the_access_log_observes_every_request_once_summed_up_or_not(self) -> None:
        seen: list[Record] = []
        log = AccessLog(observe=seen.append)
        records = [Record(status=401, code="unauthorized") for _ in range(50)]
        for record in records:
            log.write(record)
        assert seen == records


def test_promtool_finds_nothing_to_say(client: Client) -> None:
    promtool = find_tool("promtool", "prometheus")
    client.post()
    client.post("/nowhere")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=client.scrape(),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
