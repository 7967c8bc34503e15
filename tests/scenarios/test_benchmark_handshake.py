"""The benchmark of the handshake: its clock starts before the blocks are taken, and ends when
prefill claims them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

import pdcore.assembly
from benchmarks import handshake
from pdcore.control.messages import Handshake, LeaderMessage, Stop
from pdcore.fsm.effects import Effect
from pdcore.fsm.targets import Admission
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.decode_rooms import DecodeRooms
from pdcore.testing.world import World, make_world


class LateDecode(DecodeCore):
    """A mutant: the clock starts when the handshake is handed out."""

    def poll_effects(self) -> list[Effect]:
        effects = super().poll_effects()
        handshake.note(effects, Handshake, time.monotonic_ns())
        return effects


@pytest.fixture
def took_ns(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """When the blocks of each room were taken."""
    found: dict[int, int] = {}
    admit = DecodeRooms.admit

    def watched(rooms: DecodeRooms, record: DecodeRecord, now: float) -> Admission | None:
        found[record.key.room] = time.monotonic_ns()
        return admit(rooms, record, now)

    monkeypatch.setattr(DecodeRooms, "admit", watched)
    handshake.TIMES.clear()
    yield found
    handshake.TIMES.clear()


def world_of(monkeypatch: pytest.MonkeyPatch, core: type[DecodeCore]) -> World:
    monkeypatch.setattr(pdcore.assembly, "DecodeCore", core)
    return make_world()


def check_starts(world: World, took_ns: dict[int, int]) -> None:
    keys = [world.submit(range(3, 40)) for _ in range(5)]
    world.run(lambda: all(world.decode.result(key) for key in keys))
    assert handshake.TIMES.keys() == took_ns.keys() == {key.room for key in keys}
    assert all(handshake.TIMES[room] <= took_ns[room] for room in took_ns)


def test_the_clock_starts_before_the_blocks_are_taken(
    monkeypatch: pytest.MonkeyPatch, took_ns: dict[int, int]
) -> None:
    check_starts(world_of(monkeypatch, handshake.TimedDecode), took_ns)


def test_a_clock_that_starts_with_the_message_is_noticed(
    monkeypatch: pytest.MonkeyPatch, took_ns: dict[int, int]
) -> None:
    world = world_of(monkeypatch, LateDecode)
    with pytest.raises(AssertionError):
        check_starts(world, took_ns)


def test_a_burst_is_found_in_one_look() -> None:
    """A worker that looks between two of 64 requests would never put two into a frame."""
    port = handshake.BurstPort()
    woken = threading.Event()
    port.wake = woken.set
    messages: list[LeaderMessage] = [Stop(float(i)) for i in range(handshake.BURST)]
    port.put_all(messages)
    assert woken.is_set()
    assert port.receive() == messages


def test_two_processes_are_measured() -> None:
    with handshake.pair() as workers:
        one, few = workers.admit(1), workers.admit(3)
        assert min(workers.latencies_us(one)) > 0.0
        assert workers.burst_us(few) > 0.0


def test_a_raw_hop_is_measured() -> None:
    with handshake.raw_hop(64) as hops:
        assert min(hops(3)) > 0.0
