"""Runs the shipped haproxy.cfg over given instances, on ports the kernel chose.

Only what names this machine is replaced: addresses, the certificate, the log and the
user. A replacement that finds nothing fails, so no line can drift away from its test.
"""

from __future__ import annotations

import contextlib
import csv
import http.client
import io
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging_tools import SYSTEMD, find_tool

__all__ = ["CONFIGURATION", "Balancer", "find_haproxy", "run_balancer", "write_config"]

CONFIGURATION = SYSTEMD / "haproxy.cfg"
CERTIFICATE = "/etc/haproxy/certs/intern-decision-serve.pem"
WAIT_SECONDS = 30.0


def find_haproxy() -> str:
    """The program, also where PATH leaves /usr/sbin out; else skips or fails."""
    name = "haproxy" if shutil.which("haproxy") else "/usr/sbin/haproxy"
    return find_tool(name, "haproxy")


def make_certificate(directory: Path) -> Path:
    """A self-signed certificate for localhost with its key, as HAProxy reads them."""
    openssl = find_tool("openssl", "openssl")
    key, certificate = directory / "key", directory / "certificate"
    subprocess.run(
        [
            *(
                openssl,
                "req",
                "-x509",
                "-nodes",
                "-days",
                "1",
                "-subj",
                "/CN=localhost",
            ),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    both = directory / "pem"
    both.write_text(certificate.read_text() + key.read_text())
    return both


def write_config(
    directory: Path,
    certificate: Path,
    instances: Sequence[str],
    binds: tuple[str, str, str] = (":8443", "127.0.0.1:8080", "127.0.0.1:8404"),
    extra: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write the shipped file with this machine's names; `instances` are host:port."""
    text = CONFIGURATION.read_text()
    text = _replace_servers(text, instances)
    replacements = [
        (CERTIFICATE, str(certificate)),
        ("log /dev/log local0", "log stdout format raw local0"),
        ("    chroot /var/lib/haproxy\n", ""),
        ("    user haproxy\n", ""),
        ("    group haproxy\n", ""),
        ("bind :8443", f"bind {binds[0]}"),
        ("bind 127.0.0.1:8080", f"bind {binds[1]}"),
        ("bind 127.0.0.1:8404", f"bind {binds[2]}"),
        *extra,
    ]
    for old, new in replacements:
        assert text.count(old) == 1, f"haproxy.cfg: {old!r}"
        text = text.replace(old, new)
    path = directory / "haproxy.cfg"
    path.write_text(text)
    return path


def _replace_servers(text: str, instances: Sequence[str]) -> str:
    """Put `instances` where the file has its two, in both backends."""
    for suffix in ("", " track instances/gpu{0}"):
        line = "    server gpu{0} {1}" + suffix + "\n"
        shipped = "".join(line.format(n, f"127.0.0.1:{8100 + n}") for n in range(2))
        assert text.count(shipped) == 1, "haproxy.cfg: its servers"
        ours = "".join(line.format(n, where) for n, where in enumerate(instances))
        text = text.replace(shipped, ours)
    return text


@dataclass(slots=True)
class Balancer:
    """A running HAProxy; `host` is host:port without TLS."""

    process: subprocess.Popen[bytes]
    log: Path
    certificate: Path
    host: str
    tls_host: str
    statistics_host: str

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def states(self) -> list[str]:
        """Each instance's state as HAProxy sees it: UP, DOWN or on the way."""
        return [
            row["status"] for row in self._rows() if row["svname"].startswith("gpu")
        ]

    def count(self, column: str) -> int:
        """A column of the backend's statistics, such as wretr: retries."""
        [row] = [row for row in self._rows() if row["svname"] == "BACKEND"]
        return int(row[column])

    def wait_for(self, *states: str) -> None:
        """Block until the instances are in `states`, in their order."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (seen := self.states()) != list(states):
            late = time.monotonic() > deadline or self.process.poll() is not None
            assert not late, f"{seen}\n{self.log.read_text()}"
            time.sleep(0.02)

    def trust(self) -> ssl.SSLContext:
        """A client's TLS settings that trust this balancer and nobody else."""
        return ssl.create_default_context(cafile=str(self.certificate))

    def read(self, path: str) -> str:
        """A document of the statistics frontend."""
        connection = http.client.HTTPConnection(self.statistics_host, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read().decode()

    def _rows(self) -> list[dict[str, str]]:
        table = csv.DictReader(io.StringIO(self.read("/;csv").removeprefix("# ")))
        return [row for row in table if row["pxname"] == "instances"]


def _listen() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0), backlog=256)
    sock.set_inheritable(True)
    return sock


@contextlib.contextmanager
def run_balancer(
    directory: Path,
    urls: Sequence[str],
    extra: Sequence[tuple[str, str]] = (),
) -> Iterator[Balancer]:
    """HAProxy over the instances at `urls`, which it already found up."""
    haproxy = find_haproxy()
    certificate = make_certificate(directory)
    sockets = [_listen() for _ in range(3)]
    tls, plain, statistics = (f"fd@{sock.fileno()}" for sock in sockets)
    addresses = [re.sub("^http://", "", url) for url in urls]
    config = write_config(
        directory, certificate, addresses, (tls, plain, statistics), extra
    )
    log = directory / "haproxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [haproxy, "-db", "-f", str(config)],
            stdout=output,
            stderr=output,
            pass_fds=[sock.fileno() for sock in sockets],
        )
    hosts = [f"localhost:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    balancer = Balancer(process, log, certificate, hosts[1], hosts[0], hosts[2])
    try:
        balancer.wait_for(*["UP"] * len(urls))
        yield balancer
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
