"""A bounded run of schemathesis: requests it derives from openapi.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from live import LiveService, serve

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

DOCUMENT = json.loads(
    files("intern_decision_serve").joinpath("openapi.json").read_text("utf-8")
)
KNOWN_METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT".split()
# Ids are unique within a decision or a request: no JSON schema can say so.
NOT_FOR_US = [positive_data_acceptance]
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveService]:
    with serve() as service:
        yield service


@schema.parametrize()
@hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_no_generated_request_breaks_the_document(case: Any, live: LiveService) -> None:
    if case.method.upper() not in KNOWN_METHODS:
        return  # 501, as RFC 9110 says of an unknown one; it expects 405
    case.call_and_validate(
        base_url=live.url,
        headers={"Authorization": f"Bearer {live.token}"},
        excluded_checks=NOT_FOR_US,
    )
