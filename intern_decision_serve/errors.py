"""The closed list of errors: what a client can be told, and why a start is refused.

A `ServiceError` becomes an HTTP answer in exactly one place (`server`). A
`StartupRefused` never reaches HTTP: `cli` prints its one line and exits with its
status. This module imports nothing of ours and never formats a response.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "EXIT_DEVICE_ABSENT",
    "EXIT_ENGINE_LOST",
    "EXIT_REFUSED",
    "RESTART_SECONDS",
    "BadRequest",
    "Busy",
    "DeviceAbsent",
    "EngineFailed",
    "HeadersTooLarge",
    "InvalidRequest",
    "MethodNotAllowed",
    "NotFound",
    "NotImplementedMethod",
    "OutOfMemory",
    "RequestTimeout",
    "ScoringFailed",
    "ServiceError",
    "ShuttingDown",
    "StartupRefused",
    "TooLarge",
    "Unauthorized",
    "UnsupportedEncoding",
    "UriTooLong",
    "VersionNotSupported",
]

EXIT_REFUSED = 78  # settings, pins or files: restarting cannot help
EXIT_DEVICE_ABSENT = 75  # the device is not there yet: restart later
EXIT_ENGINE_LOST = 70  # the CUDA context is gone: only a new process helps

RESTART_SECONDS = 60  # Retry-After of what only a restart and its warm-up mend


class ServiceError(Exception):
    """Base of every failure a client is told about, as `{error: {code, message}}`.

    `retry_after` is whole seconds, or None where the same request would fail again.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "scoring_failed"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class BadRequest(ServiceError):
    """Raised when the bytes of a request do not frame one HTTP request."""

    status, code = 400, "bad_request"


class Unauthorized(ServiceError):
    """Raised when a POST lacks the right bearer (INV-6)."""

    status, code = 401, "unauthorized"


class NotFound(ServiceError):
    """Raised when the raw target is none of the exact paths."""

    status, code = 404, "not_found"


class MethodNotAllowed(ServiceError):
    """Raised when a known path is asked with another method; `allow` lists its own."""

    status, code = 405, "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class RequestTimeout(ServiceError):
    """Raised when a request did not arrive whole before its deadline."""

    status, code = 408, "request_timeout"


class TooLarge(ServiceError):
    """Raised when a body is over MAX_BODY_BYTES, as sent or as decoded."""

    status, code = 413, "request_too_large"


class UriTooLong(ServiceError):
    """Raised when the request line is over the limit."""

    status, code = 414, "uri_too_long"


class UnsupportedEncoding(ServiceError):
    """Raised when Content-Encoding names a coding this server does not decode."""

    status, code = 415, "unsupported_encoding"


class InvalidRequest(ServiceError):
    """Raised for bad JSON or shape, a broken rule, or a model ValueError."""

    status, code = 422, "invalid_request"


class Busy(ServiceError):
    """Raised when MAX_QUEUE requests are already queued or scoring."""

    status, code = 429, "busy"


class HeadersTooLarge(ServiceError):
    """Raised when the header block is over the limit."""

    status, code = 431, "headers_too_large"


class ScoringFailed(ServiceError):
    """Raised for any other model failure, building the response included (INV-1)."""

    status, code = 500, "scoring_failed"


class NotImplementedMethod(ServiceError):
    """Raised for a method or transfer coding this server does not know."""

    status, code = 501, "not_implemented"


class OutOfMemory(ServiceError):
    """Raised when any call of a request ran out of CUDA memory (INV-4)."""

    status, code = 503, "out_of_memory"


class ShuttingDown(ServiceError):
    """Raised for new work while the server stops."""

    status, code = 503, "shutting_down"


class EngineFailed(ServiceError):
    """Raised for waiting and new work once the engine is lost; a restart mends it."""

    status, code = 503, "engine_failed"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after=RESTART_SECONDS)


class VersionNotSupported(ServiceError):
    """Raised for an HTTP version other than 1.0 and 1.1."""

    status, code = 505, "http_version_not_supported"


class StartupRefused(Exception):
    """Raised when a fail-closed startup check fails (INV-3); exits 78, no restart."""

    exit_status: ClassVar[int] = EXIT_REFUSED


class DeviceAbsent(StartupRefused):
    """Raised when the CUDA device is not there yet; exits 75, restart later."""

    exit_status = EXIT_DEVICE_ABSENT
