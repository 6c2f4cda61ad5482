"""Requests a second of one GPU and of several, by prompt length; the README's table.

    PYTHONPATH=. python tests/gpu/scaling.py [--gpus 0,1] [--tokens 300,1000,...]

One process of the demo at the 4B's size for each GPU, behind the shipped haproxy.cfg;
where HAProxy is not installed, each client keeps to one instance instead, and the
result says so. With `--device cpu --size tiny` it can be tried out without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from demos import DemoServer, start_instance  # noqa: E402
from rates import compare  # noqa: E402
from sections import add_options, say  # noqa: E402
from served import Options  # noqa: E402
from shapes import fit, systemone  # noqa: E402

PATH = "/v1/systemone"


def main() -> int:
    """Measure every length; write scaling.json and print a row for each."""
    options = _parse()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"gpus": options.gpus, "rows": []}
    with _start(options) as instances, _hosts(instances) as (alone, together):
        result["through"] = "haproxy" if len(together) == 1 else "clients"
        result["model"] = instances[0].ask("/health")[1]["model"]
        for tokens in options.tokens:
            row = _measure(options, instances, alone, together, tokens)
            result["rows"].append(row)
            say(json.dumps(row))
            (options.out / "scaling.json").write_text(json.dumps(result, indent=1))
    return 0


def _parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=numbers, default=[0, 1])
    parser.add_argument(
        "--tokens", type=numbers, default=[300, 500, 1000, 2000, 4000, 7500]
    )
    parser.add_argument("--clients", type=int, default=8, help="for each GPU")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one window")
    parser.add_argument("--repeats", type=int, default=3)
    add_options(parser)
    return parser.parse_args()


@contextlib.contextmanager
def _start(options: argparse.Namespace) -> Iterator[list[DemoServer]]:
    """One after the other: the second finds what the first compiled."""
    checkpoint = Options(options.dir, options.size, options.device)
    instances: list[DemoServer] = []
    try:
        for gpu in options.gpus:
            started = time.monotonic()
            name = f"instance-{gpu}"
            instance = start_instance(checkpoint, options.out, name, gpu=gpu)
            instances.append(instance)
            instance.wait_until_ready()
            say(f"GPU {gpu}: ready after {time.monotonic() - started:.0f} s")
        yield instances
    finally:
        for instance in instances:
            instance.process.kill()
            instance.process.wait()


@contextlib.contextmanager
def _hosts(
    instances: Sequence[DemoServer],
) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Where to ask each GPU alone, and all: through HAProxy, if there is one."""
    urls = [instance.url for instance in instances]
    if not shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin"):
        hosts = [url.removeprefix("http://") for url in urls]
        yield [[host] for host in hosts], hosts
        return
    from balancing import run_balancer

    with contextlib.ExitStack() as stack:
        balanced = []
        for behind in (*([url] for url in urls), urls):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            balanced.append(stack.enter_context(run_balancer(directory, behind)).host)
        *alone, together = balanced
        yield [[host] for host in alone], [together]


def _measure(
    options: argparse.Namespace,
    instances: Sequence[DemoServer],
    alone: list[list[str]],
    together: list[str],
    tokens: int,
) -> dict[str, Any]:
    """One length: the same body from every client, asked of one GPU and of all."""

    def count_tokens(body: dict[str, Any]) -> int:
        status, answer = instances[0].ask(PATH, body)
        return int(answer["usage"]["input_tokens"]) if status == 200 else 10**6

    body = fit(count_tokens, lambda words: systemone(tokens, words, 1), tokens)
    answers = [instance.ask(PATH, body)[1] for instance in instances]
    clients = options.clients * len(instances)
    found = compare(
        alone,
        together,
        PATH,
        body,
        clients=clients,
        seconds=options.seconds,
        repeats=options.repeats,
    )
    alike = all(a["answers"] == answers[0]["answers"] for a in answers)
    return {
        "tokens": answers[0]["usage"]["input_tokens"],
        "clients": clients,
        "gpus": len(instances),
        **found,
        "answers_alike": alike,
    }


if __name__ == "__main__":
    sys.exit(main())
