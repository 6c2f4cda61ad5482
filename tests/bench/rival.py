"""A minimal FastAPI app that does the same work: the yardstick of `overhead`.

The same bearer check, JSON rules, validation, answer check and access line; the engine
on one executor thread. Needs fastapi and uvicorn, which nothing else here does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from intern_decision_serve import systemone, validation
from intern_decision_serve.accesslog import AccessLog, Record
from intern_decision_serve.auth import check_bearer
from intern_decision_serve.errors import ServiceError

from .client import TOKEN
from .target import ClockEngine, configure_logging


def build_app(seconds: float) -> FastAPI:
    """The app over an engine that takes `seconds` a call."""
    app = FastAPI(openapi_url=None)
    executor = ThreadPoolExecutor(1)
    engine, log = ClockEngine(seconds), AccessLog()

    @app.exception_handler(ServiceError)
    async def refuse(request: Request, error: ServiceError) -> JSONResponse:
        envelope = {"error": {"code": error.code, "message": error.message}}
        return JSONResponse(envelope, error.status)

    @app.post("/v1/systemone")
    async def answer(request: Request) -> Response:
        started = time.monotonic()
        check_bearer([request.headers["authorization"].encode()], TOKEN)
        body = await request.body()
        parsed = validation.parse_systemone(
            validation.parse_json(body, max_values=32768)
        )
        call = systemone.engine_request(parsed)
        engine.validate(call)
        loop = asyncio.get_running_loop()
        response, _ = await loop.run_in_executor(executor, engine.score, call)
        reply = JSONResponse(systemone.build_answer(parsed, response, "name@revision"))
        log.write(
            Record(
                request_id="0" * 16,
                method="POST",
                path="/v1/systemone",
                status=200,
                total_seconds=time.monotonic() - started,
                calls=1,
                sent_bytes=len(reply.body),
            )
        )
        return reply

    return app


class _Server(uvicorn.Server):
    """Prints its URL once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        sys.stdout.write(json.dumps({"url": f"http://127.0.0.1:{port}"}) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Serve on a free port, its URL printed first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", type=float, default=0.0)
    parser.add_argument("--http", default="h11")
    parser.add_argument("--loop", default="asyncio")
    options = parser.parse_args()
    configure_logging()
    config = uvicorn.Config(
        build_app(options.engine),
        host="127.0.0.1",
        port=0,  # uvicorn binds: on a socket of ours asyncio would not set TCP_NODELAY
        http=options.http,
        loop=options.loop,
        access_log=False,
        log_level="warning",
    )
    _Server(config).run()


if __name__ == "__main__":
    main()
