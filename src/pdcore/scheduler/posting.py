"""From "post these tokens of this request" to descriptors: where plans meet lifecycles.

The sender says which tokens; this module knows the block ids of both sides and turns them
into write batches and the byte ranges that the lease allows. Block tables are
position-aligned on both sides, so a token range says which blocks of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdcore.control.codec import unpack_block_ids
from pdcore.control.messages import Handshake
from pdcore.errors import PdcoreError
from pdcore.fsm.effects import PostTransfer
from pdcore.kv.checksums import LegPart, leg_sums
from pdcore.kv.plan import lease_ranges, plan_blocks
from pdcore.kv.reblock import Share, share_of
from pdcore.scheduler.setup import CoreSetup, Destination


class PlanError(PdcoreError):
    """This transfer cannot be planned: the two sides' blocks do not match."""


def fill_transfer(
    effect: PostTransfer,
    setup: CoreSetup,
    destination: Destination,
    handshake: Handshake,
    source_blocks: Mapping[str, list[int]],
) -> PostTransfer:
    """The effect with batches and ranges, and what to sum where decode asks for checksums.
    Raises PlanError when they cannot be made."""
    target_blocks = {key: unpack_block_ids(data) for key, data in handshake.blocks.items()}
    # A rank of a pipeline stage has the managers of its own layers only.
    is_stage = bool(setup.spec.model_digest or destination.spec.model_digest)
    if not is_stage and target_blocks.keys() != source_blocks.keys():
        raise PlanError(
            f"manager keys differ: prefill has {sorted(source_blocks)}, "
            f"decode sent {sorted(target_blocks)}"
        )
    tokens = effect.start_token, effect.start_token + effect.num_tokens
    sums = None
    try:
        batches = plan_blocks(
            setup.spec,
            setup.placement,
            source_blocks,
            destination.spec,
            destination.placement,
            target_blocks,
            tokens,
            _share(setup),
        )
        if destination.is_summed:
            legs = leg_sums(setup.spec, setup.placement, destination.spec, True)
            # A copy: the sequence goes on changing its own.
            own_blocks = {key: tuple(ids) for key, ids in source_blocks.items()}
            sums = LegPart(legs, own_blocks, target_blocks, (tokens,), _share(setup))
        ranges = lease_ranges(destination.placement, destination.spec, target_blocks)
    except (PdcoreError, ValueError) as error:
        raise PlanError(str(error)) from error
    return msgspec.structs.replace(
        effect, endpoint=handshake.endpoint, batches=batches, ranges=ranges, sums=sums
    )


def _share(setup: CoreSetup) -> Share:
    """R21, R58: the route told decode whether all CP ranks of this instance send."""
    layout = setup.layout
    return share_of(layout.coordinates(setup.me.rank).cp, layout.cp_size, layout.all_cp_ranks)
