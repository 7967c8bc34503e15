"""Mooncake's engine: what it is told and asked, and, where the wheel is, what really happens."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.testing.transport_checks_data import finish
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.transports import mooncake
from pdcore.transports.base import Revocation
from pdcore.transports.engines import LANDS_LATE_BETWEEN_HOSTS_S, WriteFailed
from pdcore.transports.mooncake import MooncakeEngine
from pdcore.transports.onesided import caps_of
from pdcore.transports.onesided_memory import StillRegistered
from pdcore.transports.registry import WorkerPlace, load
from pdcore.types import Incarnation

HOST = "127.0.0.1"
real = pytest.mark.skipif(
    mooncake.why_unavailable() is not None, reason=str(mooncake.why_unavailable())
)

if mooncake.why_unavailable() is None:
    # It opens descriptors and starts threads, once, which no test is to blame for.
    importlib.import_module("mooncake.engine")


class Fake:
    """The vendor's calls as they are named; none moves a byte. A module cannot be had
    everywhere, and what is told to it must hold there, too."""

    made: list[Fake]
    code = 0
    start_code = 0

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []
        self.made.append(self)

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        self.said.append((host, metadata, protocol, device))
        return self.start_code

    def get_rpc_port(self) -> int:
        return 15000 + len(self.made)

    def register_memory(self, base: int, size_bytes: int) -> int:
        self.said.append(("register", base, size_bytes))
        return self.code

    def unregister_memory(self, base: int) -> int:
        self.said.append(("unregister", base))
        return self.code

    def batch_transfer_sync_write(
        self, name: str, local: list[int], remote: list[int], lengths: list[int]
    ) -> int:
        assert all(type(value) is int for value in (*local, *remote, *lengths))
        self.said.append((name, local, remote, lengths))
        return self.code


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fake]]:
    module = types.ModuleType("mooncake.engine")
    vars(module)["TransferEngine"] = Fake
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(Fake, "made", [], raising=False)
    return Fake


def row(*values: int) -> Int64Array:
    return np.array(values, np.int64)


def test_the_vendor_never_stops_waiting_before_the_connection_does(fake: type[Fake]) -> None:
    """Measured: a call that timed out goes on writing. So none may time out."""
    MooncakeEngine(HOST, stall_timeout_s=2.5)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert int(getenv(b"MC_TRANSFER_TIMEOUT")) > 365 * 86400
    assert getenv(b"MC_TCP_PROGRESS_TIMEOUT_SEC") == b"3"
    assert getenv(b"MC_TCP_STATUS_TIMEOUT_SEC") == b"3"
    assert fake.made[0].said == [(HOST, "P2PHANDSHAKE", "tcp", "")]


def test_one_call_for_each_write(fake: type[Fake]) -> None:
    """Never the status call, which looks at the first entry of a batch only."""
    one, two = MooncakeEngine(HOST), MooncakeEngine("10.0.0.5")
    one.register(4096, 64)
    peer = one.open(two.address())
    one.write(peer, row(4096, 4112), row(8192, 9000), row(8, 16), lambda: True)
    assert fake.made[0].said[1:] == [
        ("register", 4096, 64),
        ("10.0.0.5:15002", [], [], []),
        ("10.0.0.5:15002", [4096, 4112], [8192, 9000], [8, 16]),
    ]
    one.unregister(4096, 64)
    one.shut(peer)
    one.shut(peer)
    one.close()
    one.close()
    with pytest.raises(TransportError, match="closed"):
        one.open(two.address())


def test_what_fails_is_said_and_may_land_late(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MooncakeEngine(HOST)
    peer = engine.open(engine.address())
    monkeypatch.setattr(fake, "code", -1)
    with pytest.raises(WriteFailed, match=r"could not write to 127.0.0.1:15001 \(-1\)") as caught:
        engine.write(peer, row(1), row(2), row(3), lambda: False)
    assert caught.value.may_land
    with pytest.raises(TransportError, match="register 64 bytes"):
        engine.register(4096, 64)
    with pytest.raises(TransportError, match="cannot be reached"):
        engine.open(engine.address())
    monkeypatch.setattr(fake, "start_code", -1)
    with pytest.raises(TransportError, match="does not start with protocol 'rdma'"):
        MooncakeEngine(HOST, protocol="rdma")


def by_name_alone(engine: MooncakeEngine, address: bytes) -> int:
    """The seed's rule: a peer is its host and port, and the vendor remembers the rest."""
    name = address[16:]
    return engine.open(bytes(16) + name)


def meets_the_new_life(fake: type[Fake], engine: MooncakeEngine, opening: object) -> None:
    assert callable(opening)
    one, two = life_at_one_port(1), life_at_one_port(2)
    first = len(fake.made)
    opening(engine, one)
    opening(engine, one)
    assert len(fake.made) <= first + 1
    before = len(fake.made)
    peer = opening(engine, two)
    assert len(fake.made) == before + 1, "addresses of the old life would be used for the new one"
    engine.write(peer, row(1), row(2), row(3), lambda: False)
    assert fake.made[-1].said[-1] == (f"{HOST}:15000", [1], [2], [3])


def test_a_life_at_the_port_of_another_is_met_anew(fake: type[Fake]) -> None:
    """D58, rule 7: the vendor keeps what it has learnt of a name for ever."""
    engine = MooncakeEngine(HOST)
    engine.register(4096, 64)
    meets_the_new_life(fake, engine, MooncakeEngine.open)
    assert ("register", 4096, 64) in fake.made[-1].said
    engine.register(8192, 64)
    assert all(("register", 8192, 64) in one.said for one in fake.made)
    with pytest.raises(AssertionError, match="old life"):
        meets_the_new_life(fake, MooncakeEngine(HOST), by_name_alone)


def two_engines(fake: type[Fake]) -> tuple[MooncakeEngine, Fake, Fake]:
    """One that has met two lives at one port, and the vendor's two."""
    engine = MooncakeEngine(HOST)
    for life in (1, 2):
        engine.open(life_at_one_port(life))
    first, second = fake.made
    return engine, first, second


def life_at_one_port(life: int) -> bytes:
    return bytes([life]) * 16 + b"\x98\x3a" + HOST.encode()


def test_memory_that_one_engine_refuses_none_has(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D58: its owner may give it to somebody else, and peers would write there."""
    engine, first, second = two_engines(fake)
    monkeypatch.setattr(second, "code", -1)
    with pytest.raises(TransportError, match=r"could not register 64 bytes \(-1\)") as caught:
        engine.register(4096, 64)
    assert not isinstance(caught.value, StillRegistered)
    assert first.said[-2:] == [("register", 4096, 64), ("unregister", 4096)]
    monkeypatch.setattr(second, "code", 0)
    engine.open(life_at_one_port(3))
    assert ("register", 4096, 64) not in fake.made[-1].said


def test_what_cannot_be_taken_back_is_said_to_be_there(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, first, second = two_engines(fake)
    monkeypatch.setattr(second, "code", -1)
    monkeypatch.setattr(first, "unregister_memory", lambda base: -7)
    with pytest.raises(StillRegistered, match=r"nor take back .*\[-7\].*stays"):
        engine.register(4096, 64)


def test_every_engine_is_asked_to_let_go(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, first, second = two_engines(fake)
    engine.register(4096, 64)
    monkeypatch.setattr(first, "code", -1)
    with pytest.raises(TransportError, match="unregister 64 bytes"):
        engine.unregister(4096, 64)
    assert second.said[-1] == ("unregister", 4096)


def meeting_one_holds_up_nobody(
    fake: type[Fake],
    monkeypatch: pytest.MonkeyPatch,
    engine: MooncakeEngine,
    patience_s: float,
) -> None:
    """While the vendor starts another engine for a life at a known port, the others are written
    to, met, and told of memory; and the new engine gets what was registered meanwhile."""
    starts, may_go = threading.Event(), threading.Event()
    initialize = Fake.initialize

    def slow(one: Fake, *settings: str) -> int:
        starts.set()
        assert may_go.wait(20)
        return initialize(one, *settings)

    engine.register(4096, 64)
    known = engine.open(life_at_one_port(1))
    monkeypatch.setattr(fake, "initialize", slow)
    met: list[int] = []
    meeting = threading.Thread(target=lambda: met.append(engine.open(life_at_one_port(2))))
    meeting.start()
    assert starts.wait(20)

    def others() -> None:
        engine.write(known, row(1), row(2), row(3), lambda: False)
        engine.open(life_at_one_port(1))
        engine.register(8192, 64)
        engine.unregister(4096, 64)
        assert engine.address()

    working = threading.Thread(target=others)
    working.start()
    try:
        working.join(patience_s)
        assert not working.is_alive(), "everybody waits for one peer"
    finally:
        may_go.set()
        working.join()
        meeting.join()
    assert len(met) == 1
    first, second = fake.made
    assert second.said[1:3] == [("register", 8192, 64), (f"{HOST}:15000", [], [], [])]
    assert ("unregister", 4096) in first.said


def test_one_peer_at_a_port_that_is_used_again_holds_up_nobody(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D23: to start an engine takes the vendor a second or more."""
    meeting_one_holds_up_nobody(fake, monkeypatch, MooncakeEngine(HOST), 20.0)


def test_one_lock_for_all_is_found(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    """D23: the check fails on the former rule."""
    engine = MooncakeEngine(HOST)
    one_lock = threading.RLock()
    for name in ("_starting", "_registering", "_lock"):
        monkeypatch.setattr(engine, name, one_lock)
    with pytest.raises(AssertionError, match="everybody waits"):
        meeting_one_holds_up_nobody(fake, monkeypatch, engine, 0.3)


def test_those_who_need_a_new_engine_share_it(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that comes back at its old ports is met by one engine more, not by one a rank."""
    engine = MooncakeEngine(HOST)
    ports = [bytes([port]) + b"\x3a" + HOST.encode() for port in range(8)]
    for port in ports:
        engine.open(bytes([1]) * 16 + port)
    meetings = [
        threading.Thread(target=engine.open, args=(bytes([2]) * 16 + port,)) for port in ports
    ]
    for one in meetings:
        one.start()
    for one in meetings:
        one.join()
    assert len(fake.made) == 2


def test_addresses_from_peers_are_checked(fake: type[Fake]) -> None:
    engine = MooncakeEngine(HOST)
    for bad in (b"", bytes(17), bytes(18), bytes(18) + b"peer.example", bytes(18) + b"::1"):
        with pytest.raises(TransportError, match="malformed address"):
            engine.open(bad)
    with pytest.raises(TransportError, match="malformed address") as refused:
        engine.open(bytes(1 << 16))
    assert len(str(refused.value)) < 200
    assert len(fake.made) == 1


def test_options_that_cannot_be(fake: type[Fake]) -> None:
    with pytest.raises(TransportError, match="protocol: 'udp' is none of tcp, rdma, ascend"):
        MooncakeEngine(HOST, protocol="udp")
    for host in ("::1", "localhost", ""):
        with pytest.raises(TransportError, match="numeric IPv4"):
            MooncakeEngine(host)
    with pytest.raises(TransportError, match="torch_npu and CANN"):
        MooncakeEngine(HOST, protocol="ascend")
    assert fake.made == []


def test_ascend_has_huge_pages_and_its_device_first(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []

    class Device:
        def enter_thread(self) -> None:
            order.append(len(fake.made))

    monkeypatch.setattr(mooncake, "make_backend", lambda *arguments: Device())
    engine = MooncakeEngine(HOST, protocol="ascend", device_index=3)
    assert order == [0]
    assert engine.limits.alignment == 2 << 20
    assert engine.limits.device_kinds == ("cpu", "npu")
    assert MooncakeEngine(HOST).limits.device_kinds == ("cpu",)
    assert fake.made[0].said == [(HOST, "P2PHANDSHAKE", "ascend", "")]


@pytest.mark.parametrize(
    ("host", "late_s"), [(HOST, 30.0), ("10.0.0.5", LANDS_LATE_BETWEEN_HOSTS_S)]
)
def test_between_hosts_bytes_land_later(fake: type[Fake], host: str, late_s: float) -> None:
    """D3: the kernel of a sender that died behind a cut cable sends again when it is back."""
    engine = MooncakeEngine(host)
    assert engine.limits.lands_late_s == late_s
    plugin = load("mooncake")
    told = plugin.caps if host == HOST else plugin.caps_between_hosts
    assert told == caps_of(engine.limits, cross_host=True), "people are told something else"


def test_what_it_declares() -> None:
    plugin = load("mooncake")
    assert plugin.caps is not None
    assert plugin.caps.revocation is Revocation.QUARANTINE
    assert plugin.caps.quarantine_s == 30.0
    assert not plugin.caps.death_fences
    place = WorkerPlace("0.0.0.0", "10.0.0.5", "a secret of enough bytes")
    assert plugin.options_at is not None
    assert plugin.options_at(place) == {
        "host": "0.0.0.0",
        "advertise": "10.0.0.5",
        "secret": place.secret,
    }


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found without importing, which would load the whole engine into `pdcore doctor`."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "mooncake-transfer-engine-non-cuda is not installed" in str(mooncake.why_unavailable())
    spec = importlib.util.spec_from_loader("mooncake", None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert "is not installed" in str(mooncake.why_unavailable())
    (tmp_path / "engine.so").touch()

    def absent(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(mooncake.ctypes, "CDLL", absent)
    assert "needs libibverbs1 of the system: libibverbs.so.1: cannot" in str(
        mooncake.why_unavailable()
    )
    monkeypatch.setattr(mooncake.sys, "platform", "darwin")
    assert "this is darwin" in str(mooncake.why_unavailable())


def test_a_wheel_that_cannot_be_loaded_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportError, match=r"pdcore\[mooncake\].*libibverbs1"):
        MooncakeEngine(HOST)


@real
def test_the_engine_moves_bytes_between_two_of_them() -> None:
    one, two = MooncakeEngine(HOST), MooncakeEngine(HOST)
    source, target = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
    try:
        two.register(target.ctypes.data, 4096)
        peer = one.open(two.address())
        at = source.ctypes.data, target.ctypes.data
        one.write(
            peer, row(at[0], at[0] + 96), row(at[1] + 8, at[1] + 1024), row(8, 100), lambda: False
        )
        assert target[8:16].tolist() == source[:8].tolist()
        assert target[1024:1124].tolist() == source[96:196].tolist()
        with pytest.raises(WriteFailed):
            one.write(peer, row(at[0]), row(at[1] + 4096), row(64), lambda: False)
        two.unregister(target.ctypes.data, 4096)
        with pytest.raises(WriteFailed):
            one.write(peer, row(at[0]), row(at[1]), row(64), lambda: False)
    finally:
        one.close()
        two.close()


@real
def test_a_pair_through_the_registry() -> None:
    harness = RegistryHarness("mooncake", secret="a secret of enough bytes")
    with Pair(harness, 1 << 20) as pair:
        rows = [(i * 64, (1023 - i) * 64, 64) for i in range(1024)]
        finish(pair, pair.submit(pair.lease(), pair.batch(*rows), notify=b"n"))
        source = np.frombuffer(pair.source.buffer, np.uint8)[: 1 << 16].reshape(1024, 64)
        target = np.frombuffer(pair.target.buffer, np.uint8)[: 1 << 16].reshape(1024, 64)
        assert (source == target[::-1]).all()


@real
def test_other_secrets_are_refused() -> None:
    one = load("mooncake").create(Incarnation(b"1" * 16), secret="a secret of enough bytes")
    two = load("mooncake").create(Incarnation(b"2" * 16), secret="another of enough bytes")
    try:
        two.allocate(4096)
        with pytest.raises(TransportError, match="authentication failed"):
            one.connect(two.descriptor())
    finally:
        one.close()
        two.close()
