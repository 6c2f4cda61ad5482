"""One line on a terminal that says what is being measured; silent anywhere else."""

from __future__ import annotations

import time
from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 78


class Progress:
    """Rewrites one line of `stream` while it is a terminal; one thread writes it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._started = time.monotonic()

    def step(self, text: str) -> None:
        """Say what is going on; each step is written, since the next may be long."""
        if self._shown:
            seconds = time.monotonic() - self._started
            line = f"{seconds:5.0f} s  {text}"[:_WIDTH]
            self._stream.write(f"\r{line:<{_WIDTH}}")
            self._stream.flush()

    def clear(self) -> None:
        """Give the line back."""
        if self._shown:
            self._stream.write("\r" + " " * _WIDTH + "\r")
            self._stream.flush()
