from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time

import attrs
import pytest

pytest.importorskip("torch", reason="torchdist needs the extra `torch`")

from pdcore.errors import ConfigError, TransportError
from pdcore.testing.conformance import CHECKS, Check, run_check
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import Watched, pump, same
from pdcore.testing.world import World, make_world
from pdcore.transports import regions, torchdist
from pdcore.transports.base import Revocation, Transport
from pdcore.transports.descriptor import decode
from pdcore.transports.registry import (
    WorkerPlace,
    create,
    create_for_worker,
    load,
    require_reach,
)
from pdcore.transports.torchdist import CAPS, TorchDistTransport, why_unavailable
from pdcore.transports.torchdist_wire import (
    decode_address,
)
from pdcore.types import Incarnation, RoomKey
from tests.unit.transports.exhaustion import descriptors_left
from tests.unit.transports.torchdist_rig import HOST, SOON_S, warm_up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
US = Incarnation(b"u" * 16)

#: The rest takes processes of its own, or many turns: `nox -s conformance`.
QUICK = [
    check
    for check in CHECKS
    if check.guarantee != "process" and check.name not in ("cycles_without_growth",)
]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.mark.parametrize("check", QUICK, ids=[check.name for check in QUICK])
def test_within_one_process(check: Check) -> None:
    """Two transports of one process: groups are objects, not torch's global ones."""
    assert run_check(check, RegistryHarness("torchdist", cycles=30), CAPS) is None


def test_nothing_of_torch_is_imported_before_it_is_made() -> None:
    """R76: chosen by name; doctor and the registry say what works without importing it."""
    program = f"""
import sys; sys.path[:] = {sys.path!r}
import pdcore
from pdcore.transports import registry
assert registry.available()["torchdist"] is None
assert registry.load("torchdist").caps.native_notify
import pdcore.transports.torchdist_group, pdcore.transports.torchdist_receiver
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_elsewhere_the_reason_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unavailable() is None
    monkeypatch.setattr(torchdist.importlib.util, "find_spec", lambda name: None)
    assert why_unavailable() == "torch is not installed"
    assert "pdcore[torch]" in load("torchdist").remedy
    monkeypatch.setattr(torchdist.sys, "platform", "darwin")
    assert "darwin" in str(why_unavailable())
    with pytest.raises(TransportError, match="does not work on this machine"):
        create("torchdist", US)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"port": 70_000}, "port must be 0 .* 65535, got 70000"),
        ({"host": "prefill.example"}, "numeric address"),
        ({"host": "192.0.2.1"}, r"192\.0\.2\.1"),
        ({"backend": "nccl"}, "choose one of gloo, hccl"),
        ({"backend": "hccl"}, r"pdcore\[npu\]"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], why: str) -> None:
    with pytest.raises(TransportError, match=why):
        create("torchdist", US, **options)


def test_what_is_missing_is_declared() -> None:
    """Two-sided: the receiver takes part, and what it enforces it declares."""
    assert not CAPS.one_sided
    assert CAPS.revocation is Revocation.RECEIVER_ENFORCED
    assert CAPS.device_kinds == ("cpu",)


def test_a_worker_listens_where_its_peers_reach_it() -> None:
    """Cross-host: at the advertised address, which torch hands on to the other side."""
    require_reach("torchdist", ["10.9.9.9"])
    place = WorkerPlace(bind_host="0.0.0.0", advertise_host="127.0.0.2")
    transport = create_for_worker("torchdist", US, place)
    try:
        address = decode_address(decode(transport.descriptor(), "torchdist").blob)
        assert address.host == "127.0.0.2"
    finally:
        transport.close()
    with pytest.raises(ConfigError, match="asks nobody for a secret"):
        create_for_worker("torchdist", US, attrs.evolve(place, secret="0123456789abcdef"))


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 9, 12])
def test_without_descriptors_it_says_so_and_leaves_none_open(count: int) -> None:
    """G7, and nothing but TransportError: anything else ends the loop of the worker. With
    nine left, gloo ended the whole process while it built a group."""
    peer, before = (TorchDistTransport(Incarnation(name * 16)) for name in (b"p", b"b"))
    descriptor = peer.descriptor()
    with descriptors_left(count):
        for call in (before.descriptor, lambda: before.connect(descriptor)):
            with contextlib.suppress(TransportError):
                call()
        for link in before._sender._links:
            link.join(SOON_S)
    before.connect(descriptor)
    assert before.close() == peer.close() == []


def test_memory_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is touched: where the kernel promises more than it has, whoever touched it
    was killed for it."""
    transport = TorchDistTransport(US)
    monkeypatch.setattr(regions, "available_bytes", lambda: 1 << 20)
    with pytest.raises(TransportError, match="not enough memory"):
        transport.allocate(2 << 20)
    transport.allocate(1 << 20)
    assert transport.close() == []


def test_ipv6() -> None:
    with Pair(RegistryHarness("torchdist", host="::1")) as pair:
        finish(pair, pair.submit(pair.lease(), pair.batch((5, 7, 60_000))))
        assert same(pair.target.buffer[7:60_007], pair.source.buffer[5:60_005])


def test_the_smaller_chunk_of_the_two_sides_counts() -> None:
    receiver = Watched(create("torchdist", US, chunk_bytes=4096))
    with Pair(RegistryHarness("torchdist")) as pair:
        target = receiver.transport.allocate(1 << 16)
        pair.receiver, other = receiver, pair.receiver
        pair.target = target
        pair.session = pair.sender.transport.connect(receiver.transport.descriptor())
        finish(pair, pair.submit(pair.lease(), pair.batch((1, 2, 50_000))))
        assert same(target.buffer[2:50_002], pair.source.buffer[1:50_001])
        pair.receiver = other
        receiver.transport.close()


def test_a_forked_child_has_no_transport() -> None:
    """Trap: a child that inherits the connections would hide its parent's death."""
    with Pair(RegistryHarness("torchdist")) as pair:
        child = os.fork()
        if child == 0:
            transport = pair.receiver.transport
            closed = transport.fileno() is None and not transport.poll() and not transport.close()
            os._exit(0 if closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 4096)), notify=b"alive"))
        pump(pair.receiver, until=lambda: pair.receiver.record.payloads == [b"alive"])


def run_for_real(world: World, key: RoomKey, bells: list[int]) -> None:
    """Step the workers, and wait for the transports' threads in between: the world's clock
    stands still, so no deadline passes meanwhile."""
    deadline = time.monotonic() + SOON_S
    while world.decode.result(key) is None or any(
        rank.worker.core.live_keys() for rank in world.ranks.values()
    ):
        assert time.monotonic() < deadline, (
            f"{[r.worker.core.snapshot() for r in world.ranks.values()]}"
        )
        if not world.step():
            select.select(bells, [], [], 0.01)
            if world.network.next_due_s() is not None:
                world.jump()


def test_a_request_is_served_over_it() -> None:
    """End to end: prefill's KV of real requests, of one block and of many, moves through
    gloo into the blocks that decode granted; the engine there checks every byte of it."""
    made: list[TorchDistTransport] = []

    def make(incarnation: Incarnation, name: str) -> Transport:
        made.append(TorchDistTransport(incarnation, host=HOST))
        return made[-1]

    world = make_world(transport=make)
    try:
        bells = [bell for transport in made if (bell := transport.fileno()) is not None]
        for prompt in ([7, 8, 9], list(range(3, 300))):
            key = world.submit(prompt)
            run_for_real(world, key, bells)
            result = world.decode.result(key)
            assert result is not None
            assert result.failure is None
            assert len(world.decode.tokens(key)) == 8
    finally:
        for transport in made:
            assert transport.close() == []
