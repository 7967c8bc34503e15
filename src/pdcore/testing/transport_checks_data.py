"""Conformance checks: bytes arrive, in the right places, before anybody is told (G1, G2)."""

from __future__ import annotations

import select
import zlib

import numpy as np

from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.testing.transport_harness import Pair, TransportHarness, make_batch, make_lease
from pdcore.testing.transport_peer import pattern
from pdcore.testing.transport_watch import Watched, pump, same
from pdcore.transports.base import HandleStatus, Region

MIB = 1 << 20


def finish(pair: Pair, *handles: int) -> None:
    """Pump until the handles are DONE and quiesced."""
    record = pair.sender.record
    pump(
        pair.sender,
        pair.receiver,
        until=lambda: all(handle in record.quiesced for handle in handles),
        what=f"completion of {handles}",
    )
    for handle in handles:
        assert record.ended[handle] is HandleStatus.DONE, f"handle {handle} did not succeed"


def expect(region: Region, wanted: dict[tuple[int, int], bytes]) -> None:
    """Exactly these bytes, zeros everywhere else."""
    image = bytearray(region.size_bytes)
    for (start, end), data in wanted.items():
        image[start:end] = data
    differs = np.frombuffer(image, np.uint8) != np.frombuffer(region.buffer, np.uint8)
    where = np.flatnonzero(differs)
    assert not len(where), f"{len(where)} wrong bytes, the first at offset {where[0]}"


def notification_after_data(harness: TransportHarness) -> None:
    """G1: whoever polls the notification finds every byte in place."""
    with Pair(harness, 8 * MIB) as pair:
        lease = pair.lease()
        for turn in range(8):
            start, size = turn * MIB, MIB - 64
            pair.submit(lease, pair.batch((start, start, size)), notify=b"turn %d" % turn)
        seen = 0

        def all_seen() -> bool:
            nonlocal seen
            for payload in pair.receiver.record.payloads[seen:]:
                assert payload == b"turn %d" % seen, f"{payload!r} out of order"
                start = seen * MIB
                got = pair.target.buffer[start : start + MIB - 64]
                assert got == pair.source.buffer[start : start + MIB - 64], "notified too early"
                seen += 1
            return seen == 8

        pump(pair.sender, pair.receiver, until=all_seen)
        origin = pair.receiver.record.notes[0].incarnation
        assert origin == pair.sender.transport.incarnation


def notifications_are_fifo(harness: TransportHarness) -> None:
    """G1: first in, first out per peer, each once, none for a handle without one."""
    with Pair(harness) as pair:
        lease = pair.lease()
        payloads = [b"%d" % i for i in range(300)]
        handles = [
            pair.submit(lease, pair.batch((i, i, 1)), notify=None if i % 3 else payloads[i])
            for i in range(300)
        ]
        finish(pair, *handles)
        wanted = payloads[::3]
        pump(
            pair.sender,
            pair.receiver,
            until=lambda: len(pair.receiver.record.notes) >= len(wanted),
        )
        assert pair.receiver.record.payloads == wanted
        assert not pair.sender.record.notes


def one_completion_each(harness: TransportHarness) -> None:
    """G2: one terminal status and one quiesced mark per handle, whatever ends it."""
    with Pair(harness, 4 * MIB) as pair:
        transport = pair.sender.transport
        lease = pair.lease()
        handles = [pair.submit(lease, pair.batch((0, 0, 4 * MIB))) for _ in range(6)]
        assert len(set(handles)) == 6, handles
        assert min(handles) > 0, handles
        for handle in handles[1::2]:
            transport.cancel(handle)
            transport.cancel(handle)
        record = pair.sender.record
        pump(pair.sender, pair.receiver, until=lambda: record.quiesced >= set(handles))
        for handle in handles:
            transport.cancel(handle)
        transport.cancel(max(handles) + 1000)
        finish(pair, pair.submit(lease, pair.batch((0, 0, 1))))
        for handle in handles[::2]:
            assert record.ended[handle] is HandleStatus.DONE


def tiny_and_huge(harness: TransportHarness) -> None:
    """Public report (Mooncake partial batch): a batch of [64 B, 32 MiB] is complete when
    both are, not when the first is."""
    with Pair(harness, 33 * MIB) as pair:
        tiny, huge = (0, 0, 64), (4096, 4096, 32 * MIB)
        handle = pair.submit(pair.lease(), pair.batch(tiny, huge), notify=b"both")
        last = 4096 + 32 * MIB

        def notified() -> bool:
            if pair.receiver.record.notes or handle in pair.sender.record.ended:
                assert same(pair.target.buffer[4096:last], pair.source.buffer[4096:last])
                assert pair.target.buffer[:64] == pair.source.buffer[:64]
            return bool(pair.receiver.record.notes)

        pump(pair.sender, pair.receiver, until=notified)
        finish(pair, handle)


def many_descriptors(harness: TransportHarness) -> None:
    """4,096 scattered blocks on both sides in one submit; chunking is the transport's."""
    block, count = 1024, 4096
    with Pair(harness, block * count) as pair:
        rng = np.random.default_rng(7)
        pieces: Int64Array = np.zeros((count, 6), np.int64)
        pieces[:, 0] = rng.permutation(count) * block
        pieces[:, 1] = rng.permutation(count) * block
        pieces[:, 2], pieces[:, 3] = block, 1
        batch = WriteBatch(pair.source.region_id, pair.target.region_id, pieces)
        finish(pair, pair.submit(pair.lease(), batch))
        source = np.frombuffer(pair.source.buffer, np.uint8).reshape(count, block)
        target = np.frombuffer(pair.target.buffer, np.uint8).reshape(count, block)
        wanted = np.empty_like(target)
        wanted[pieces[:, 1] // block] = source[pieces[:, 0] // block]
        assert (wanted == target).all()


def strided_descriptors(harness: TransportHarness) -> None:
    """2-D descriptors: interleaved rows, only their own bytes, both strides."""
    with Pair(harness) as pair:
        lease = pair.lease((0, 4096))
        # Two heads of 24 bytes each, interleaved at the destination, not at the source.
        first = (0, 0, 24, 50, 32, 64)
        second = (8192, 24, 24, 50, 24, 64)
        whole = (16384, 3328, 16, 48, 16, 16)
        finish(pair, pair.submit(lease, pair.batch(first, second, whole)))
        wanted: dict[tuple[int, int], bytes] = {}
        for row in range(50):
            at = row * 64
            wanted[at, at + 24] = bytes(pair.source.buffer[row * 32 : row * 32 + 24])
            from_ = 8192 + row * 24
            wanted[at + 24, at + 48] = bytes(pair.source.buffer[from_ : from_ + 24])
        wanted[3328, 4096] = bytes(pair.source.buffer[16384 : 16384 + 768])
        expect(pair.target, wanted)


def odd_offsets(harness: TransportHarness) -> None:
    """No alignment is assumed beyond the declared one; neighbouring runs may be joined
    but not reordered into each other."""
    unit = max(1, harness_alignment(harness))
    with Pair(harness) as pair:
        shapes = [(3, 7, 5), (8, 12, 1), (9, 13, 700), (1000, 5000, 333), (1333, 5333, 2)]
        pieces = [(lo * unit, ro * unit, size * unit) for lo, ro, size in shapes]
        finish(pair, pair.submit(pair.lease(), pair.batch(*pieces)))
        expect(
            pair.target,
            {(ro, ro + n): bytes(pair.source.buffer[lo : lo + n]) for lo, ro, n in pieces},
        )


def harness_alignment(harness: TransportHarness) -> int:
    transport = harness.create()
    try:
        return transport.caps.alignment
    finally:
        transport.close()


def zero_bytes(harness: TransportHarness) -> None:
    """Public report (vllm-ascend #10098): a transfer of nothing still completes, and its
    notification still comes."""
    with Pair(harness) as pair:
        lease = pair.lease()
        empty = WriteBatch(pair.source.region_id, pair.target.region_id, np.zeros((0, 6), np.int64))
        handles = [
            pair.submit(lease, notify=b"no batches"),
            pair.submit(lease, empty, notify=b"no descriptors"),
            pair.submit(lease, pair.batch((0, 0, 0), (8, 8, 16, 0, 16, 16)), notify=b"no bytes"),
            pair.submit(lease, pair.batch((0, 0, 0), (5, 9, 3)), notify=b"three bytes"),
        ]
        finish(pair, *handles)
        pump(pair.sender, pair.receiver, until=lambda: len(pair.receiver.record.notes) == 4)
        assert pair.receiver.record.payloads[-1] == b"three bytes"
        expect(pair.target, {(9, 12): bytes(pair.source.buffer[5:8])})


def several_regions(harness: TransportHarness) -> None:
    """One submit may name several regions on both sides; each byte goes to its own."""
    with Pair(harness) as pair:
        sender, receiver = pair.sender.transport, pair.receiver.transport
        sources = [pair.source, sender.allocate(8192)]
        sources[1].buffer[:] = pattern(8192, 2)
        targets = [pair.target, receiver.allocate(8192), receiver.allocate(8192)]
        pair.session = sender.connect(receiver.descriptor())
        lease = pair.lease_of({target: [(0, 8192)] for target in targets})
        batches = [
            make_batch(source, target, (100 * i, 1000 * i + 500 * j, 300))
            for i, source in enumerate(sources)
            for j, target in enumerate(targets)
        ]
        finish(pair, pair.submit(lease, *batches))
        for j, target in enumerate(targets):
            wanted = {}
            for i, source in enumerate(sources):
                start = 1000 * i + 500 * j
                wanted[start, start + 300] = bytes(source.buffer[100 * i : 100 * i + 300])
            expect(target, wanted)


def registered_source(harness: TransportHarness) -> None:
    """Memory that was there before can be a source, read-only memory included."""
    with Pair(harness) as pair:
        memory = pattern(4096, 3)
        region = pair.sender.transport.register(memoryview(memory))
        finish(pair, pair.submit(pair.lease(), make_batch(region, pair.target, (1, 2, 4000))))
        expect(pair.target, {(2, 4002): memory[1:4001]})
        pair.sender.transport.deregister(region)


def memory_is_zeroed(harness: TransportHarness) -> None:
    """``allocate`` hands out zeros, also after other memory was given back."""
    with Pair(harness) as pair:
        transport = pair.receiver.transport
        for _ in range(3):
            region = transport.allocate(1 << 16)
            assert zlib.crc32(region.buffer) == zlib.crc32(bytes(1 << 16))
            region.buffer[:] = b"\xff" * (1 << 16)
            transport.deregister(region)


def doorbell_rings(harness: TransportHarness) -> None:
    """``fileno`` is readable when ``poll`` has something, and not for ever after."""
    with Pair(harness) as pair:
        handle = pair.submit(pair.lease(), pair.batch((0, 0, MIB // 16)), notify=b"ring")
        record = pair.sender.record
        while handle not in record.quiesced:
            assert rings(pair.sender, 5.0), "the sender's doorbell did not ring"
            pair.sender.poll()
        while not pair.receiver.record.notes:
            assert rings(pair.receiver, 5.0), "the receiver's doorbell did not ring"
            pair.receiver.poll()
        for watched in (pair.sender, pair.receiver):
            while watched.poll():
                pass
            assert not rings(watched, 0.0), "the doorbell rings for ever"


def rings(watched: Watched, timeout_s: float) -> bool:
    fd = watched.transport.fileno()
    assert fd is not None, "there is no doorbell, but one is declared"
    return bool(select.select([fd], [], [], timeout_s)[0])


def both_directions(harness: TransportHarness) -> None:
    """Two transports may be sender and receiver of each other at once."""
    with Pair(harness) as pair:
        ours, theirs = pair.sender.transport, pair.receiver.transport
        mine = ours.allocate(4096)
        session = theirs.connect(ours.descriptor())
        lease = make_lease(ours.incarnation, 1, {mine.region_id: [(0, 4096)]})
        ours.grant(lease)
        forth = pair.submit(pair.lease(), pair.batch((0, 0, 2048)), notify=b"forth")
        batch = make_batch(pair.target, mine, (8192, 0, 4096))
        back = theirs.submit(session, [batch], lease, b"back")
        pump(
            pair.sender,
            pair.receiver,
            until=lambda: bool(
                pair.sender.record.notes
                and pair.receiver.record.notes
                and forth in pair.sender.record.quiesced
                and back in pair.receiver.record.quiesced
            ),
        )
        assert pair.sender.record.payloads == [b"back"]
        assert pair.receiver.record.payloads == [b"forth"]
        assert mine.buffer == pair.target.buffer[8192:12288]
        assert pair.target.buffer[:2048] == pair.source.buffer[:2048]
