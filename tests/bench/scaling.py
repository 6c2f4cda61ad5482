"""Requests a second of one instance and of two, behind the shipped haproxy.cfg.

    python tests/bench/scaling.py [--call-ms 50] [--clients 16] [--seconds 5]

The engines only sleep, so this measures what stands before them: HAProxy, HTTP, the
queue. Windows of one and of two instances alternate; the medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from balancing import run_balancer  # noqa: E402
from demo_server import DemoServer  # noqa: E402
from instances import start_instance  # noqa: E402
from rates import compare  # noqa: E402

GOAL = 1.9
BODY = {
    "state": "s",
    "id": "d",
    "question": "q",
    "options": [{"id": "a", "description": ""}, {"id": "b", "description": ""}],
}


@contextlib.contextmanager
def _instances(directory: Path, call_seconds: float) -> Iterator[list[DemoServer]]:
    made = [start_instance(directory / str(n), call_seconds) for n in range(2)]
    try:
        for instance in made:
            instance.wait_until_ready()
        yield made
    finally:
        for instance in made:
            instance.process.kill()
            instance.process.wait()


def main() -> int:
    """Print one line; 0 when two instances reach the goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--call-ms", type=float, default=50.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one window")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scaling-") as made:
        directory = Path(made)
        with _instances(directory, options.call_ms / 1000) as pair:
            urls = [instance.url for instance in pair]
            for name in ("one", "other", "two"):
                (directory / name).mkdir()
            with (
                run_balancer(directory / "one", urls[:1]) as one,
                run_balancer(directory / "other", urls[1:]) as other,
                run_balancer(directory / "two", urls) as two,
            ):
                found = compare(
                    [[one.host], [other.host]],
                    [two.host],
                    "/decide",
                    BODY,
                    clients=options.clients,
                    seconds=options.seconds,
                    repeats=options.repeats,
                )
    sys.stdout.write(
        f"calls of {options.call_ms:.0f} ms, {options.clients} clients: "
        f"{found['alone_per_second']}/s alone, {found['together_per_second']}/s, "
        f"{found['ratio']:.2f}x (goal {GOAL}x)\n"
    )
    return 0 if found["ratio"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
