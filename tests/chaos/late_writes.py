"""The late-write harness on every transport, with the product's rules and without.

``python -m tests.chaos.late_writes --trials 1000 --json`` prints for each how many bytes of
other requests were corrupted: 0 with the product's rules, some with quarantine switched off.

On shared memory the sender's copying thread goes through a gate, which lets one chunk pass
when told: the slow sender, without a sleep. Over sockets the receiver's thread does: what was
sent waits in the kernel.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from unittest import mock

import attrs

from pdcore.testing.late_writes import (
    CHUNK_BYTES,
    NUM_BLOCKS,
    LateWriteReport,
    MakeTrial,
    Trial,
    decode_rooms,
    loopback_trial,
    outliving_trial,
    run_late_writes,
    small_model,
)
from pdcore.testing.world import World, make_world
from pdcore.transports.check import CopyPlan
from pdcore.transports.copy import ByteArray, copy_pieces
from pdcore.transports.shm import ShmTransport
from pdcore.transports.shm_attach import AttachedMemory
from pdcore.transports.shm_pages import PeerMemory
from pdcore.transports.socket import SocketTransport
from pdcore.transports.socket_incoming import Incoming, Placed
from pdcore.transports.socket_outgoing import write_frames
from pdcore.transports.socket_reader import FrameReader
from pdcore.types import Incarnation

#: Of a thread that should be at the gate; a hang is a failure, not a wait.
GATE_TIMEOUT_S = 60.0


class Gate:
    """In front of every chunk that a mover's thread copies."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner = threading.get_ident()
        self._is_waiting = False
        self._is_open = False
        self._permits = 0
        self._num_ended = 0

    def copy_paged(
        self,
        plan: CopyPlan,
        local: Mapping[int, ByteArray],
        remote: Mapping[int, PeerMemory | AttachedMemory],
    ) -> Iterator[int]:
        """In place of the product's, in small chunks."""
        while threading.get_ident() == self._owner:
            yield 0  # the caller's own thread would wait for itself
        for pair in plan.pairs:
            source, memory = local[pair.local_region], remote[pair.remote_region]
            if isinstance(memory, AttachedMemory):
                yield from self._through(memory.write(pair.pieces, source))
                continue
            for pieces, granules in memory.windows(pair.pieces):
                with memory.using(granules) as missing:
                    yield from memory.populate(missing)
                    chunks = copy_pieces(pieces, source, memory.array, CHUNK_BYTES)
                    yield from self._through(chunks)

    def _through(self, chunks: Iterator[int]) -> Iterator[int]:
        self._wait()
        for copied in chunks:
            yield copied
            self._wait()

    def _wait(self) -> None:
        with self._changed:
            self._is_waiting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permits or self._is_open, GATE_TIMEOUT_S)
            self._permits = max(0, self._permits - 1)
            self._is_waiting = False

    def ended(self) -> None:
        """A transfer is over: nothing of it comes any more."""
        with self._changed:
            self._num_ended += 1
            self._changed.notify_all()

    def has_pending(self) -> bool:
        with self._changed:
            return self._is_waiting

    def step(self) -> None:
        """One chunk, and until its thread waits again or the transfer is over."""
        with self._changed:
            ended = self._num_ended
            self._permits, self._is_waiting = 1, False
            self._changed.notify_all()
            assert self._changed.wait_for(
                lambda: self._is_waiting or self._num_ended > ended, GATE_TIMEOUT_S
            ), "the thread that copies is stuck"

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


def shm_trial(seed: int, shared: bool = True) -> Trial:
    """A's client is gone while the other end's thread is in the middle of its copy; ``shared``
    False: into memory of decode that nobody shares."""
    gate = Gate()
    made: list[ShmTransport] = []

    def make(incarnation: Incarnation, name: str) -> ShmTransport:
        transport = ShmTransport(incarnation, shared=shared)
        mover = transport._sender._mover
        ring = mover._ring

        def ring_and_tell() -> None:
            ring()
            gate.ended()

        mover._ring = ring_and_tell
        made.append(transport)
        return transport

    patches = (
        mock.patch("pdcore.transports.shm_sender.copy_paged", gate.copy_paged),
        mock.patch("pdcore.transports.shm_attach.CHUNK_BYTES", CHUNK_BYTES),
    )
    for patch in patches:
        patch.start()

    def close() -> None:
        gate.open()
        for patch in patches:
            patch.stop()
        for transport in made:
            assert transport.close() == []

    world = make_world(
        model=small_model(),
        num_blocks=NUM_BLOCKS,
        prefill_blocks=64,
        seed=seed,
        transport=make,
    )
    return Trial(world, gate, World.abort, close)


def socket_trial(seed: int) -> Trial:
    """A's client is gone while its KV is on its way, in buffers of the kernel."""
    gate = Gate()
    made: list[SocketTransport] = []
    advance, finish = Incoming.advance, Incoming.finish

    def make(incarnation: Incarnation, name: str) -> SocketTransport:
        made.append(SocketTransport(incarnation, families=["unix"]))
        return made[-1]

    def gated(half: Incoming, sock: socket.socket, reader: FrameReader) -> bool:
        gate._wait()
        return advance(half, sock, reader)

    def finish_and_tell(half: Incoming, body: bytes) -> Placed:
        placed = finish(half, body)
        gate.ended()
        return placed

    small = partial(write_frames, chunk_bytes=CHUNK_BYTES)
    patches = (
        mock.patch("pdcore.transports.socket_sender.write_frames", small),
        mock.patch.object(Incoming, "advance", gated),
        mock.patch.object(Incoming, "finish", finish_and_tell),
    )
    for patch in patches:
        patch.start()

    def close() -> None:
        gate.open()
        for transport in made:
            assert transport.close() == []
        for patch in patches:
            patch.stop()

    world = make_world(
        model=small_model(),
        num_blocks=NUM_BLOCKS,
        prefill_blocks=64,
        seed=seed,
        transport=make,
    )
    return Trial(world, gate, World.abort, close)


TRIALS: dict[str, MakeTrial] = {
    "shm": shm_trial,
    "shm, attach": partial(shm_trial, shared=False),
    "socket": socket_trial,
    "loopback": loopback_trial,
    "loopback, writes outlive their process": outliving_trial,
}


def free_on_abort(world: World) -> None:
    """The known-bad variant: quarantine switched off, blocks go back with the answer; and
    where the receiver enforces leases, the lease stands."""
    rooms = decode_rooms(world)
    rooms.quarantine = rooms.release
    transport = world.decode.worker.ports.transport
    if isinstance(transport, SocketTransport):
        transport.revoke = lambda lease: True
        transport.release = lambda lease: None


def run_all(
    trials: int, seed: int, variant_trials: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, dict[str, LateWriteReport]]:
    """Transport -> reports with the product's rules and with quarantine off."""
    found: dict[str, dict[str, LateWriteReport]] = {}
    for name, make in TRIALS.items():
        start_s = time.monotonic()
        found[name] = {
            "product": run_late_writes(name, make, trials, seed),
            "quarantine off": run_late_writes(name, make, variant_trials, seed, free_on_abort),
        }
        say(f"{name}: {time.monotonic() - start_s:.1f} s")
    return found


def check(reports: dict[str, LateWriteReport]) -> None:
    """The claim, for one transport."""
    product, variant = reports["product"], reports["quarantine off"]
    assert product.late_chunks >= product.trials, "nothing came late, so nothing was tested"
    assert product.corrupted_bytes == 0, product
    assert variant.corrupted_trials > variant.trials // 2, "the harness would not have seen it"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.late_writes", description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--variant-trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    found = run_all(
        given.trials, seed, given.variant_trials, lambda text: print(text, file=sys.stderr)
    )
    report = {
        "seed": seed,
        "transports": {
            name: {rules: attrs.asdict(report) for rules, report in reports.items()}
            for name, reports in found.items()
        },
    }
    print(json.dumps(report, indent=None if given.json else 2))
    for reports in found.values():
        check(reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
