"""Limits: everything a server must refuse, and that it keeps answering afterwards.

The queue's part is in `queueing`, the memory's in `memory`. Refusals a check asked for
are counted as expected; the error envelope is checked on each of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from .contract import health_problems
from .findings import Findings
from .fitting import body_limit
from .invalid import invalid_requests
from .memory import check_memory
from .queueing import check_closed_clients, check_full_queue
from .refusals import message, refusal_problem
from .results import in_short, same_answer
from .samples import built_in_rows
from .session import Probe

__all__ = ["NAME", "TITLE", "measure"]

NAME = "limits"
TITLE = "Limits and refusals"

_PATHS = ("/decide", "/decide/shared", "/v1/systemone")
_PIECE = 65536
_MOST_SENT = 64 * 2**20  # a larger limit is not worth the time it takes to send


def measure(probe: Probe, findings: Findings) -> None:
    """Refusals first, then the queue, the memory, and the plain question again."""
    findings.conditions = (
        "One refusal per rule; the queue is filled with held requests."
    )
    body = built_in_rows()[0].request()
    before = probe.ask("/decide", body)
    _check_health(probe, findings)
    _check_token(probe, findings)
    _check_addresses(probe, findings)
    _check_body_size(probe, findings)
    _check_rules(probe, findings)
    check_full_queue(probe, findings)
    check_closed_clients(probe, findings)
    check_memory(probe, findings)
    after = probe.ask("/decide", body)
    findings.check(
        "the server keeps answering, and the same",
        same_answer(before, after),
        f"top {after['top']!r} before and after",
    )


def _check_health(probe: Probe, findings: Findings) -> None:
    health = probe.read_health()
    found = health_problems(health)
    seen = in_short(found) or f"{len(health)} fields"
    findings.check("/health is the contract's", not found, seen)


def _wrong_headers(token: str) -> Iterator[tuple[str, str | None]]:
    """Ways of not having the token, some of them close."""
    other = "y" if set(token) == {"x"} else "x"
    last = "y" if token[-1] == "x" else "x"
    yield "no token", None
    yield "a wrong token", f"Bearer {other * len(token)}"
    yield "another scheme", f"Basic {token}"
    yield "another last letter", f"Bearer {token[:-1]}{last}"
    yield "a letter more", f"Bearer {token}x"
    yield "a letter less", f"Bearer {token[:-1]}"


def _check_token(probe: Probe, findings: Findings) -> None:
    """401 for each way of not having the token, on each path; `/health` is open."""
    body = built_in_rows()[0].request()
    found = []
    headers = list(_wrong_headers(probe.token))
    for path in _PATHS:
        for name, header in headers:
            probe.progress.step(f"limits: {path} with {name}")
            answer = probe.client.post(
                path, body, authorization=header, expected=(401,)
            )
            problem = refusal_problem(answer, 401, "unauthorized")
            found += [f"{path} with {name}: {problem}"] if problem else []
    seen = in_short(found) or f"{len(headers) * len(_PATHS)} requests refused"
    findings.check("401 without the right token", not found, seen)
    answer = probe.client.get("/health")
    findings.check("/health needs no token", answer.status == 200, answer.named)


def _check_addresses(probe: Probe, findings: Findings) -> None:
    client = probe.client
    answer = client.post("/decide/", {}, expected=(404,))
    problem = refusal_problem(answer, 404, "not_found")
    findings.check("404 for another path", not problem, problem or answer.named)
    answer = client.request("GET", "/decide", expected=(405,))
    problem = refusal_problem(answer, 405, "method_not_allowed")
    allow = answer.headers.get("allow", "")
    if not problem and "POST" not in allow:
        problem = f"405 with Allow {allow!r}"
    findings.check("405 for another method", not problem, problem or f"Allow: {allow}")


def _padded(size: int) -> bytes:
    """A right request, blown up with white space to `size` bytes."""
    raw = json.dumps(built_in_rows()[0].request()).encode()
    return raw[:-1] + b" " * (size - len(raw)) + b"}"


def _pieces(raw: bytes) -> Iterator[bytes]:
    for start in range(0, len(raw), _PIECE):
        yield raw[start : start + _PIECE]


def _check_body_size(probe: Probe, findings: Findings) -> None:
    """The largest body passes; one byte more is a 413, declared or streamed."""
    limit = body_limit(probe)
    probe.progress.step("limits: body size")
    if not len(_padded(0)) <= limit <= _MOST_SENT:
        findings.skip("413 for one byte more", f"MAX_BODY_BYTES is {limit}")
        return
    answer = probe.client.post("/decide", _padded(limit))
    findings.check(
        f"a body of {limit} bytes passes", answer.status == 200, answer.named
    )
    over = _padded(limit + 1)
    for name, body in (("declared", over), ("streamed", _pieces(over))):
        answer = probe.client.post("/decide", body, expected=(413,))
        problem = refusal_problem(answer, 413, "request_too_large")
        rule = f"413 for one byte more, {name}"
        findings.check(rule, not problem, problem or answer.named)


def _check_rules(probe: Probe, findings: Findings) -> None:
    """A 422 for each rule, with the server's words in the report."""
    rows = []
    found = []
    too_large = []
    for rule, path, body in invalid_requests(
        max_tokens=probe.limit("max_tokens", 8192),
        max_decisions=probe.limit("max_decisions", 64),
    ):
        if len(body) > body_limit(probe):  # that would be a 413
            too_large.append(f"{rule} on {path}")
            continue
        probe.progress.step(f"limits: 422 for {rule}")
        answer = probe.client.post(path, body, expected=(422,))
        problem = refusal_problem(answer, 422, "invalid_request")
        found += [f"{rule} on {path}: {problem}"] if problem else []
        rows.append((rule, path, answer.named, message(answer, probe.token)))
    for rule in too_large:
        findings.skip(f"422 for {rule}", "its body is over MAX_BODY_BYTES")
    seen = in_short(found) or f"{len(rows)} rules"
    findings.check("422 for each rule", not found, seen)
    findings.facts["rules"] = len(rows)
    findings.table("Rules", ("broken rule", "path", "answer", "message"), rows)
