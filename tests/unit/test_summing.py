"""Checksums that are taken off the loop; with transports: tests/unit/test_executor.py."""

from __future__ import annotations

import numpy as np

from pdcore.fsm.effects import PostTransfer, VerifyBlocks
from pdcore.fsm.events import BlocksSummed, BlocksVerified
from pdcore.kv.checksums import LegPart, LegSums
from pdcore.kv.layout import place_entries
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.summing import Summing
from pdcore.testing.world import InlineBackground
from pdcore.types import LeaseId, RoomKey
from tests.unit.scheduler.kit import DECODE

SPEC = KVCacheSpec((KVCacheEntry("k", "full", "uint8", 4, 1, 1, 16),))
PLACE, SIZE = place_entries(SPEC, 4, region=1)
MEMORY = {1: np.arange(SIZE, dtype=np.int64).astype(np.uint8)}
KEY, LEASE = RoomKey(1, 1), LeaseId(DECODE.incarnation, 1)
BLOCKS = {"full": [1, 3]}
PART = LegPart(LegSums(SPEC, PLACE, SPEC, True), BLOCKS, BLOCKS, ((0, 4), (4, 6)), (0, 1))


def test_what_waits_is_given_back_once() -> None:
    background = InlineBackground()
    summing = Summing(MEMORY, background)
    effect = PostTransfer(7, KEY, DECODE, LEASE, 0, 6)
    summing.take(effect, PART)
    assert len(summing) == 1
    (event,) = background.poll()
    assert event == BlocksSummed(7, PART.sums(MEMORY))
    assert isinstance(event, BlocksSummed)
    assert len(event.sums) == 8
    assert summing.taken(event) is effect
    assert summing.taken(event) is None
    assert not summing.cancel(7)


def test_who_is_cancelled_is_not_given_back() -> None:
    background = InlineBackground()
    summing = Summing(MEMORY, background)
    summing.take(PostTransfer(7, KEY, DECODE, LEASE, 0, 6), PART)
    assert summing.cancel(7)
    (event,) = background.poll()
    assert isinstance(event, BlocksSummed)
    assert summing.taken(event) is None
    assert len(summing) == 0


def test_what_arrived_is_compared_transfer_by_transfer() -> None:
    """The place of a difference is counted through all of them."""
    background = InlineBackground()
    summing = Summing(MEMORY, background)
    right = PART.sums(MEMORY)
    wrong = right[:4] + b"9999"
    for sums in (right, wrong):
        summing.verify(VerifyBlocks(KEY, LEASE, 2, PART, sums))
    good, bad = background.poll()
    assert good == BlocksVerified(KEY, LEASE, 2, "")
    assert isinstance(bad, BlocksVerified)
    assert "1 of 2 checked parts" in bad.problem
    assert "token 4 of manager key 'full'" in bad.problem
