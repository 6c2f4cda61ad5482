"""Keeps Python beside a running call small, so that `predict()` keeps its speed.

Facts. A small call is some 2,200 kernel launches, each releasing the GIL and taking it
back; whatever Python another thread runs then is waited for, launch by launch. Measured
against 63 ms alone: 500 refusals a second 103 ms; one thread parsing 1.3 MB bodies over
and over 32,600 ms, since `json.loads` of one body holds the GIL for 10 ms at a stretch.
So three rules, none of which holds the GIL while it waits:

1. Answers that score nothing (refusals, `/health`) and new connections pass a rate
   while a call runs (`Pace`): the client waits, not the call.
2. Requests are decoded, parsed and mapped by one thread at a time (`Turns.light`).
3. What could hold the GIL for milliseconds (a body over `HEAVY_BYTES`) waits for the
   gap between two calls and may use `HEAVY_SHARE` of the calls' time (`Turns.heavy`).

It never looks at a request: callers say how large theirs is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["HEAVY_BYTES", "HEAVY_SHARE", "Pace", "Turns"]

HEAVY_BYTES = 32 * 1024  # json.loads of so much holds the GIL for under half a ms
HEAVY_SHARE = 0.1
MOST_CREDIT_SECONDS = 0.1
LONGEST_YIELD_SECONDS = 0.25  # the inference thread never waits longer for a heavy turn


class Pace:
    """A rate with a burst: `wait` sleeps until the caller's turn, while a call runs.

    The generic cell rate algorithm: one number, the time at which the next free turn
    would stand if all turns were `1 / rate` apart.
    """

    def __init__(
        self,
        rate: float,
        burst: int,
        *,
        is_scoring: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval = 1.0 / rate
        self._allowance = burst / rate
        self._is_scoring = is_scoring
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._next = clock() - self._allowance

    def wait(self) -> None:
        """Return at once on an idle engine, else when the rate allows."""
        if not self._is_scoring():
            return
        with self._lock:
            now = self._clock()
            self._next = max(self._next, now - self._allowance) + self._interval
            seconds = self._next - now
        if seconds > 0:
            self._sleep(seconds)


class Turns:
    """Who may run Python for long: the call, or one heavy piece of work between calls.

    Heavy work spends credit, in seconds. Credit grows by `HEAVY_SHARE` of the time
    calls take and by all the time in which none runs, up to `MOST_CREDIT_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._light = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._calling = False
        self._heavy = False
        self._waiting = 0
        self._taken = 0
        self._credit = MOST_CREDIT_SECONDS
        self._accrued_at = clock()

    def prepare(self, size: int) -> AbstractContextManager[None]:
        """The turn that work on `size` bytes needs: any thread but the inference's."""
        return self.heavy() if size > HEAVY_BYTES else self.light()

    @contextmanager
    def light(self) -> Iterator[None]:
        """One thread at a time."""
        with self._light:
            yield

    @contextmanager
    def heavy(self) -> Iterator[None]:
        """One thread at a time, between calls, within the credit."""
        with self._changed:
            self._waiting += 1
            while self._heavy or self._calling or not self._affordable():
                idle = not (self._heavy or self._calling)
                self._changed.wait(max(-self._credit, 0.001) if idle else None)
            self._waiting -= 1
            self._heavy = True
            started = self._accrued_at
        try:
            with self._light:
                yield
        finally:
            with self._changed:
                self._accrue()
                self._credit -= self._accrued_at - started
                self._heavy = False
                self._taken += 1
                self._changed.notify_all()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around each call, on the inference thread; lets one waiting turn go first."""
        with self._changed:
            if self._waiting and not self._heavy and self._affordable():
                taken = self._taken
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._taken != taken, LONGEST_YIELD_SECONDS
                )
            self._changed.wait_for(lambda: not self._heavy)
            self._accrue()
            self._calling = True
        try:
            yield
        finally:
            with self._changed:
                self._accrue()
                self._calling = False
                self._changed.notify_all()

    def _affordable(self) -> bool:
        self._accrue()
        return self._credit > 0

    def _accrue(self) -> None:
        now = self._clock()
        share = 0.0 if self._heavy else HEAVY_SHARE if self._calling else 1.0
        grown = self._credit + (now - self._accrued_at) * share
        self._credit = min(grown, MOST_CREDIT_SECONDS)
        self._accrued_at = now
