"""The closed list of errors is the contract's table plus the rulings'."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from intern_decision_serve import errors
from intern_decision_serve.errors import (
    DeviceAbsent,
    MethodNotAllowed,
    ServiceError,
    StartupRefused,
)

CONTRACT = {
    "Unauthorized": (401, "unauthorized"),
    "TooLarge": (413, "request_too_large"),
    "InvalidRequest": (422, "invalid_request"),
    "Busy": (429, "busy"),
    "OutOfMemory": (503, "out_of_memory"),
    "ScoringFailed": (500, "scoring_failed"),
}
RULINGS = {
    "BadRequest": (400, "bad_request"),
    "NotFound": (404, "not_found"),
    "MethodNotAllowed": (405, "method_not_allowed"),
    "RequestTimeout": (408, "request_timeout"),
    "UriTooLong": (414, "uri_too_long"),
    "UnsupportedEncoding": (415, "unsupported_encoding"),
    "HeadersTooLarge": (431, "headers_too_large"),
    "NotImplementedMethod": (501, "not_implemented"),
    "ShuttingDown": (503, "shutting_down"),
    "EngineFailed": (503, "engine_failed"),
    "VersionNotSupported": (505, "http_version_not_supported"),
}
CLASSES: dict[str, Any] = dict(inspect.getmembers(errors, inspect.isclass))


def make(name: str) -> ServiceError:
    if name == "MethodNotAllowed":
        return MethodNotAllowed("said", allow="POST")
    made = CLASSES[name]("said")
    assert isinstance(made, ServiceError)
    return made


@pytest.mark.parametrize(("name", "row"), (CONTRACT | RULINGS).items())
def test_each_error_has_its_status_and_code(name: str, row: tuple[int, str]) -> None:
    error = make(name)
    assert (error.status, error.code) == row
    assert (error.message, str(error)) == ("said", "said")
    waits = errors.RESTART_SECONDS if name == "EngineFailed" else None
    assert error.retry_after == waits


def test_the_list_is_closed() -> None:
    listed = {
        name
        for name, found in CLASSES.items()
        if issubclass(found, ServiceError) and found is not ServiceError
    }
    assert listed == CONTRACT.keys() | RULINGS.keys()


def test_no_two_errors_share_a_code() -> None:
    codes = [code for _, code in (CONTRACT | RULINGS).values()]
    assert len(set(codes)) == len(codes)


def test_retry_after_travels_with_the_error() -> None:
    assert CLASSES["Busy"]("said", retry_after=3).retry_after == 3


def test_a_method_error_lists_the_methods_of_its_path() -> None:
    assert MethodNotAllowed("said", allow="GET, HEAD").allow == "GET, HEAD"


def test_a_refused_start_is_never_an_answer() -> None:
    assert not issubclass(StartupRefused, ServiceError)
    assert not issubclass(StartupRefused, ValueError)


@pytest.mark.parametrize(
    ("refused", "status"), [(StartupRefused, 78), (DeviceAbsent, 75)]
)
def test_each_refusal_has_its_exit_status(
    refused: type[StartupRefused], status: int
) -> None:
    assert refused("why").exit_status == status


def test_the_exit_statuses_are_the_rulings() -> None:
    assert errors.EXIT_REFUSED == 78
    assert errors.EXIT_DEVICE_ABSENT == 75
    assert errors.EXIT_ENGINE_LOST == 70


def test_everything_defined_is_public() -> None:
    assert CLASSES.keys() - {"ClassVar"} <= set(errors.__all__)
