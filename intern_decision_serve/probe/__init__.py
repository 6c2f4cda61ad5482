"""The probe: a client that measures a running server over HTTP, and a report.

Standard library only. It imports nothing of the server, so that what it finds is what
any caller would find; and it changes nothing on the server but its counters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .foreign import say
from .options import parse_options, read_token
from .run import EXIT_INTERRUPTED, EXIT_USAGE, Unusable, run

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run `probe` with the arguments after its name; the exit status."""
    try:
        options = parse_options(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    try:
        token = read_token(options, os.environ)
        return run(options, token, sys.stdout, sys.stderr)
    except (ValueError, OSError, RecursionError, Unusable) as error:
        say(sys.stderr, f"probe: {error}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
