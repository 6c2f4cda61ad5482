"""openapi.json against the routes, the statuses, the errors and real answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from live import LiveService, serve

import intern_decision_serve
from intern_decision_serve import errors
from intern_decision_serve.health import ENDPOINTS

jsonschema = pytest.importorskip("jsonschema")

DOCUMENT: dict[str, Any] = json.loads(
    files("intern_decision_serve").joinpath("openapi.json").read_text("utf-8")
)
METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "trace")
OPERATIONS = [
    (path, method, item[method])
    for path, item in DOCUMENT["paths"].items()
    for method in METHODS
    if method in item
]
OPTIONS = [{"id": "a", "description": "first"}, {"id": "b", "description": ""}]
DECISION = {"id": "d", "question": "What?", "options": OPTIONS}
AVERAGED = {**DECISION, "id": "e", "orderings": "all"}
QUESTIONS = {
    "c": {"type": "choice", "instructions": "?", "criteria": {"x": "1", "y": None}},
    "s": {"type": "score", "instructions": None, "criteria": ["low", "high"]},
    "n": {"type": "noul"},
}
GOOD = [
    ("/decide", {"state": "s", **DECISION}),
    ("/decide", {"state": ["s"], **AVERAGED, "workload": None}),
    ("/decide/shared", {"state": {"k": 1}, "decisions": [DECISION, AVERAGED]}),
    ("/v1/systemone", {"state": "s", "model": 7, "questions": QUESTIONS}),
]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveService]:
    with serve() as service:
        yield service


def resolve(node: Any) -> Any:
    """A node of the document, its reference followed."""
    while isinstance(node, dict) and "$ref" in node:
        found: Any = DOCUMENT
        for name in node["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        node = found
    return node


def check(instance: Any, schema: dict[str, Any]) -> None:
    """Validate against a schema of the document, its references included."""
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(whole).validate(instance)


def schema_of(operation: dict[str, Any], status: int) -> dict[str, Any]:
    """The JSON schema of an operation's answer with this status."""
    responses = operation["responses"]
    response = resolve(responses.get(str(status), responses["default"]))
    schema: dict[str, Any] = response["content"]["application/json"]["schema"]
    return schema


def codes_in(node: Any) -> set[str]:
    """Every error code that a schema names, references not followed."""
    if isinstance(node, list):
        return set().union(*map(codes_in, node))
    if not isinstance(node, dict):
        return set()
    found = (
        set(node["code"].get("enum", [node["code"].get("const")])) - {None}
        if (isinstance(node.get("code"), dict))
        else set()
    )
    return found.union(*map(codes_in, node.values()))


def all_errors() -> list[type[errors.ServiceError]]:
    """Every error a client can be told about."""
    return errors.ServiceError.__subclasses__()


class TestDocument:
    def test_version_is_the_packages(self) -> None:
        assert DOCUMENT["info"]["version"] == intern_decision_serve.__version__

    def test_every_reference_leads_somewhere(self) -> None:
        pending: list[Any] = [DOCUMENT]
        while pending:
            node = pending.pop()
            if isinstance(node, dict):
                assert resolve(node) is not None
                pending.extend(node.values())
            elif isinstance(node, list):
                pending.extend(node)

    def test_every_schema_is_a_schema(self) -> None:
        for schema in DOCUMENT["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)

    def test_operation_ids_are_unique(self) -> None:
        ids = [operation["operationId"] for _, _, operation in OPERATIONS]
        assert len(set(ids)) == len(ids)


class TestRoutes:
    def test_paths_are_those_served(self, live: LiveService) -> None:
        api = live.service.api
        served = {*api.posts, *api.gets, *api.open_gets}
        assert DOCUMENT["paths"].keys() == served
        assert served >= set(ENDPOINTS)

    @pytest.mark.parametrize("path", DOCUMENT["paths"])
    def test_methods_are_those_allowed(self, live: LiveService, path: str) -> None:
        listed = [name.upper() for p, name, _ in OPERATIONS if p == path]
        assert live.service.api.allow(path) == ", ".join(listed)
        other = "PUT"
        status, answer, headers = live.ask(path, method=other)
        assert (status, headers["Allow"]) == (405, ", ".join(listed))
        check(answer, schema_of(DOCUMENT["paths"][path][listed[0].lower()], 405))

    @pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
    def test_security_is_what_the_server_asks_for(
        self, live: LiveService, path: str, method: str, operation: dict[str, Any]
    ) -> None:
        is_open = operation.get("security", DOCUMENT["security"]) == []
        body = {} if method == "post" else None
        status, answer, _ = live.ask(path, body, method=method.upper(), headers={})
        assert (status == 401) is not is_open
        assert ("401" in operation["responses"]) is not is_open
        if method == "post":
            check(answer, schema_of(operation, 401))

    def test_a_head_has_the_headers_of_a_get_and_no_body(
        self, live: LiveService
    ) -> None:
        status, body, headers = live.ask("/openapi.json", method="HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 0

    def test_the_document_is_served_as_it_ships(self, live: LiveService) -> None:
        assert live.ask("/openapi.json", headers={})[1] == DOCUMENT


class TestErrors:
    @pytest.mark.parametrize("path", ENDPOINTS)
    def test_a_post_lists_every_status_with_exactly_its_codes(self, path: str) -> None:
        responses = DOCUMENT["paths"][path]["post"]["responses"]
        listed = {
            int(status): codes_in(resolve(response))
            for status, response in responses.items()
            if status not in ("200", "default")
        }
        known: dict[int, set[str]] = {}
        for error in all_errors():
            known.setdefault(error.status, set()).add(error.code)
        assert listed == {status: known[status] for status in listed}
        rest = set().union(*(known[status] for status in known if status not in listed))
        refused = codes_in(resolve(responses["default"]))
        assert rest <= refused

    def test_the_envelope_lists_every_code(self) -> None:
        error = DOCUMENT["components"]["schemas"]["Error"]
        known = {error.code for error in all_errors()}
        assert codes_in(error) == known

    @pytest.mark.parametrize(
        ("body", "headers", "expected"),
        [
            ({"state": ""}, {}, 422),
            ({"state": "s"}, {"Content-Encoding": "br"}, 415),
            ({"state": "s"}, {"Content-Length": "+9"}, 400),
            ({"state": "x" * 5000}, {}, 413),
        ],
    )
    @pytest.mark.parametrize("path", ENDPOINTS)
    def test_a_refusal_fits_its_response(
        self, path: str, body: object, headers: dict[str, str], expected: int
    ) -> None:
        with serve(max_body_bytes=4096) as live:
            given = {"Authorization": f"Bearer {live.token}", **headers}
            status, answer, answered = live.ask(path, body, headers=given)
        operation = DOCUMENT["paths"][path]["post"]
        assert status == expected
        assert str(status) in operation["responses"]
        check(answer, schema_of(operation, status))
        check_headers(resolve(operation["responses"][str(status)]), answered)

    def test_a_busy_answer_fits_its_response(self) -> None:
        with serve(max_queue=1) as live:
            live.service.admission.enter()
            status, answer, headers = live.ask(*GOOD[0])
            live.service.admission.leave()
        operation = DOCUMENT["paths"]["/decide"]["post"]
        assert status == 429
        check(answer, schema_of(operation, 429))
        check_headers(resolve(operation["responses"]["429"]), headers)
        assert int(headers["Retry-After"]) >= 1


def check_headers(response: dict[str, Any], headers: Any) -> None:
    """Every header that the document requires is there and has its shape."""
    for name, node in response["headers"].items():
        header = resolve(node)
        if header.get("required"):
            check(headers[name], header["schema"])


class TestAnswers:
    @pytest.mark.parametrize(("path", "body"), GOOD)
    def test_a_good_request_and_its_answer_fit(
        self, live: LiveService, path: str, body: dict[str, Any]
    ) -> None:
        operation = DOCUMENT["paths"][path]["post"]
        check(body, operation["requestBody"]["content"]["application/json"]["schema"])
        status, answer, headers = live.ask(path, body)
        assert status == 200
        check(answer, schema_of(operation, 200))
        check_headers(operation["responses"]["200"], headers)

    @pytest.mark.parametrize("path", ["/health", "/v1/models"])
    def test_an_open_documents_answer_fits(self, live: LiveService, path: str) -> None:
        status, answer, headers = live.ask(path)
        operation = DOCUMENT["paths"][path]["get"]
        assert status == 200
        check(answer, schema_of(operation, 200))
        check_headers(operation["responses"]["200"], headers)

    def test_every_field_of_health_is_described(self, live: LiveService) -> None:
        described = DOCUMENT["components"]["schemas"]["Health"]["properties"]
        health = live.ask("/health")[1]
        assert list(health) == list(described)
        for name in ("systemone", "limits", "queue", "model"):
            assert set(health[name]) == set(resolve(described[name])["properties"])

    @pytest.mark.parametrize(
        ("schema", "number", "result"),
        [
            ("DecideResult", 0, lambda answer: answer),
            ("Averaged", 1, lambda answer: answer),
            ("Result", 2, lambda answer: answer["results"][0]),
            ("SharedResponse", 2, lambda answer: answer),
            ("SystemOneResponse", 3, lambda answer: answer),
        ],
    )
    def test_every_field_of_a_result_is_described(
        self, live: LiveService, schema: str, number: int, result: Any
    ) -> None:
        fields = set(result(live.ask(*GOOD[number])[1]))
        extra = {"timing", "calibration", "backend"}  # the engine's own ride along
        node = DOCUMENT["components"]["schemas"][schema]
        parts = [resolve(part) for part in node.get("allOf", [node])]
        described = set().union(*(part["properties"] for part in parts))
        required = set().union(*(part["required"] for part in parts))
        assert required <= fields
        assert fields - described <= (extra if schema == "SystemOneResponse" else set())

    @pytest.mark.parametrize(
        ("path", "change"),
        [
            ("/decide", {"id": ""}),
            ("/decide", {"state": []}),
            ("/decide", {"options": OPTIONS[:1]}),
            ("/decide", {"orderings": "ALL"}),
            ("/decide", {"workload": "w"}),
            ("/v1/systemone", {"questions": {}}),
            ("/v1/systemone", {"images": None}),
            ("/v1/systemone", {"questions": {"q": {"type": "box"}}}),
            ("/v1/systemone", {"questions": {"q": {"type": "choice"}}}),
        ],
    )
    def test_what_a_request_schema_refuses_is_a_422(
        self, live: LiveService, path: str, change: dict[str, Any]
    ) -> None:
        body = {**dict(GOOD)[path], **change}
        operation = DOCUMENT["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        with pytest.raises(jsonschema.ValidationError):
            check(body, schema)
        assert live.ask(path, body)[0] == 422
