"""A load client in a process of its own: the measured process keeps its GIL.

Reads a plan from stdin: url, token, clients, and `posts`, a list of [path, body];
writes `seconds` for all of it and, per post in order, status, seconds and answer.
"""

from __future__ import annotations

import http.client
import json
import queue
import subprocess
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit


def run_client(
    url: str, token: str, posts: list[Any], *, clients: int, timeout: float = 500.0
) -> dict[str, Any]:
    """Run the plan in a subprocess and return what it wrote."""
    plan = {"url": url, "token": token, "posts": posts, "clients": clients}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _work(plan: dict[str, Any], places: queue.SimpleQueue[int], out: list[Any]) -> None:
    address = urlsplit(plan["url"])
    connection = http.client.HTTPConnection(address.netloc, timeout=300)
    headers = {"Authorization": f"Bearer {plan['token']}"}
    while True:
        try:
            place = places.get_nowait()
        except queue.Empty:
            return
        path, body = plan["posts"][place]
        data = json.dumps(body)
        started = time.perf_counter()
        try:
            connection.request("POST", path, data, headers)
            response = connection.getresponse()
            status, answer = response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException):
            connection.close()
            status, answer = 0, {"error": {"code": "closed"}}
        out[place] = (status, time.perf_counter() - started, answer)


def main() -> None:
    """Work the plan off with so many keep-alive connections."""
    plan = json.load(sys.stdin)
    places: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(len(plan["posts"])):
        places.put(place)
    out: list[Any] = [None] * len(plan["posts"])
    threads = [
        threading.Thread(target=_work, args=(plan, places, out))
        for _ in range(plan["clients"])
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    json.dump({"seconds": time.perf_counter() - started, "posts": out}, sys.stdout)


if __name__ == "__main__":
    main()
