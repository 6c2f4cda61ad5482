"""What the service tells systemd: READY, STATUS, WATCHDOG, STOPPING.

One datagram to NOTIFY_SOCKET per message. A lost message is logged and never raised:
no answer to a client may depend on it. Nothing here knows the engine; `Watchdog` sees
it only as the age of the running call.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

__all__ = [
    "Watchdog",
    "extend_timeout",
    "notify",
    "ready",
    "status",
    "stopping",
    "watchdog",
    "watchdog_seconds",
]

_log = logging.getLogger(__name__)

_MICROSECONDS = 1_000_000


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send one message and say whether it was sent; without NOTIFY_SOCKET do nothing.

    `@name` is systemd's spelling of an abstract socket, whose address starts with NUL.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(address)
            sender.sendall(state.encode("utf-8", "replace"))
    except OSError as error:
        _log.warning("could not notify systemd of %s: %s", state, error)
        return False
    return True


def ready() -> None:
    """Say that the last startup check passed and requests are answered (INV-3)."""
    notify("READY=1")


def status(text: str) -> None:
    """Set the one line that `systemctl status` shows.

    A line break would start another assignment of the protocol, so it is folded.
    """
    notify("STATUS=" + " ".join(text.split()))


def watchdog() -> None:
    """Feed the watchdog once."""
    notify("WATCHDOG=1")


def stopping() -> None:
    """Say that the service stops taking work."""
    notify("STOPPING=1")


def extend_timeout(seconds: float) -> None:
    """Ask for `seconds` more from now, past TimeoutStartSec or TimeoutStopSec."""
    notify(f"EXTEND_TIMEOUT_USEC={round(seconds * _MICROSECONDS)}")


def watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return WatchdogSec as systemd handed it to this process, or None without one."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # meant for another process whose environment we inherited
    text = environ.get("WATCHDOG_USEC", "")
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text) / _MICROSECONDS or None


class _Stop(Protocol):
    """The half of `threading.Event` that `Watchdog.run` waits on."""

    def wait(self, timeout: float) -> bool: ...


class Watchdog:
    """Feeds systemd's watchdog only while the inference thread is well.

    Well means idle, or its running call younger than `longest_call_seconds`. By
    default that is half of WatchdogSec, so a call that hangs ends the process between
    1 and 1.5 times WatchdogSec after it began, and a call shorter than WatchdogSec
    never does. Fed every third of WatchdogSec, because a handler that holds the GIL
    can delay this thread too.
    """

    def __init__(
        self,
        running_age_seconds: Callable[[], float | None],
        limit_seconds: float,
        longest_call_seconds: float | None = None,
        feed: Callable[[], None] = watchdog,
    ) -> None:
        self._running_age_seconds = running_age_seconds
        self.interval_seconds = limit_seconds / 3
        self.longest_call_seconds = (
            limit_seconds / 2 if longest_call_seconds is None else longest_call_seconds
        )
        self._feed = feed

    def feed_once(self) -> bool:
        """Feed, or withhold; say which."""
        age_seconds = self._running_age_seconds()
        if age_seconds is not None and age_seconds > self.longest_call_seconds:
            return False
        self._feed()
        return True

    def run(self, stop: _Stop) -> None:
        """Feed until `stop` is set; log once per call that outlives its time."""
        fed = True
        while True:
            was_fed, fed = fed, self.feed_once()
            if was_fed and not fed:
                _log.error(
                    "the running call is over %.0f s old: watchdog no longer fed",
                    self.longest_call_seconds,
                )
            if stop.wait(self.interval_seconds):
                return
