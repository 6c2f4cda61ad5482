"""Takes over the listening socket that systemd opened: LISTEN_FDS.

With it the service needs no network of its own, and the kernel can keep INV-5. This
module opens and binds nothing, and creates no socket of another family: under
RestrictAddressFamilies=AF_UNIX that would fail.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

__all__ = ["FIRST_DESCRIPTOR", "inherited_socket"]

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START


def inherited_socket(
    environ: MutableMapping[str, str], *, descriptor: int = FIRST_DESCRIPTOR
) -> socket.socket | None:
    """Return the one listening TCP socket handed over, or None where there is none.

    The variables are removed and the descriptor is made uninheritable, so that no
    child (a C compiler) believes or holds it. Raises ValueError for anything but one
    listening TCP socket: serving on a guess would open another port than was meant.
    """
    owner = environ.pop("LISTEN_PID", None)
    count = environ.pop("LISTEN_FDS", None)
    environ.pop("LISTEN_FDNAMES", None)
    if count is None or owner != str(os.getpid()):
        return None
    if count != "1":
        raise ValueError(f"LISTEN_FDS is {count}: this service takes exactly 1 socket")
    try:
        inherited = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ValueError(f"LISTEN_FDS: descriptor {descriptor}: {error}") from None
    if not _is_listening_tcp(inherited):
        inherited.detach()  # not ours to close
        raise ValueError(
            f"LISTEN_FDS: descriptor {descriptor} is no listening TCP socket"
        )
    inherited.set_inheritable(False)
    inherited.setblocking(True)  # NonBlocking=yes would make accept() spin
    return inherited


def _is_listening_tcp(candidate: socket.socket) -> bool:
    return (
        candidate.family in (socket.AF_INET, socket.AF_INET6)
        and candidate.type == socket.SOCK_STREAM
        and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    )
