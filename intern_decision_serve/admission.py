"""Admission: at most MAX_QUEUE POSTs queued or scoring at once, the next is Busy.

A slot is held from admission to the last byte of the answer. It never waits for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .errors import Busy

__all__ = ["Admission"]


class Admission:
    """The bounded semaphore that admits, and its count for `/health`."""

    def __init__(self, max_queue: int, retry_after: Callable[[int], int]) -> None:
        self.max_queue = max_queue
        self._retry_after = retry_after
        self._slots = threading.BoundedSemaphore(max_queue)
        self._changed = threading.Condition()
        self._admitted = 0

    @property
    def admitted(self) -> int:
        """POSTs holding a slot now."""
        return self._admitted

    def enter(self) -> None:
        """Take a slot, or raise Busy with the estimated wait in whole seconds.

        The estimate counts every slot: who is admitted may not have submitted yet.
        """
        if not self._slots.acquire(blocking=False):
            raise Busy(
                f"{self.max_queue} requests are in progress",
                retry_after=self._retry_after(self.max_queue),
            )
        with self._changed:
            self._admitted += 1

    def leave(self) -> None:
        """Give the slot back, after the last byte."""
        with self._changed:
            self._admitted -= 1
            self._changed.notify_all()
        self._slots.release()

    def wait_until_empty(self, timeout: float) -> bool:
        """Block until nothing is admitted; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._admitted == 0, timeout)
