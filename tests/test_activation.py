"""Which inherited socket is served on, and which is refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from intern_decision_serve.activation import FIRST_DESCRIPTOR, inherited_socket


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def handed_over(count: str = "1", owner: int | None = None) -> dict[str, str]:
    return {
        "LISTEN_FDS": count,
        "LISTEN_PID": str(os.getpid() if owner is None else owner),
        "LISTEN_FDNAMES": "http",
        "PATH": "/bin",
    }


def test_the_first_descriptor_is_systemds() -> None:
    assert FIRST_DESCRIPTOR == 3


def test_the_inherited_socket_answers(listener: socket.socket) -> None:
    environ = handed_over()
    taken = inherited_socket(environ, descriptor=os.dup(listener.fileno()))
    assert taken is not None
    with taken, socket.create_connection(listener.getsockname(), 10) as client:
        client.sendall(b"x")
        peer, _ = taken.accept()
        with peer:
            assert peer.recv(1) == b"x"
    assert environ == {"PATH": "/bin"}


def test_it_is_not_passed_on_and_blocks(listener: socket.socket) -> None:
    descriptor = os.dup(listener.fileno())
    os.set_inheritable(descriptor, True)
    os.set_blocking(descriptor, False)
    taken = inherited_socket(handed_over(), descriptor=descriptor)
    assert taken is not None
    with taken:
        assert os.get_inheritable(descriptor) is False
        assert os.get_blocking(descriptor) is True


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_PID": str(os.getpid())},
        {"LISTEN_FDS": "1"},
        handed_over(owner=1),
        handed_over() | {"LISTEN_PID": f" {os.getpid()}"},
    ],
)
def test_a_socket_that_is_not_ours_is_not_taken(environ: dict[str, str]) -> None:
    assert inherited_socket(environ) is None
    assert not any(name.startswith("LISTEN_") for name in environ)


@pytest.mark.parametrize("count", ["0", "2", "", "x", "1 ", "-1"])
def test_any_number_but_one_is_refused(count: str) -> None:
    with pytest.raises(ValueError, match="exactly 1 socket"):
        inherited_socket(handed_over(count))


@pytest.mark.parametrize(
    "make",
    [
        lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        lambda: socket.socketpair()[0],
    ],
    ids=["not listening", "datagram", "unix"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_anything_but_a_listening_tcp_socket_is_refused(
    make: Callable[[], socket.socket],
) -> None:
    with make() as wrong:
        with pytest.raises(ValueError, match="is no listening TCP socket"):
            inherited_socket(handed_over(), descriptor=wrong.fileno())
        assert os.fstat(wrong.fileno())  # refused, not closed


def test_a_descriptor_that_is_no_socket_is_refused() -> None:
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(ValueError, match=f"descriptor {read_end}: "):
            inherited_socket(handed_over(), descriptor=read_end)
    finally:
        os.close(read_end)
        os.close(write_end)
