"""One request, one answer: the order of the checks and the bytes of the reply.

    head -> bearer (POST) -> path -> open? -> slot -> framing -> body -> Api -> answer

Every failure becomes bytes in `refuse`, nowhere else. It must never read a body it has
not admitted, nor keep a connection whose input it did not read to the end.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import time
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol

from .accesslog import CLIENT_GONE, AccessLog, Record
from .admission import Admission
from .auth import check_bearer
from .connection import Connection
from .decoding import check_codings, decode_body
from .errors import (
    Busy,
    EngineFailed,
    MethodNotAllowed,
    NotFound,
    NotImplementedMethod,
    ScoringFailed,
    ServiceError,
    ShuttingDown,
)
from .framing import RequestHead, body_length
from .handlers import Api, PostHandler, Reply, Trace
from .jobs import ClientGone
from .pacing import Pace

__all__ = ["Edge", "Exchange", "refuse"]

_log = logging.getLogger(__name__)

_METHODS = frozenset("GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT".split())
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Edge(Protocol):
    """What an exchange needs of the server it belongs to."""

    token: str
    max_body_bytes: int
    admission: Admission
    access_log: AccessLog
    strangers: Pace
    refusals: Pace
    documents: Pace

    @property
    def api(self) -> Api: ...

    def check_open(self) -> None:
        """Raise ShuttingDown or EngineFailed when no new work is taken."""

    def hurry_slowest(self) -> None:
        """End the slowest body or answer that holds a slot, if it is slow indeed."""


def refuse(error: ServiceError) -> Reply:
    """The one place where an error becomes an answer."""
    headers = []
    if error.retry_after is not None:
        headers.append(("Retry-After", str(error.retry_after)))
    if isinstance(error, MethodNotAllowed):
        headers.append(("Allow", error.allow))
    if error.status == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    envelope = {"error": {"code": error.code, "message": error.message}}
    return Reply.document(
        error.status, envelope, headers=tuple(headers), code=error.code
    )


@dataclass(slots=True)
class _Progress:
    """How far the request came; decides its pace, the slot, the connection's fate."""

    is_stranger: bool = True  # no right bearer, so far
    admitted: bool = False
    body_pending: bool = False  # declared, and not read to its end


class Exchange:
    """One turn on a connection, in its handler thread."""

    def __init__(self, edge: Edge, connection: Connection) -> None:
        self._edge = edge
        self._connection = connection
        self._progress = _Progress()
        self._trace = Trace()
        self._head: RequestHead | None = None
        self._request_id = os.urandom(8).hex()

    def run(self) -> bool:
        """Answer the next request; whether the connection serves another."""
        try:
            self._head = self._connection.read_head()
            if self._head is None:
                return False
            self._request_id = _request_id(self._head) or self._request_id
            reply = self._answer(self._head)
        except ServiceError as error:
            reply = refuse(error)
        except ClientGone:
            self._record(CLIENT_GONE, "client_gone", 0)
            self._leave()
            return False
        except Exception:
            _log.exception("request %s met an unexpected failure", self._request_id)
            reply = refuse(ScoringFailed("the request failed inside the server"))
        try:
            return self._send(reply)
        finally:
            self._leave()

    def _answer(self, head: RequestHead) -> Reply:
        self._progress.body_pending = _declares_body(head)
        if head.method == "POST":
            self._check_bearer(head)
        api, path = self._edge.api, head.path
        allow = api.allow(path)
        if allow is None:
            raise NotFound("no such path")
        if head.method not in allow.split(", "):
            if head.method not in _METHODS:
                raise NotImplementedMethod("no such method")
            raise MethodNotAllowed(f"this path takes {allow}", allow=allow)
        if head.method == "POST":
            return self._post(head, api.posts[path])
        if path in api.gets:
            self._check_bearer(head)
            return api.gets[path]()
        return api.open_gets[path]()

    def _check_bearer(self, head: RequestHead) -> None:
        check_bearer(head.values(b"authorization"), self._edge.token)
        self._progress.is_stranger = False

    def _post(self, head: RequestHead, handler: PostHandler) -> Reply:
        self._edge.check_open()
        self._enter()
        limit = self._edge.max_body_bytes
        length = body_length(head, limit)
        codings = head.tokens(b"content-encoding")
        check_codings(codings)
        if head.expects_continue and length != 0 and not self._connection.has_input:
            self._connection.send(_CONTINUE)
        body = self._connection.read_body(length, limit)
        self._progress.body_pending = False
        body = decode_body(body, codings, limit)
        return handler(body, self._connection.is_gone, self._trace)

    def _enter(self) -> None:
        try:
            self._edge.admission.enter()
        except Busy:
            self._edge.hurry_slowest()
            raise
        self._progress.admitted = True

    def _pace(self, reply: Reply) -> None:
        """Wait for this answer's turn beside a running call; scored ones go at once.

        Strangers have a rate of their own: their flood delays nobody with a token.
        """
        edge, progress = self._edge, self._progress
        if reply.status < 400 or reply.status == 503:
            if not progress.admitted:
                edge.documents.wait()
        elif progress.is_stranger:
            edge.strangers.wait()
        else:
            edge.refusals.wait()

    def _keeps(self, reply: Reply) -> bool:
        """Whether the connection can serve on: all input read, and a service left."""
        head, ending = self._head, reply.code in (ShuttingDown.code, EngineFailed.code)
        return (
            head is not None
            and head.keep_alive
            and not self._progress.body_pending
            and not ending
        )

    def _send(self, reply: Reply) -> bool:
        head = self._head
        self._pace(reply)
        keep = self._keeps(reply)
        data = self._render(reply, keep, is_head=bool(head and head.method == "HEAD"))
        sent = self._connection.send(data)
        self._leave()  # at once: the client may be back before the line is written
        self._record(reply.status, reply.code or "ok", len(data) if sent else 0)
        if sent and not keep:
            self._connection.linger()
        return sent and keep

    def _render(self, reply: Reply, keep: bool, *, is_head: bool) -> bytes:
        """Head and body in one piece: two writes would cost a delayed ACK."""
        lines = [
            f"HTTP/1.1 {reply.status} {http.client.responses.get(reply.status, '')}",
            "Server: intern-decision-serve",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {reply.content_type}",
            f"Content-Length: {len(reply.body)}",
            f"X-Request-Id: {self._request_id}",
            f"x-typesafe-request-id: {self._request_id}",
            *(f"{name}: {value}" for name, value in reply.headers),
            f"Connection: {'keep-alive' if keep else 'close'}",
        ]
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        return head if is_head else head + reply.body

    def _leave(self) -> None:
        """Give the slot back, once, after the last byte of the answer."""
        if self._progress.admitted:
            self._progress.admitted = False
            self._edge.admission.leave()

    def _record(self, status: int, code: str, sent_bytes: int) -> None:
        head, trace = self._head, self._trace
        self._edge.access_log.write(
            Record(
                request_id=self._request_id,
                method=head.method if head else "-",
                path=head.path if head else "-",
                status=status,
                code=code,
                total_seconds=time.monotonic() - self._connection.started_at,
                queued_seconds=trace.queued_seconds,
                scoring_seconds=trace.scoring_seconds,
                calls=trace.calls,
                input_tokens=trace.input_tokens,
                sent_bytes=sent_bytes,
            )
        )


def _declares_body(head: RequestHead) -> bool:
    """Whether bytes may follow that are no request: also where the framing is wrong."""
    lengths = head.values(b"content-length")
    return bool(head.values(b"transfer-encoding")) or lengths not in ([], [b"0"])


def _request_id(head: RequestHead) -> str | None:
    """The caller's own id, when it sent one that is short and plain."""
    for name in (b"x-typesafe-request-id", b"x-request-id"):
        for value in head.values(name):
            if _PLAIN_ID.fullmatch(value):
                return value.decode()
    return None
