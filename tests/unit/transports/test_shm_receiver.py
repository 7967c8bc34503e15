from __future__ import annotations

import os
import select
import socket
import sys
import time

import pytest

from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import pump
from pdcore.transports import shm_receiver
from pdcore.transports.descriptor import decode
from pdcore.transports.process_proof import this_process
from pdcore.transports.shm import ShmTransport
from pdcore.transports.shm_links import BYE
from pdcore.transports.shm_wire import (
    Hello,
    Kind,
    decode_address,
    dial,
    pack,
    pack_hello,
    pack_notify,
    pack_revoke,
    receive_offer,
)
from pdcore.types import Incarnation, LeaseId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is Linux")
STRANGER = Incarnation(b"s" * 16)


def raw_peer(pair: Pair) -> socket.socket:
    """A peer of the right uid that got in, and now says what it likes."""
    found = decode(pair.receiver.transport.descriptor(), "shm")
    sock = dial(decode_address(found.blob).name, 2.0)
    sock.sendall(pack_hello(Hello(STRANGER, found.incarnation, this_process().start_ticks)))
    for _, fd in receive_offer(sock, time.monotonic() + 10).shared:
        os.close(fd)
    sock.setblocking(False)
    return sock


@pytest.mark.parametrize(
    "frame",
    [
        b"nonsense",
        pack(Kind.NOTIFY, b"no lease"),
        pack(Kind.REVOKE),
        pack(Kind.HELLO),
        b"x" * 70000,
    ],
)
def test_nonsense_costs_only_its_own_connection(frame: bytes) -> None:
    """D40's spirit on this socket: no peer's bytes can do more than end its own link."""
    with Pair(RegistryHarness("shm")) as pair, raw_peer(pair) as sock:
        sock.send(frame)
        ended: list[bytes] = []

        def hung_up() -> bool:
            try:
                ended.append(sock.recv(10))
            except BlockingIOError:
                return False
            return True

        pump(pair.receiver, until=hung_up)
        assert ended == [b""]
        pair.submit(pair.lease(), pair.batch((0, 0, 64)), notify=b"still served")
        pump(pair.receiver, until=lambda: pair.receiver.record.payloads == [b"still served"])
        assert not pair.receiver.record.deaths


def test_a_notification_without_a_lease_wakes_nobody() -> None:
    with Pair(RegistryHarness("shm")) as pair, raw_peer(pair) as sock:
        lease = pair.lease()
        sock.send(pack_notify(lease.lease, b"granted"))
        pump(pair.receiver, until=lambda: pair.receiver.record.payloads == [b"granted"])
        pair.receiver.transport.release(lease.lease)
        sock.send(pack_notify(lease.lease, b"released"))
        sock.send(BYE)
        pump(pair.receiver, until=lambda: bool(pair.receiver.record.deaths))
        (death,) = pair.receiver.record.deaths
        assert (death.incarnation, death.fenced) == (STRANGER, True)
        assert pair.receiver.record.payloads == [b"granted"]


def test_revoke_reaches_those_who_just_arrived() -> None:
    with Pair(RegistryHarness("shm")) as pair, raw_peer(pair) as sock:
        lease = pair.lease()
        pair.receiver.transport.revoke(lease.lease)
        pump(pair.receiver, until=lambda: bool(select.select([sock], [], [], 0)[0]))
        assert sock.recv(100) == pack_revoke(lease.lease)


def revoke_for_a_stopped_sender(limit: int) -> None:
    with Pair(RegistryHarness("shm")) as pair, raw_peer(pair) as sock:
        lease = pair.lease()
        receiver = pair.receiver.transport
        assert isinstance(receiver, ShmTransport)
        receiver.revoke(lease.lease)
        for counter in range(2000):
            receiver.revoke(LeaseId(receiver.incarnation, 1000 + counter))
        links = [one for one in receiver._links.links() if one.incarnation == STRANGER]
        assert [len(one.outbox) for one in links] == [limit], "they pile up"
        assert sock.recv(100) == pack_revoke(lease.lease)


def test_what_waits_for_a_stopped_sender_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """D23: and it hears first of what it may be writing."""
    monkeypatch.setattr(shm_receiver, "MAX_OUTBOX", 16)
    revoke_for_a_stopped_sender(16)
    monkeypatch.setattr(shm_receiver, "MAX_OUTBOX", 1 << 30)
    with pytest.raises(AssertionError, match="pile up"):
        revoke_for_a_stopped_sender(16)


def test_a_withdrawn_region_is_not_handed_out() -> None:
    with Pair(RegistryHarness("shm")) as pair:
        pair.receiver.transport.deregister(pair.target)
        assert decode(pair.receiver.transport.descriptor(), "shm").regions == {}
        # The connection made before keeps its mapping; a new one gets nothing.
        pair.sender.transport.connect(pair.receiver.transport.descriptor())
