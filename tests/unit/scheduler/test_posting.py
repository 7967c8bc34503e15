"""From token ranges to block slices and descriptors."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from pdcore.control.codec import pack_block_ids
from pdcore.control.messages import Handshake
from pdcore.errors import CodecError
from pdcore.fsm.effects import PostTransfer
from pdcore.kv.layout import place_entries, staged
from pdcore.kv.plan import LOCAL_OFFSET, REMOTE_OFFSET, ROW_BYTES, ROWS
from pdcore.kv.spec import KVCacheSpec
from pdcore.scheduler.posting import PlanError, fill_transfer
from pdcore.scheduler.setup import CoreSetup, Destination, read_endpoint
from pdcore.topology import ParallelLayout
from pdcore.types import LeaseId, RoomKey
from tests.unit.scheduler.kit import BLOCK, DECODE, PREFILL, make_setup, make_spec

SETUP = make_setup(PREFILL)
DESTINATION = read_endpoint(SETUP, make_setup(num_blocks=32).endpoint())
#: Bytes of one block of all entries: they lie side by side.
STRIDE = SETUP.placement.block_strides[0]
SOURCE = [3, 7, 8, 1]
TARGET = [10, 11, 30, 5]


def handshake(blocks: dict[str, bytes], num_tokens: int = 14) -> Handshake:
    return Handshake(
        key=RoomKey(1, 1),
        lease=LeaseId(DECODE.incarnation, 1),
        endpoint=b"endpoint",
        blocks=blocks,
        num_cached_tokens=0,
        num_tokens=num_tokens,
        ids_hash=0,
        num_required=1,
        expires_at_s=0.0,
        remaining_s=1.0,
    )


def post(start: int, num_tokens: int) -> PostTransfer:
    lease = LeaseId(DECODE.incarnation, 1)
    return PostTransfer(1, RoomKey(1, 1), DECODE, lease, start, num_tokens)


def fill(
    start: int,
    num_tokens: int,
    target: dict[str, bytes] | None = None,
    source: dict[str, list[int]] | None = None,
    setup: CoreSetup = SETUP,
) -> PostTransfer:
    target = {"full": pack_block_ids(TARGET)} if target is None else target
    source = {"full": SOURCE} if source is None else source
    return fill_transfer(post(start, num_tokens), setup, DESTINATION, handshake(target), source)


def copied(effect: PostTransfer) -> dict[int, int]:
    """Source block -> destination block, from the descriptors alone."""
    found = {}
    for batch in effect.batches:
        assert (batch.local_region, batch.remote_region) == (1, 1)
        for row in batch.descriptors.tolist():
            num_bytes = row[ROW_BYTES] * row[ROWS]
            assert num_bytes % STRIDE == 0
            for i in range(num_bytes // STRIDE):
                local = row[LOCAL_OFFSET] + i * STRIDE
                found[local // STRIDE] = (row[REMOTE_OFFSET] + i * STRIDE) // STRIDE
                assert local % STRIDE == 0
    return found


@pytest.mark.parametrize(
    ("start", "num_tokens", "expected"),
    [
        (0, 14, {3: 10, 7: 11, 8: 30, 1: 5}),
        (0, 8, {3: 10, 7: 11}),
        (8, 4, {8: 30}),
        (8, 6, {8: 30, 1: 5}),
        (12, 2, {1: 5}),
        (0, 1, {3: 10}),
        # An end or a start inside a block takes the whole block.
        (0, 5, {3: 10, 7: 11}),
        (5, 2, {7: 11}),
        (5, 6, {7: 11, 8: 30}),
    ],
)
def test_a_token_range_is_the_same_slice_of_both_tables(
    start: int, num_tokens: int, expected: dict[int, int]
) -> None:
    """SGLang PR28718: by position in the request."""
    assert copied(fill(start, num_tokens)) == expected


def test_chunks_together_are_the_whole() -> None:
    """What early sends copy adds up to one send of everything."""
    parts: dict[int, int] = {}
    for start, num_tokens in ((0, BLOCK), (BLOCK, 2 * BLOCK), (3 * BLOCK, 2)):
        part = copied(fill(start, num_tokens))
        assert not part.keys() & parts.keys()
        parts |= part
    assert parts == copied(fill(0, 14))


def test_the_lease_ranges_are_the_whole_lease_whatever_the_chunk() -> None:
    """The transport checks every write against the lease, not against this chunk."""
    effect = fill(0, BLOCK)
    expected = [[b * STRIDE, (b + 1) * STRIDE] for b in (5, 10, 30)]
    expected[1][1] += STRIDE
    assert np.array_equal(effect.ranges[1], expected)
    assert effect.endpoint == b"endpoint"
    assert (effect.handle, effect.start_token, effect.num_tokens) == (1, 0, BLOCK)


@pytest.mark.parametrize(
    ("target", "source", "named"),
    [
        ({}, None, "manager keys differ"),
        ({"window": pack_block_ids(TARGET)}, None, "manager keys differ"),
        (None, {}, r"manager keys differ: prefill has \[\]"),
        ({"full": pack_block_ids(TARGET[:2])}, None, "need 4 blocks, decode leased 2"),
        ({"full": b""}, None, "need 4 blocks, decode leased 0"),
        ({"full": pack_block_ids([10, 11, 32, 5])}, None, "outside a pool of 32"),
        ({"full": pack_block_ids([10, 11, 10, 5])}, None, "one block twice"),
        (None, {"full": [3, 0, 8, 1]}, "prefill has dropped it"),
    ],
)
def test_d37_tables_that_do_not_match_are_a_plan_error(
    target: dict[str, bytes] | None, source: dict[str, list[int]] | None, named: str
) -> None:
    """D37, D58: a peer's block ids are checked before a descriptor exists."""
    with pytest.raises(PlanError, match=named):
        fill(0, 14, target, source)


def test_a_longer_lease_than_the_prompt_is_not_written_past_the_prompt() -> None:
    effect = fill(0, 14, {"full": pack_block_ids([*TARGET, 20, 21])})
    assert copied(effect) == {3: 10, 7: 11, 8: 30, 1: 5}


@pytest.mark.parametrize("data", [b"abc", pack_block_ids([1])[:3] + b"\xff"])
def test_torn_block_ids_are_a_codec_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        fill(0, 14, {"full": data})


def sent(effect: PostTransfer) -> int:
    return sum(batch.num_bytes for batch in effect.batches)


def test_a_decode_with_blocks_of_another_size_gets_the_same_tokens() -> None:
    """Blocks of 4 tokens into blocks of 6, in two parts that end inside a block."""
    spec = make_spec(block_size=6)
    place, _ = place_entries(spec, 32)
    there = Destination(spec, place, b"here")
    message = handshake({"full": pack_block_ids([10, 11, 30])})
    row = sum(entry.token_bytes for entry in spec.entries)
    effects = [
        fill_transfer(post(*part), SETUP, there, message, {"full": SOURCE})
        for part in ((0, 8), (8, 6))
    ]
    assert [sent(effect) for effect in effects] == [8 * row, 6 * row]
    assert [len(effect.ranges) for effect in effects] == [1, 1]
    short = handshake({"full": pack_block_ids([10, 11])})
    with pytest.raises(PlanError, match=r"tokens 8\.\.14 need 2 blocks, decode leased 1"):
        fill_transfer(post(8, 6), SETUP, there, short, {"full": SOURCE})


@pytest.mark.parametrize("every", [False, True])
def test_r58_context_parallel_ranks_share_the_blocks_or_one_has_all(every: bool) -> None:
    """R21, R58: by position, so that the parts of a send are shared too."""
    found: dict[int, int] = {}
    for rank in range(3):
        setup = attrs.evolve(
            SETUP,
            me=PREFILL._replace(rank=rank),
            layout=ParallelLayout(3, cp_size=3, all_cp_ranks=every),
        )
        part = copied(fill(0, 14, setup=setup))
        if not every:
            assert part == ({3: 10, 7: 11, 8: 30, 1: 5} if rank == 0 else {})
            continue
        assert len(part) in (1, 2)
        assert not part.keys() & found.keys()
        found |= part
    assert not every or found == {3: 10, 7: 11, 8: 30, 1: 5}


def test_r4_a_stage_fills_its_own_layers_whatever_managers_the_other_has() -> None:
    """R4: layer 1 has a manager of its own, which the first stage does not know."""
    first = make_spec().entries[0]
    other = attrs.evolve(first, name="layer1.k", manager_key="other", layer=1)
    model = KVCacheSpec((first, other))
    stage = staged(model, 2, 0)
    place, _ = place_entries(stage, 64)
    setup = attrs.evolve(SETUP, spec=stage, placement=place)
    at, _ = place_entries(model, 64)
    tables = {"full": pack_block_ids(TARGET), "other": pack_block_ids(TARGET)}
    there = Destination(model, at, b"here")
    effect = fill_transfer(post(0, 14), setup, there, handshake(tables), {"full": SOURCE})
    assert sent(effect) == 4 * first.item_len
    del tables["full"]
    with pytest.raises(PlanError, match="decode has none for manager key 'full'"):
        fill_transfer(post(0, 14), setup, there, handshake(tables), {"full": SOURCE})
