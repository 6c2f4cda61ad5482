"""Which inherited socket is served on, and that serving needs no network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo_server import TOKEN, DemoServer, make_environ
from packaging_tools import find_tool

from intern_decision_serve.activation import FIRST_DESCRIPTOR, inherited_socket
from intern_decision_serve.demo import DemoCheckpoint


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


# --- The socket-activated service, without a network --------------------------------


def notified(manager: socket.socket) -> list[str]:
    """Every message that has arrived."""
    messages = []
    manager.setblocking(False)
    while True:
        try:
            messages.append(manager.recv(65536).decode())
        except BlockingIOError:
            return messages


@pytest.fixture(scope="module")
def sealed(
    demo_checkpoint: DemoCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DemoServer, socket.socket]]:
    """The demo under the socket-activated unit's rules, and systemd's notify socket."""
    unshare = find_tool("unshare", "util-linux")
    if subprocess.run([unshare, "-n", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    directory = tmp_path_factory.mktemp("sealed")
    (directory / "credentials").mkdir()
    (directory / "credentials" / "api-token").write_text(TOKEN + "\n")
    log, out = directory / "stderr", directory / "stdout"
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(directory / "notify"))
    with (
        manager,
        socket.create_server(("127.0.0.1", 0), backlog=128) as listener,
        log.open("wb") as stderr,
        out.open("wb") as stdout,
    ):
        descriptor = listener.fileno()
        process = subprocess.Popen(
            [unshare, "-n", sys.executable]
            + [str(Path(__file__).with_name("sealed_launcher.py")), str(descriptor)]
            + [sys.executable, "-m", "intern_decision_serve", "demo", "--dir"]
            + [str(Path(demo_checkpoint.path).parents[2])],
            env=make_environ()
            | {"NOTIFY_SOCKET": str(directory / "notify")}
            | {"CREDENTIALS_DIRECTORY": str(directory / "credentials")},
            pass_fds=[descriptor],
            stdout=stdout,
            stderr=stderr,
        )
        server = DemoServer(process, log, out)
        server.wait_until_ready()
        yield server, manager
        if process.poll() is None:
            assert server.stop() == 0


# The sealed unit allows no AF_INET socket, not even one that is thrown away at once.


DECISION = {
    "id": "d1",
    "state": {"command": "rm -rf build"},
    "question": "What happens?",
    "options": [
        {"id": "allow", "description": "harmless and reversible"},
        {"id": "deny", "description": "destroys data"},
    ],
}


@pytest.mark.torch
def test_without_a_network_the_inherited_socket_answers_a_decision(
    sealed: tuple[DemoServer, socket.socket],
) -> None:
    server, _ = sealed
    status, answer = server.ask("/decide", DECISION)
    assert (status, answer["option_ids"]) == (200, ["allow", "deny"])
    assert sum(answer["probabilities"]) == pytest.approx(1)


@pytest.mark.torch
def test_the_kernel_lets_nothing_out_of_the_services_namespace(
    sealed: tuple[DemoServer, socket.socket],
) -> None:
    server, _ = sealed
    nsenter = find_tool("nsenter", "util-linux")
    script = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)\n"
        "except OSError as error: sys.exit(error.strerror)\n"
        "print('connected')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        host, port = elsewhere.getsockname()
        attempt = [sys.executable, "-c", script, host, str(port)]
        inside = f"--net=/proc/{server.process.pid}/ns/net"
        outcomes = [
            subprocess.run(command, capture_output=True, text=True)
            for command in ([nsenter, inside, *attempt], attempt)
        ]
    assert [(o.stdout, o.stderr) for o in outcomes] == [
        ("", "Network is unreachable\n"),
        ("connected\n", ""),  # the same attempt from outside, so it is no dead end
    ]


@pytest.mark.torch
def test_the_service_is_told_to_systemd_from_start_to_stop_and_the_token_nowhere(
    sealed: tuple[DemoServer, socket.socket],
) -> None:
    server, manager = sealed
    proc = Path(f"/proc/{server.process.pid}")
    seen = [(proc / name).read_bytes().decode() for name in ("cmdline", "environ")]
    _, health = server.ask("/health")
    assert server.stop() == 0
    messages = notified(manager)
    *loading, ready, stopping = messages
    assert (ready, stopping) == ("READY=1", "STOPPING=1")
    assert len(loading) > 1  # READY comes after all of loading and warming up
    assert all(message.startswith("STATUS=") for message in loading)
    seen += [*messages, json.dumps(health)]
    seen += [server.log.read_text(), server.out.read_text()]
    assert [text for text in seen if TOKEN in text] == []
