"""Plays systemd's part before exec: `sealed_launcher.py DESCRIPTOR COMMAND...`.

Hands the listening DESCRIPTOR over as number 3 and refuses sockets of any family but
AF_UNIX, as RestrictAddressFamilies=AF_UNIX does. Run inside `unshare -n`, that is all
of the socket-activated unit that the service can notice.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER, FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def restrict_address_families() -> None:
    """Let socket() make AF_UNIX sockets only, in this process and what it becomes."""
    code = b"".join(
        struct.pack("=HBBI", *step)
        for step in [
            (LOAD, 0, 0, NUMBER),
            (JUMP_IF_EQUAL, 0, 3, SOCKET_CALL[platform.machine()]),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_IF_EQUAL, 1, 0, socket.AF_UNIX),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code) // 8, code)
    none = ctypes.c_ulong(0)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), none, none, none) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    if libc.prctl(PR_SET_SECCOMP, mode, ctypes.byref(program), none, none) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def main() -> None:
    descriptor, *command = sys.argv[1:]
    os.dup2(int(descriptor), 3)
    os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
    restrict_address_families()
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
