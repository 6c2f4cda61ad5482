"""A refusal sent before the body was read reaches real clients, never as a reset."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import WAIT
from running import DECIDE, RunningService
from wire import TOKEN, make_request

Start = Callable[..., RunningService]
Refused = tuple[int, str]

MEGABYTES = {"2 MB": 2_000_000, "50 MB": 50_000_000}
REFUSALS = {
    "401": (401, "unauthorized"),
    "404": (404, "not_found"),
    "413": (413, "request_too_large"),
    "429": (429, "busy"),
}


@pytest.fixture(params=REFUSALS)
def refusing(
    request: pytest.FixtureRequest, start_service: Start
) -> Iterator[tuple[str, str, Refused]]:
    """A service that refuses for one reason: its URL, the token, what it says."""
    service = start_service(max_queue=1)
    name, path, token = request.param, "/v1/systemone", TOKEN
    held = service.wire()
    if name == "401":
        token = "x" * 40
    elif name == "404":
        path = "/nothing/v1/systemone"
    elif name == "429":
        service.engine.gate.clear()
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
    yield service.server.url + path, token, REFUSALS[name]
    service.engine.gate.set()
    held.sock.close()


def read_urllib(url: str, token: str, body: bytes) -> Refused:
    headers = {"Authorization": f"Bearer {token}"}
    sent = urllib.request.Request(url, body, headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(sent, timeout=WAIT)
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]["code"]


def read_http_client(url: str, token: str, body: bytes) -> Refused:
    host, path = url.removeprefix("http://").split("/", 1)
    connection = http.client.HTTPConnection(host, timeout=WAIT)
    headers = {"Authorization": f"Bearer {token}"}
    connection.request("POST", "/" + path, body, headers)
    response = connection.getresponse()
    code = json.loads(response.read())["error"]["code"]
    connection.close()
    return response.status, code


def read_chunked(url: str, token: str, body: bytes) -> Refused:
    host, path = url.removeprefix("http://").split("/", 1)
    connection = http.client.HTTPConnection(host, timeout=WAIT)
    headers = {"Authorization": f"Bearer {token}", "Transfer-Encoding": "chunked"}
    parts = (body[at : at + 65536] for at in range(0, len(body), 65536))
    connection.request("POST", "/" + path, parts, headers, encode_chunked=True)
    response = connection.getresponse()
    code = json.loads(response.read())["error"]["code"]
    connection.close()
    return response.status, code


def read_sdk(url: str, token: str, body: bytes) -> Refused:
    sdk = pytest.importorskip("typesafe_sdk")
    base = url.removesuffix("/v1/systemone")
    with sdk.TypeSafeClient(
        base_url=base,
        api_key=token,
        retry=sdk.RetryPolicy(max_retries=0),
        timeout=WAIT,
        compression=False,
    ) as client:
        with pytest.raises(sdk.TypeSafeAPIError) as caught:
            client.system_one(body.decode(), {"ok": sdk.Noul(instructions="?")})
    status, document = caught.value.status, caught.value.body
    assert isinstance(document, dict)
    return status, document["error"]["code"]


CLIENTS = [read_urllib, read_http_client, read_chunked, read_sdk]


@pytest.mark.parametrize("size", MEGABYTES)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_writes_its_body_first_reads_the_refusal(
    refusing: tuple[str, str, Refused],
    client: Callable[[str, str, bytes], Refused],
    size: str,
) -> None:
    url, token, expected = refusing
    assert client(url, token, b" " * MEGABYTES[size]) == expected


@pytest.mark.parametrize("options", [[], ["-H", "Expect:"], ["-T", "-"]])
def test_curl_reads_the_refusal(
    refusing: tuple[str, str, Refused], options: list[str], tmp_path: Path
) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl")
    url, token, expected = refusing
    body = tmp_path / "body"
    with body.open("wb") as file:
        file.truncate(MEGABYTES["50 MB"])
    given = options if "-T" in options else [*options, "--data-binary", f"@{body}"]
    with body.open("rb") as source:
        done = subprocess.run(
            [curl, "-sS", "-X", "POST", "-w", "\n%{http_code}", *given]
            + ["-H", f"Authorization: Bearer {token}", url],
            stdin=source,
            capture_output=True,
            timeout=WAIT,
        )
    assert done.returncode == 0, done.stderr
    document, status = done.stdout.rsplit(b"\n", 1)
    assert (int(status), json.loads(document)["error"]["code"]) == expected


def test_many_clients_at_once_read_their_refusals(service: RunningService) -> None:
    """More than are drained at a time: the others wait for their turn to be read."""
    url = service.server.url + "/decide"
    body = b" " * 4_000_000
    outcomes: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: outcomes.append(read_http_client(url, "x" * 40, body))
        )
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT)
    assert outcomes == [(401, "unauthorized")] * 16
