"""Retraction: free KV and requeue, when running sequences find no block (R72, D8).

Only when nobody at all can take a step. The victim is the one that loses least: fewest
output tokens, then the longest prompt (most blocks freed). It keeps its tokens and is
prefilled again into fresh blocks; the seed aborted it and returned the stump as HTTP 200.
Who has been retracted ``max_retractions`` times, or could not take a step even in an empty
pool, fails with out_of_memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.batch import DecodeBatcher
from pdcore.scheduler.sequence import Sequence


class Retraction(NamedTuple):
    """Who left the batch so that the rest can go on. Both have given their blocks back.

    ``requeued`` must be prefilled again; ``failed`` end with ``out_of_memory``.
    """

    requeued: list[Sequence]
    failed: list[Sequence]


def choose_victim(running: Iterable[Sequence]) -> Sequence | None:
    """R72: min by (number of output tokens, -prompt tokens), the first among equals."""
    return min(
        running, key=lambda seq: (seq.num_output_tokens, -seq.num_prompt_tokens), default=None
    )


def can_continue(seq: Sequence, kv: KVBlocks) -> bool:
    """Would a pool that holds nothing else give this sequence its next step? Its tokens
    must be prefilled again, and one slot must be left for the next token."""
    return kv.can_ever_fit(0, seq.num_tokens + 1)


def retract_until_fits(batcher: DecodeBatcher, kv: KVBlocks, max_retractions: int) -> Retraction:
    """Take victims out until ``batcher.schedule()`` finds a batch or nobody is left.

    Terminates for any pool: each round removes one sequence (invariant 7). Not while a
    batch is in flight. Nothing happens when a batch fits at once.
    """
    requeued: list[Sequence] = []
    failed: list[Sequence] = []
    while len(batcher) and not batcher.schedule():
        victim = choose_victim(batcher.sequences())
        if victim is None:
            break
        batcher.remove(victim.seq_id)
        kv.free(victim.seq_id)
        if victim.num_retractions >= max_retractions or not can_continue(victim, kv):
            failed.append(victim)
        else:
            victim.retract()
            requeued.append(victim)
    return Retraction(requeued, failed)
