"""`python -m tests.bench`: prints the tables."""

from __future__ import annotations

import argparse
import tempfile

from . import load, overhead
from .tables import print_table


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("what", nargs="?", choices=["overhead", "load", "all"])
    parser.add_argument("--size", default="tiny", help="tiny, or 4b for a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", default="", help="the demo's directory, kept")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one window")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompts", default="small", help="small,long")
    parser.add_argument("--tables", default="load,bodies,throughput")
    parser.add_argument("--only", default="", help="bodies whose name holds this")
    return parser.parse_args()


def main() -> None:
    """Run what was asked for."""
    options = _parse()
    if options.what in (None, "all", "overhead"):
        print_table("Added by HTTP, JSON and mapping (p50)", overhead.measure_added())
        print_table(
            "16 clients, a 20 ms engine",
            overhead.measure_clients(options.seconds, options.pairs),
        )
    if options.what in (None, "all", "load"):
        with tempfile.TemporaryDirectory(prefix="bench-") as made:
            directory = options.checkpoint or made
            with load.start_target(directory, options.size, options.device) as server:
                _print_load(server, options)


def _print_load(server: load.Process, options: argparse.Namespace) -> None:
    tables = options.tables.split(",")
    window = (options.seconds, options.pairs)
    if "load" in tables:
        print_table(
            "predict() beside a load, against the quiet loop",
            load.measure_load(server, *window),
        )
    if "bodies" in tables:
        print_table(
            "predict() beside bodies of 1 MiB, against the quiet loop",
            load.measure_bodies(server, *window, options.only),
        )
    if "throughput" in tables:
        print_table(
            "Calls a second, against the bare loop",
            load.measure_throughput(
                server, *window, options.prompts.split(","), options.clients
            ),
        )


if __name__ == "__main__":
    main()
