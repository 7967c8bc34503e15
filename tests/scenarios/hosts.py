"""Two hosts on one machine: network namespaces with an address each, and a cable between.

Needs root and iproute2; :data:`WHY_NOT` says what is missing, or is empty.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from pdcore.server.client import Origin
from tests.scenarios.processes import Program

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
ADDRESSES = ("10.213.77.1", "10.213.77.2")


class Host(NamedTuple):
    """``name`` is that of its network namespace, ``device`` its end of the cable."""

    name: str
    address: str
    device: str

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` in a thread that lives on this host."""
        found: list[T] = []

        def inside() -> None:
            fd = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
            libc = ctypes.CDLL(None, use_errno=True)
            moved = libc.setns(fd, CLONE_NEWNET)
            os.close(fd)
            assert moved == 0, os.strerror(ctypes.get_errno())
            found.append(function())

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        assert found, f"it failed on {self.name}: see above"
        return found[0]

    def plug(self, is_plugged: bool) -> None:
        """The cable, in or out."""
        _ip("-n", self.name, "link", "set", self.device, "up" if is_plugged else "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """With a loopback interface and a cable between them, until the block ends. The next user
    of the names clears what a killed one has left."""
    name = f"pdcore-{os.getpid()}"
    hosts = tuple(Host(f"{name}-{i}", address, f"pd{i}") for i, address in enumerate(ADDRESSES))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        a, b = hosts
        _ip("-n", a.name, "link", "add", a.device, "type", "veth", "peer", "name", b.device)
        _ip("-n", a.name, "link", "set", b.device, "netns", b.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            for device in (host.device, "lo"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield a, b
    finally:
        for host in hosts:
            if Path(f"/run/netns/{host.name}").exists():
                _ip("netns", "delete", host.name)


class Deployment:
    """A prefill instance on one host, a decode instance and a router on the other; ``env`` is
    what their environment has besides."""

    def __init__(
        self,
        a: Host,
        b: Host,
        folder: Path,
        *engine: str,
        transport: str = "socket",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.prefill_host, self.decode_host = a, b
        self._env = env or {}
        common = [*engine, "--transport", transport]
        self.prefill = self._serve(a, folder, "prefill", *common, "--ips", a.address)
        self.decode = self._serve(
            b, folder, "decode", *common, "--ips", b.address, "--prefill-ips", a.address
        )
        instances = ["--prefill-addrs", f"{a.address}:8001", "--decode-addrs", f"{b.address}:8100"]
        self.router = self._serve(b, folder, "router", *instances)
        for program in (self.prefill, self.decode, self.router):
            program.wait_for("ready")
        self.origin = Origin(b.address, 8000)

    def _serve(self, host: Host, folder: Path, role: str, *arguments: str) -> Program:
        env = {**self._env, "PDCORE_RUN_DIR": str(folder / role)}
        return Program(
            "serve", "--role", role, "--host", host.address, *arguments, env=env, host=host.name
        )

    def close(self) -> None:
        for program in (self.router, self.decode, self.prefill):
            program.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _why_not() -> str:
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    try:
        with two_hosts():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {error}"


WHY_NOT = _why_not()
