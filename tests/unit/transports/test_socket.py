from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdcore.errors import ConfigError, TransportError
from pdcore.testing.conformance import run_conformance
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_checks_process import one_piece, whole_lease
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import Watched, pump, same
from pdcore.transports import regions, socket
from pdcore.transports.descriptor import decode
from pdcore.transports.registry import create
from pdcore.transports.socket import SocketTransport, why_unavailable
from pdcore.transports.socket_address import decode_home
from pdcore.types import Incarnation
from tests.unit.transports.exhaustion import descriptors_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket is Linux")
US = Incarnation(b"u" * 16)
has_ipv6 = pytest.mark.skipif(
    not os.path.exists("/proc/net/if_inet6"), reason="this host has no IPv6"
)


def test_elsewhere_the_reason_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unavailable() is None
    monkeypatch.setattr(socket.sys, "platform", "darwin")
    reason = why_unavailable()
    assert reason is not None
    assert "needs Linux" in reason
    with pytest.raises(TransportError, match="needs Linux"):
        SocketTransport(US)


@pytest.mark.parametrize("families", [["unix"], ["tcp"], ["unix", "tcp"]])
def test_it_declares_to_cross_hosts_only_where_it_does(families: list[str]) -> None:
    transport = create("socket", US, families=families)
    assert transport.caps.cross_host == ("tcp" in families)
    transport.close()


@pytest.mark.parametrize("families", [[], ["udp"], ["unix", "udp"]])
def test_unknown_families_are_the_users_mistake(families: list[str]) -> None:
    with pytest.raises(TransportError, match="one or both of 'unix' and 'tcp'"):
        SocketTransport(US, families=families)
    with pytest.raises(ConfigError, match=r"'socket'.*frobnicate"):
        create("socket", US, frobnicate=1)


@pytest.mark.parametrize("port", [-1, 65536, 70_000])
def test_a_port_that_is_none_is_the_users_mistake(port: int) -> None:
    """70,000 was taken for 4,464, without a word."""
    with pytest.raises(TransportError, match=rf"port must be 0 .* 65535, got {port}"):
        SocketTransport(US, port=port)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=has_ipv6)])
def test_ipv4_and_ipv6_move_bytes(host: str) -> None:
    with Pair(RegistryHarness("socket", families=["tcp"], host=host)) as pair:
        finish(pair, pair.submit(pair.lease(), pair.batch((5, 7, 60_000))))
        assert same(pair.target.buffer[7:60_007], pair.source.buffer[5:60_005])


def test_a_registered_buffer_may_be_written_unless_it_is_read_only() -> None:
    with Pair(RegistryHarness("socket")) as pair:
        memory = bytearray(4096)
        receiver, sender = pair.receiver.transport, pair.sender.transport
        region = receiver.register(memoryview(memory))
        pair.session = sender.connect(receiver.descriptor())
        pair.target = region
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 4096))))
        assert memory == pair.source.buffer[:4096]
        fixed = receiver.register(memoryview(bytes(64)))
        with pytest.raises(TransportError, match="not registered"):
            pair.lease(region=fixed)


@pytest.mark.parametrize("count", range(12))
def test_without_descriptors_it_says_so_and_leaves_none_open(count: int) -> None:
    """G7, and nothing but TransportError: anything else ends the loop of the worker."""
    peer = SocketTransport(Incarnation(b"p" * 16), families=["tcp"])
    before = SocketTransport(US)
    descriptor = peer.descriptor()
    made = None
    with descriptors_left(count), contextlib.suppress(TransportError):
        made = SocketTransport(Incarnation(b"v" * 16))
    with descriptors_left(count):
        for call in (before.descriptor, lambda: before.connect(descriptor)):
            with contextlib.suppress(TransportError):
                call()
    if made is not None:
        made.close()
    before.connect(descriptor)
    assert before.close() == peer.close() == []


def test_memory_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is touched: no process of this machine is killed for it."""
    transport = SocketTransport(US)
    monkeypatch.setattr(regions, "available_bytes", lambda: 1 << 20)
    with pytest.raises(TransportError, match="not enough memory"):
        transport.allocate(2 << 20)
    transport.allocate(1 << 20)
    transport.close()


def test_a_taken_port_leaves_nothing_behind() -> None:
    """The first listener is closed when the second one fails; the fixture looks."""
    one = SocketTransport(US, families=["tcp"])
    mine = decode(one.descriptor(), "socket")
    (address,) = decode_home(US, mine.blob).addresses
    other = SocketTransport(Incarnation(b"o" * 16), port=address.port)
    with pytest.raises(TransportError, match="cannot listen on"):
        other.descriptor()
    other.close()
    one.close()


def test_a_forked_child_has_no_transport() -> None:
    """Trap: a child that inherits the sockets would hide its parent's death."""
    with Pair(RegistryHarness("socket")) as pair:
        fd = pair.receiver.transport.fileno()
        assert fd is not None
        child = os.fork()
        if child == 0:
            closed = pair.receiver.transport.fileno() is None and not pair.receiver.transport.poll()
            try:
                os.fstat(fd)
            except OSError:
                os._exit(0 if closed else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 4096)), notify=b"alive"))
        pump(pair.receiver, until=lambda: pair.receiver.record.payloads == [b"alive"])


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_death_is_seen_although_a_forked_child_lives(tmp_path: Path, family: str) -> None:
    pipe = str(tmp_path / "until")
    os.mkfifo(pipe)
    harness = RegistryHarness("socket", families=[family])
    mine = Watched(harness.create())
    peer = harness.peer()
    try:
        local = mine.transport.allocate(16 << 20)
        source = peer.allocate(16 << 20)
        peer.connect(mine.transport.descriptor())
        lease = whole_lease(mine, local.region_id)
        mine.transport.grant(lease)
        peer.request("fork", until=pipe)
        for _ in range(20):
            peer.submit(source, local.region_id, one_piece(1 << 20, 16 << 20), lease, b"n")
        peer.kill()
        pump(mine, until=lambda: bool(mine.record.deaths), timeout_s=5.0)
        assert mine.record.deaths[0].fenced
    finally:
        with open(pipe, "wb"):
            pass
        peer.close()
        mine.transport.close()


def test_a_transport_that_is_not_closed_does_not_keep_the_interpreter() -> None:
    program = f"""
import sys; sys.path[:] = {sys.path!r}
from pdcore.testing.transport_harness import Pair, RegistryHarness
pair = Pair(RegistryHarness("socket"), 1 << 24)
pair.submit(pair.lease(), pair.batch((0, 0, 1 << 24)))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_no_thread_and_no_listener_before_they_are_needed() -> None:
    """Whoever only asks what it can do pays for nothing."""
    before = threading.active_count()
    transport = SocketTransport(US)
    assert threading.active_count() == before
    assert transport.close() == []
    assert transport.close() == []
    assert transport.poll() == []


CHECKS = ("cancel_quiesces", "revoke_ends_writes", "release_ends_notifications")


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_rights_end_as_the_suite_demands(family: str) -> None:
    """The checks that matter most here, in the default run; nox -s conformance has all."""
    report = run_conformance(RegistryHarness("socket", families=[family]), only=CHECKS)
    assert report.ok, report.failed
