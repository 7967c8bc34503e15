from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import PeerGone, TransportError
from pdcore.transports import socket_address as at
from pdcore.transports.process_proof import ProcessKey
from pdcore.transports.socket_address import TCP, UNIX, Address, Home, Origin
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux")
US = Incarnation(b"u" * 16)
HERE = Origin(b"b" * 16, 1, 2, ProcessKey(3, 4))
has_ipv6 = pytest.mark.skipif(
    not os.path.exists("/proc/net/if_inet6"), reason="this host has no IPv6"
)


def soon() -> float:
    return time.monotonic() + 5


addresses = st.lists(
    st.builds(Address, st.just(TCP), st.sampled_from(["127.0.0.1", "::1"]), st.integers(0, 65535))
    | st.builds(Address, st.just(UNIX), st.from_regex(r"[a-z0-9-]{1,100}", fullmatch=True)),
    min_size=1,
    max_size=4,
)


@given(addresses)
def test_blobs(found: list[Address]) -> None:
    home = Home(HERE, tuple(found))
    assert at.decode_home(US, at.encode_home(US, home)) == home


@given(st.binary(max_size=120))
def test_random_blobs_are_refused(blob: bytes) -> None:
    """G6: nothing is dialled on the word of a damaged descriptor."""
    with pytest.raises(TransportError):
        at.decode_home(US, blob)


def test_the_addresses_of_one_life_are_not_anothers() -> None:
    """Rule 7: an address belongs to one incarnation."""
    blob = at.encode_home(US, Home(HERE, (Address(TCP, "127.0.0.1", 1),)))
    with pytest.raises(TransportError, match="not an address of this life"):
        at.decode_home(Incarnation(b"o" * 16), blob)
    with pytest.raises(TransportError, match="listens nowhere"):
        at.reachable(at.decode_home(US, at.encode_home(US, Home(HERE))), HERE)


def test_what_can_be_seen_from_here() -> None:
    assert HERE.sees_process_of(attrs.evolve(HERE, network=9))
    assert HERE.shares_network_with(attrs.evolve(HERE, pids=9))
    for other in (attrs.evolve(HERE, boot_id=b"o" * 16), attrs.evolve(HERE, network=8, pids=9)):
        assert not HERE.sees_process_of(other)
        assert not HERE.shares_network_with(other)
    mine = at.this_origin()
    assert mine.process.pid == os.getpid()
    assert at.decode_origin(mine.encode()) == mine
    with pytest.raises(TransportError):
        at.decode_origin(b"short")


def dial(address: Address) -> socket.socket:
    return at.dial(address, soon())


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=has_ipv6)])
def test_tcp(host: str) -> None:
    """IPv4 and IPv6: small frames go out at once, and a dead host is noticed."""
    listener, address = at.listen_tcp(host)
    with listener:
        assert address.host == host
        assert address.port
        with dial(address) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == at.KEEPALIVE_IDLE_S


@has_ipv6
def test_the_ipv6_wildcard_listens_for_both() -> None:
    listener, address = at.listen_tcp("::", "127.0.0.1")
    with listener, dial(address):
        pass


def test_unix_tells_who_calls() -> None:
    listener, address = at.listen_unix()
    with listener, dial(address) as sock:
        listener.setblocking(True)
        caller, _ = listener.accept()
        with caller:
            assert at.credentials(caller) == (os.getpid(), os.geteuid())
            assert at.credentials(sock)[1] == os.geteuid()


def test_the_nearest_address_comes_first_and_is_none_from_another_network() -> None:
    unix, tcp = Address(UNIX, "name"), Address(TCP, "127.0.0.1", 1)
    elsewhere = attrs.evolve(HERE, network=99)
    assert at.reachable(Home(HERE, (unix, tcp)), HERE) == [unix, tcp]
    assert at.reachable(Home(elsewhere, (unix, tcp)), HERE) == [tcp]
    with pytest.raises(TransportError, match="give it a TCP address"):
        at.reachable(Home(elsewhere, (unix,)), HERE)


def test_nobody_there() -> None:
    for listener, address in (at.listen_unix(), at.listen_tcp("127.0.0.1")):
        listener.close()
        with pytest.raises(PeerGone, match="nobody listens"):
            dial(address)


def test_names_are_never_looked_up() -> None:
    """A worker's loop must not wait for a name server."""
    with pytest.raises(TransportError, match="not a numeric IP address"):
        dial(Address(TCP, "localhost", 80))
    with pytest.raises(TransportError, match="not a numeric IP address"):
        at.listen_tcp("localhost")


def test_a_full_backlog_is_not_waited_for() -> None:
    """A stopped process has callers queueing: the next one gives up in time."""
    with socket.socket(socket.AF_UNIX) as listener:
        name = b"\0pdcore-test-%d-%d" % (os.getpid(), time.monotonic_ns())
        listener.bind(name)
        listener.listen(0)
        address = Address(UNIX, name[1:].decode())
        # One waits in a backlog of none.
        with dial(address), pytest.raises(PeerGone, match="does not answer"):
            at.dial(address, time.monotonic() + 0.05)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::"])
def test_a_wildcard_is_nobodys_address(host: str) -> None:
    with pytest.raises(TransportError, match="nobody can connect to"):
        at.listen_tcp("127.0.0.1" if host == "" else host, host or "0.0.0.0")


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(TransportError, match="cannot listen on"):
        at.listen_tcp("192.0.2.1")


def test_a_free_port_is_none_that_the_kernel_gives_to_others() -> None:
    """Between the look and its use a connection of anybody took one from that range: found by
    CI, in a check whose peer starts again at its address."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [at.free_port("127.0.0.1") for _ in range(20)]
    assert max(ports) < max(first, 32_000)
    for port in ports:
        at.listen_tcp("127.0.0.1", port=port)[0].close()
    with pytest.raises(TransportError, match=r"none of \d+ ports tried at '192.0.2.1'"):
        at.free_port("192.0.2.1")
