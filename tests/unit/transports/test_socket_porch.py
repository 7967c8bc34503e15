from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Iterator

import pytest

from pdcore.transports.socket_address import listen_tcp, listen_unix
from pdcore.transports.socket_porch import Porch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux")


@pytest.fixture
def porch() -> Iterator[tuple[Porch, int, tuple[str, int]]]:
    listener, address = listen_tcp("127.0.0.1")
    found = Porch([listener])
    yield found, listener.fileno(), (address.host, address.port)
    found.close()


def test_callers_come_in_non_blocking(porch: tuple[Porch, int, tuple[str, int]]) -> None:
    door, fd, at = porch
    assert door.filenos() == [fd]
    assert door.accept(fd) is None
    with socket.create_connection(at):
        sock = door.accept(fd)
        assert sock is not None
        with sock, pytest.raises(BlockingIOError):
            sock.recv(1)


def test_without_a_descriptor_callers_are_hung_up_on(
    porch: tuple[Porch, int, tuple[str, int]],
) -> None:
    """Otherwise the caller stays in the backlog and the thread spins on it."""
    door, fd, at = porch
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(at) as caller:
        resource.setrlimit(resource.RLIMIT_NOFILE, (caller.fileno() + 1, limits[1]))
        try:
            assert door.accept(fd) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        caller.settimeout(5)
        assert caller.recv(1) == b""
        with socket.create_connection(at):
            sock = door.accept(fd)
            assert sock is not None
            sock.close()


def test_closing_is_idempotent() -> None:
    door = Porch([listen_unix()[0], listen_tcp("127.0.0.1")[0]])
    assert len(door.filenos()) == 2
    door.close()
    door.close()
    assert door.filenos() == []
