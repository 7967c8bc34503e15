"""What a decode rank claims of its memory, at the limits of every field (D58).

Its word makes prefill plan, and its loop serves everybody: a claim is refused by one of the
errors that end one request, or it becomes descriptors that the transport checks against
regions and lease. Nothing else may be raised, and nothing that passes lies outside.
"""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdcore.control.codec import decode_endpoint, encode_endpoint, pack_block_ids
from pdcore.control.messages import Handshake
from pdcore.errors import CodecError, IncompatibleError, TransportError
from pdcore.fsm.effects import PostTransfer
from pdcore.scheduler.posting import PlanError, fill_transfer
from pdcore.scheduler.setup import read_endpoint
from pdcore.transports.base import RemoteLease
from pdcore.transports.check import MAX_REGION_BYTES, expand_rows, plan_copies
from pdcore.types import MAX_ID, LeaseId, RoomKey
from tests.unit.scheduler.kit import DECODE, PREFILL, make_setup, make_spec

SETUP = make_setup(PREFILL, spec=make_spec(total_num_heads=4, num_heads=4))
GOOD = decode_endpoint(SETUP.endpoint())
LEASE = LeaseId(DECODE.incarnation, 1)
TARGET = [10, 11, 30, 5]
POOL = sum(entry.item_len for entry in SETUP.spec.entries) * 64

WILD = st.one_of(
    st.integers(0, 4096),
    st.sampled_from([0, 1, MAX_ID, MAX_ID - 1, 1 << 62, (1 << 62) - 64, 1 << 57, 1 << 32]),
    st.integers(0, MAX_ID),
)
PAIR = st.tuples(WILD, WILD)


@st.composite
def claims(draw: st.DrawFn) -> dict[str, object]:
    tp_size = draw(st.sampled_from([1, 2, 4, 8, 65535]))
    claim: dict[str, object] = {"tp_size": tp_size, "tp_rank": draw(st.integers(0, tp_size - 1))}
    for name in ("regions", "offsets", "block_strides"):
        if draw(st.booleans()):
            claim[name] = draw(PAIR)
    if draw(st.booleans()):
        claim["num_blocks"] = draw(st.sampled_from([0, 1, 31, 64, (1 << 31) - 1]))
    if draw(st.booleans()):
        claim["block_sizes"] = {"full": draw(st.sampled_from([1, 2, 3, 4, 8, 1 << 20]))}
    return claim


@given(claims(), st.sampled_from([POOL, 1, MAX_REGION_BYTES]), st.integers(0, 13))
def test_a_claim_is_refused_or_stays_inside(
    claim: dict[str, object], region_bytes: int, start: int
) -> None:
    """D58: no claim of decode's ends prefill's loop, or makes it write outside the lease."""
    data = encode_endpoint(msgspec.structs.replace(GOOD, **claim))
    handshake = Handshake(
        key=RoomKey(1, 1),
        lease=LEASE,
        endpoint=data,
        blocks={"full": pack_block_ids(TARGET)},
        num_cached_tokens=0,
        num_tokens=14,
        ids_hash=0,
        num_required=1,
        expires_at_s=0.0,
        remaining_s=1.0,
    )
    effect = PostTransfer(1, RoomKey(1, 1), DECODE, LEASE, start, 14 - start)
    source = {"full": [3, 7, 8, 1]}
    try:
        destination = read_endpoint(SETUP, data)
        filled = fill_transfer(effect, SETUP, destination, handshake, source)
    except (CodecError, IncompatibleError, PlanError):
        return
    remote = dict.fromkeys(destination.placement.regions, region_bytes)
    lease = RemoteLease(LEASE, filled.ranges)
    try:
        plan = plan_copies(filled.batches, {1: POOL}, remote, lease)
    except TransportError:
        return
    for pair in plan.pairs:
        ranges = filled.ranges[pair.remote_region]
        rows = expand_rows(pair.pieces)
        at = np.searchsorted(ranges[:, 0], rows[:, 1], side="right") - 1
        assert (at >= 0).all()
        assert (rows[:, 1] + rows[:, 2] <= ranges[at, 1]).all()
        assert (rows[:, 0] + rows[:, 2] <= POOL).all()
