"""NIXL's engine for real: writes between agents of this process and of another, which is
killed and stopped. Skipped where the wheel is missing, except for what needs no wheel."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.transports import nixl
from pdcore.transports.base import Revocation
from pdcore.transports.engines import LANDS_LATE_BETWEEN_HOSTS_S, WriteFailed
from pdcore.transports.nixl import NixlEngine
from pdcore.transports.onesided import caps_of
from pdcore.transports.registry import WorkerPlace
from pdcore.types import Incarnation

MISSING = nixl.why_unavailable()
needs_wheel = pytest.mark.skipif(MISSING is not None, reason=f"nixl: {MISSING}")

MIB = 1 << 20
#: Longer than anything here takes; a hang is a failure, not a stuck run.
LIMIT_S = 30.0
#: How long it is watched that a write does not end.
WATCH_S = 0.3
#: One way only, so that the same is tested on every machine.
TCP = {"ucx_tls": "tcp", "ucx_device": "lo"}

Memory = npt.NDArray[np.uint8]


def incarnation() -> Incarnation:
    return Incarnation(os.urandom(16))


def base(memory: Memory) -> int:
    return int(memory.ctypes.data)


def memory_of(engine: NixlEngine, size_bytes: int, fill: int = 0) -> Memory:
    memory = np.full(size_bytes, fill, np.uint8)
    engine.register(base(memory), size_bytes)
    return memory


def write(
    engine: NixlEngine,
    peer: int,
    rows: list[tuple[int, int, int]],
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Rows are (local address, remote address, bytes)."""
    local, remote, lengths = np.array(rows, np.int64).T
    engine.write(peer, local, remote, lengths, is_stopping)


class Child:
    """An engine with one region in a process of its own."""

    def __init__(self, size_bytes: int, **options: str) -> None:
        here = os.path.dirname(os.path.abspath(__file__))
        program = (
            f"import sys; sys.path[:] = {[here, *sys.path]!r}; from test_nixl import serve; serve()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(size_bytes), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self.ask()
        self.address, self.base = bytes.fromhex(said["address"]), int(said["base"])

    def ask(self, word: str = "") -> dict[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if word:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        answer: dict[str, str] = json.loads(self.process.stdout.readline())
        return answer

    def ones(self) -> int:
        """How many bytes of its memory are 1."""
        return int(self.ask("ones")["ones"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def serve() -> None:
    """The child's side: say where we are, and answer until the end of input."""
    size_bytes, options = int(sys.argv[1]), json.loads(sys.argv[2])
    engine = NixlEngine(incarnation(), **options)
    memory = memory_of(engine, size_bytes)
    print(json.dumps({"address": engine.address().hex(), "base": str(base(memory))}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"ones": str(int(np.count_nonzero(memory == 1)))}), flush=True)


class Background:
    """One write in a thread, and how it ended."""

    def __init__(self, engine: NixlEngine, peer: int, rows: list[tuple[int, int, int]]) -> None:
        self.error: TransportError | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, peer, rows), daemon=True)
        self._thread.start()

    def _run(self, engine: NixlEngine, peer: int, rows: list[tuple[int, int, int]]) -> None:
        try:
            write(engine, peer, rows)
        except TransportError as error:
            self.error = error.with_traceback(None)

    def ends_within(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()


@pytest.fixture
def engine() -> Iterator[NixlEngine]:
    made = NixlEngine(incarnation(), **TCP)
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[NixlEngine]:
    made = NixlEngine(incarnation(), **TCP)
    yield made
    made.close()


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child(64 * MIB, **TCP)
    yield made
    made.close()


@needs_wheel
def test_vram_is_registered_by_address_and_not_allocated() -> None:
    """Pages of the host are none of a GPU's: NIXL answers NIXL_ERR_BACKEND for them."""
    transport = nixl.create(incarnation(), mem_type="VRAM")
    try:
        assert transport.caps.device_kinds == ("cuda",)
        with pytest.raises(TransportError, match=r"a device \(cuda\).*register it as a DeviceBuf"):
            transport.allocate(4096)
    finally:
        transport.close()


# --- without the wheel -------------------------------------------------------------------


def test_memory_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(TransportError, match="mem_type: 'HBM' is not one of DRAM, VRAM"):
        NixlEngine(incarnation(), mem_type="HBM")


@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"\x00",
        b"\x00\x20" + b"0" * 32,
        b"\x00\x20" + b"Z" * 32 + b"metadata",
        b"\x00\x03abcmetadata",
        b"\xff\xff" + b"0" * 100,
        b"\x00\x20" + b"0" * 32 + b"m" * nixl.MAX_ADDRESS_BYTES,
    ],
)
def test_malformed_addresses(address: bytes) -> None:
    with pytest.raises(TransportError, match="an address"):
        nixl._parse_address(address)


# --- agents of this process --------------------------------------------------------------


@needs_wheel
def test_writes_arrive_where_they_belong_and_nowhere_else(
    engine: NixlEngine, other: NixlEngine
) -> None:
    source, target = memory_of(engine, MIB, fill=1), memory_of(other, MIB)
    peer = engine.open(other.address())
    rows = [
        (base(source) + at, base(target) + 2 * at, 100 + at % 7) for at in range(0, MIB // 2, 512)
    ]
    write(engine, peer, rows)
    expected = np.zeros(MIB, np.uint8)
    for local, remote, size in rows:
        del local
        expected[remote - base(target) :][:size] = 1
    assert np.array_equal(target, expected)
    engine.shut(peer)
    engine.shut(peer)
    with pytest.raises(PeerGone, match="no peer"):
        write(engine, peer, rows)


@needs_wheel
def test_both_write_to_each_other(engine: NixlEngine, other: NixlEngine) -> None:
    here, there = memory_of(engine, MIB, fill=1), memory_of(other, MIB, fill=2)
    out, back = engine.open(other.address()), other.open(engine.address())
    half = MIB // 2
    write(engine, out, [(base(here), base(there), half)])
    write(other, back, [(base(there) + half, base(here) + half, half)])
    assert (there[:half] == 1).all()
    assert (here[half:] == 2).all()


@needs_wheel
def test_memory_that_the_peer_has_not_registered_is_not_written(
    engine: NixlEngine, other: NixlEngine
) -> None:
    """Refused by NIXL before byte 0, with its peer as good as before."""
    source, target = memory_of(engine, MIB, fill=1), memory_of(other, MIB)
    elsewhere = np.zeros(MIB, np.uint8)
    peer = engine.open(other.address())
    with pytest.raises(WriteFailed) as caught:
        write(engine, peer, [(base(source), base(elsewhere), MIB)])
    assert not caught.value.may_land
    assert not caught.value.is_peer_gone
    assert not elsewhere.any()
    write(engine, peer, [(base(source), base(target), MIB)])
    assert target.all()


@needs_wheel
def test_a_peer_that_is_opened_again_brings_its_new_memory(
    engine: NixlEngine, other: NixlEngine
) -> None:
    source, target = memory_of(engine, MIB, fill=1), memory_of(other, MIB)
    first = engine.open(other.address())
    later = memory_of(other, MIB)
    second = engine.open(other.address())
    write(engine, second, [(base(source), base(later), MIB)])
    assert later.all()
    engine.shut(second)
    write(engine, first, [(base(source), base(target), MIB)])
    assert target.all()


@needs_wheel
def test_a_second_agent_of_one_name_is_refused(engine: NixlEngine, other: NixlEngine) -> None:
    """What a peer says of itself does not redirect what is meant for another."""
    source, target = memory_of(engine, MIB, fill=1), memory_of(other, MIB)
    impostor = NixlEngine(Incarnation(bytes.fromhex(other._name)), **TCP)
    theirs = memory_of(impostor, MIB)
    peer = engine.open(other.address())
    with pytest.raises(TransportError, match="use the peer's metadata"):
        engine.open(impostor.address())
    write(engine, peer, [(base(source), base(target), MIB)])
    assert target.all()
    assert not theirs.any()
    impostor.close()


@needs_wheel
def test_metadata_under_another_name_is_refused(engine: NixlEngine, other: NixlEngine) -> None:
    address = other.address()
    renamed = address[:2] + b"0" * 32 + address[34:]
    with pytest.raises(TransportError, match="is that of"):
        engine.open(renamed)
    assert engine.open(address)


@needs_wheel
@pytest.mark.parametrize("damage", ["truncated", "random", "flipped"])
def test_damaged_metadata_is_refused_or_harmless(
    engine: NixlEngine, other: NixlEngine, damage: str
) -> None:
    """NIXL's own C++ takes it apart: no crash, and the engine goes on. What claimed the name
    first may have spoiled it for good, so peers are taken at their word only after the side
    channel has met them."""
    address, head = other.address(), 34
    rng = np.random.default_rng(7)
    for turn in range(20):
        metadata = bytearray(address[head:])
        if damage == "truncated":
            del metadata[turn * len(metadata) // 20 :]
        elif damage == "random":
            metadata[:] = rng.bytes(len(metadata))
        else:
            # Of the tags and lengths that come first; UCX's part is its peer's own affair.
            metadata[turn % 40] ^= 0x80
        with pytest.raises(TransportError):
            engine.open(address[:head] + bytes(metadata))
    fresh = NixlEngine(incarnation(), **TCP)
    source, target = memory_of(engine, MIB, fill=1), memory_of(fresh, MIB)
    write(engine, engine.open(fresh.address()), [(base(source), base(target), MIB)])
    assert target.all()
    fresh.close()


@needs_wheel
def test_memory_may_be_registered_twice(engine: NixlEngine, other: NixlEngine) -> None:
    source, target = memory_of(engine, MIB, fill=1), memory_of(other, MIB)
    other.register(base(target), MIB)
    other.unregister(base(target), MIB)
    write(engine, engine.open(other.address()), [(base(source), base(target), MIB)])
    assert target.all()
    other.unregister(base(target), MIB)
    with pytest.raises(TransportError, match="not registered"):
        other.unregister(base(target), MIB)


@needs_wheel
def test_nothing_is_begun_for_nobody(engine: NixlEngine, other: NixlEngine) -> None:
    source, target = memory_of(engine, MIB, fill=1), memory_of(other, MIB)
    peer = engine.open(other.address())
    with pytest.raises(WriteFailed, match="nobody waits") as caught:
        write(engine, peer, [(base(source), base(target), MIB)], lambda: True)
    assert not caught.value.may_land
    assert not target.any()


@needs_wheel
def test_after_close_nothing_works(engine: NixlEngine, other: NixlEngine) -> None:
    source = memory_of(engine, MIB)
    peer = engine.open(other.address())
    engine.close()
    engine.close()
    for call in (
        engine.address,
        lambda: engine.register(base(source), MIB),
        lambda: engine.unregister(base(source), MIB),
        lambda: engine.open(other.address()),
        lambda: write(engine, peer, [(base(source), base(source), 8)]),
    ):
        with pytest.raises(TransportError, match="closed"):
            call()
    engine.shut(peer)


@needs_wheel
def test_ucx_that_does_not_start_is_said_with_its_options() -> None:
    with pytest.raises(TransportError, match=r"start an agent with .*nowhere0"):
        NixlEngine(incarnation(), ucx_device="nowhere0")


@needs_wheel
def test_too_many_regions_for_an_address(
    engine: NixlEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MAX_ADDRESS_BYTES", 300)
    memory = memory_of(engine, MIB)
    with pytest.raises(TransportError, match="1 regions make an address of"):
        engine.address()
    assert memory.size


@needs_wheel
def test_nothing_is_kept_of_memory_that_came_and_went(
    engine: NixlEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that registers a buffer a request would keep an entry for each; and be told to
    register fewer regions than it has."""
    memory = memory_of(engine, MIB)
    for offset in range(0, 200 * 64, 64):
        engine.register(base(memory) + offset, 64)
        engine.unregister(base(memory) + offset, 64)
    assert len(engine._regions) == 1
    monkeypatch.setattr(nixl, "MAX_ADDRESS_BYTES", 300)
    with pytest.raises(TransportError, match="nixl: 1 regions make an address of"):
        engine.address()


@needs_wheel
def test_engines_leave_no_descriptor_and_no_thread() -> None:
    def turn() -> None:
        first, second = NixlEngine(incarnation(), **TCP), NixlEngine(incarnation(), **TCP)
        source, target = memory_of(first, MIB, fill=1), memory_of(second, MIB)
        write(first, first.open(second.address()), [(base(source), base(target), MIB)])
        assert target.all()
        first.close()
        second.close()

    def footprint() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    turn()
    gc.collect()
    before = footprint()
    for _ in range(5):
        turn()
    assert footprint() == before


# --- the transport -----------------------------------------------------------------------


def listening() -> set[str]:
    """IPv4 addresses, in hexadecimal, at which this process takes connections."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        # One of them was that of the listing.
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    mine = {link[8:-1] for link in links if link.startswith("socket:[")}
    with open("/proc/self/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine}


@needs_wheel
def test_ucx_listens_where_peers_reach_us() -> None:
    """It takes writes from whoever connects, so not at every interface without being told."""
    gc.collect()
    before = listening()
    transport = nixl.create(incarnation())
    transport.descriptor()
    assert listening() - before <= {"0100007F"}
    assert transport.close() == []


@needs_wheel
def test_what_the_side_channel_refuses_leaves_no_engine() -> None:
    NixlEngine(incarnation(), **TCP).close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="secret"):
        nixl.create(incarnation(), secret="short")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_says_where_it_stands() -> None:
    place = WorkerPlace("0.0.0.0", "10.0.0.2", "a secret")
    assert nixl.PLUGIN.options_at is not None
    assert nixl.PLUGIN.options_at(place) == {
        "host": "0.0.0.0",
        "advertise": "10.0.0.2",
        "secret": "a secret",
    }


def test_what_it_declares() -> None:
    """Bytes of a sender that died may land after its death, so decode waits (D3)."""
    caps = nixl.PLUGIN.caps
    assert caps is not None
    assert (caps.revocation, caps.death_fences) == (Revocation.QUARANTINE, False)
    assert caps.quarantine_s == nixl.LANDS_LATE_S > 0


@needs_wheel
@pytest.mark.parametrize(
    ("device", "quarantine_s"), [("lo", nixl.LANDS_LATE_S), (None, LANDS_LATE_BETWEEN_HOSTS_S)]
)
def test_between_hosts_bytes_land_later(device: str | None, quarantine_s: float) -> None:
    """D3: the kernel of a sender that died behind a cut cable sends again when it is back, up to
    51 s after. 4 MB landed 12.7 s after PeerDied, where 2 s were declared."""
    engine = NixlEngine(incarnation(), ucx_device=device)
    caps = caps_of(engine.limits, cross_host=True)
    assert caps.quarantine_s == quarantine_s
    told = nixl.PLUGIN.caps if device == "lo" else nixl.PLUGIN.caps_between_hosts
    assert told == caps, "people are told something else"
    engine.close()


# --- another process ---------------------------------------------------------------------


@needs_wheel
@pytest.mark.parametrize("options", [TCP, {}], ids=["tcp", "any way"])
def test_another_process(options: dict[str, str]) -> None:
    engine, child = NixlEngine(incarnation(), **options), Child(8 * MIB, **options)
    try:
        source = memory_of(engine, 8 * MIB, fill=1)
        peer = engine.open(child.address)
        rows = [(base(source) + at, child.base + at, 4096) for at in range(0, 8 * MIB, 8192)]
        write(engine, peer, rows)
        assert child.ones() == 4 * MIB
    finally:
        child.close()
        engine.close()


@needs_wheel
def test_a_killed_peer_is_gone(engine: NixlEngine, child: Child) -> None:
    source = memory_of(engine, 64 * MIB, fill=1)
    peer = engine.open(child.address)
    write(engine, peer, [(base(source), child.base, MIB)])
    child.stop()
    running = Background(engine, peer, [(base(source), child.base, 64 * MIB)])
    assert not running.ends_within(WATCH_S)
    child.kill()
    assert running.ends_within(LIMIT_S)
    with pytest.raises(WriteFailed) as again:
        write(engine, peer, [(base(source), child.base, 8)])
    for error in (running.error, again.value):
        assert isinstance(error, WriteFailed)
        assert error.is_peer_gone
        assert error.may_land
    engine.shut(peer)


@needs_wheel
def test_a_write_to_a_stopped_peer_ends_when_its_bytes_are_there(
    engine: NixlEngine, child: Child
) -> None:
    """Never before: to end it would leave bytes on their way (nixl 2067, 2044, 2209)."""
    source = memory_of(engine, 64 * MIB, fill=1)
    peer = engine.open(child.address)
    write(engine, peer, [(base(source), child.base, 8)])
    child.stop()
    running = Background(engine, peer, [(base(source), child.base, 64 * MIB)])
    assert not running.ends_within(WATCH_S)
    child.resume()
    assert running.ends_within(LIMIT_S)
    assert running.error is None
    assert child.ones() == 64 * MIB


@needs_wheel
def test_a_stopped_peer_holds_up_nobody_else(
    engine: NixlEngine, other: NixlEngine, child: Child
) -> None:
    """D23: writes to others go on in their own threads."""
    source, target = memory_of(engine, 64 * MIB, fill=1), memory_of(other, MIB)
    stopped, well = engine.open(child.address), engine.open(other.address())
    write(engine, stopped, [(base(source), child.base, 8)])
    child.stop()
    running = Background(engine, stopped, [(base(source), child.base, 64 * MIB)])
    for _ in range(20):
        write(engine, well, [(base(source), base(target), MIB)])
    assert target.all()
    assert not running.ends_within(0.0)
    child.resume()
    assert running.ends_within(LIMIT_S)


@needs_wheel
def test_close_ends_a_write_to_a_stopped_peer(engine: NixlEngine, child: Child) -> None:
    source = memory_of(engine, 64 * MIB, fill=1)
    peer = engine.open(child.address)
    write(engine, peer, [(base(source), child.base, 8)])
    child.stop()
    running = Background(engine, peer, [(base(source), child.base, 64 * MIB)])
    assert not running.ends_within(WATCH_S)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < LIMIT_S
    assert running.ends_within(LIMIT_S)
    assert isinstance(running.error, WriteFailed)
    assert running.error.may_land


@needs_wheel
def test_a_new_life_is_another_agent(engine: NixlEngine, child: Child) -> None:
    source = memory_of(engine, MIB, fill=1)
    peer = engine.open(child.address)
    write(engine, peer, [(base(source), child.base, MIB)])
    child.kill()
    again = Child(MIB, **TCP)
    try:
        after = engine.open(again.address)
        write(engine, after, [(base(source), again.base, MIB)])
        assert again.ones() == MIB
        with pytest.raises(WriteFailed):
            write(engine, peer, [(base(source), child.base, MIB)])
        assert again.ones() == MIB
    finally:
        again.close()
