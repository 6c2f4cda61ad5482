"""What was measured is reported, also when the measuring ends in the middle.

It never changes what ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["reporting"]


@contextmanager
def reporting(report: Callable[[], None]) -> Iterator[None]:
    """Run `report` once the block has ended, however it does.

    An interrupt or an answer that did not come goes on afterwards, even where the part
    that is there cannot be reported.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):
            report()
        raise
    report()
