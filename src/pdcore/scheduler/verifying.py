"""Checksums at decode: a rank's STATUS Done counts when what it wrote has been compared.

Until then the message is held back, as if it were still on its way: the receiver knows nothing
of checksums, and its lease stays open. The comparing happens off the tick, because a long
prompt takes longer than a decode step. What is wrong fails this request on this rank, before
the Done is heard; in a group the next vote ends it on all ranks, like any transfer that failed.

Which bytes a leg consists of follows from the route that the request was mapped with, from the
own layout and from where prefill's transfers ended, which its record says: nothing else that a
peer says is believed.
"""

from __future__ import annotations

from pdcore.control.codec import unpack_block_ids
from pdcore.control.messages import Route
from pdcore.errors import CodecError, IncompatibleError, failure
from pdcore.fsm.effects import VerifyBlocks
from pdcore.fsm.events import BlocksVerified
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.states import ReceiverState
from pdcore.fsm.targets import StatusFrom
from pdcore.kv.checksums import LegPart, leg_sums
from pdcore.kv.layout import held_by
from pdcore.kv.metadata import MetadataRecord, decode_record
from pdcore.kv.reblock import Share, share_of
from pdcore.kv.spec import KVCacheSpec
from pdcore.scheduler.setup import CoreSetup
from pdcore.scheduler.topologies import layout_of
from pdcore.topology import stage_layers
from pdcore.types import NO_CHECKSUMS, Failure


class Verification:
    """Of one request on this decode rank."""

    __slots__ = ("_done", "_held", "route")

    def __init__(self) -> None:
        #: What it was mapped with.
        self.route: Route | None = None
        #: Prefill rank -> its Done, which waits to be compared.
        self._held: dict[int, StatusFrom] = {}
        #: Ranks whose bytes have been compared, well or not.
        self._done: set[int] = set()

    def is_held(self, rank: int) -> bool:
        return rank in self._held

    def begin(
        self, setup: CoreSetup, receiver: Receiver, payload: StatusFrom
    ) -> VerifyBlocks | Failure | None:
        """What to do about a Done of a granted claim: compare first, fail the request, or None:
        nothing, because it is compared or being compared, or nothing is asked for."""
        rank = payload.peer.rank
        if (
            setup.integrity == NO_CHECKSUMS
            or receiver.state is not ReceiverState.TRANSFERRING
            or receiver.failure is not None
            or rank in self._done
            or rank in self._held
            or not receiver.is_done_of_grant(payload)
        ):
            return None
        try:
            record = decode_record(payload.message.metadata or b"")
        except CodecError:
            return None  # the receiver will say so
        try:
            part = self._part(setup, receiver, rank, record)
        except IncompatibleError as error:
            self._done.add(rank)
            return failure("corrupted", f"integrity: {error}")
        self._held[rank] = payload
        return VerifyBlocks(receiver.key, receiver.lease, rank, part, record.sums)

    def end(self, event: BlocksVerified) -> StatusFrom | None:
        """The Done that was held back; None for an answer nobody waits for."""
        held = self._held.pop(event.rank, None)
        if held is not None:
            self._done.add(event.rank)
        return held

    def _part(
        self, setup: CoreSetup, receiver: Receiver, rank: int, record: MetadataRecord
    ) -> LegPart:
        ends = record.sent_until
        if not ends or ends[-1] != receiver.num_tokens:
            raise IncompatibleError(
                f"prefill was asked for checksums of {receiver.num_tokens} tokens and sent those "
                f"of {ends[-1] if ends else 0}"
            )
        assert self.route is not None
        assert receiver.admission is not None
        spec, share = source_of(setup, self.route, rank)
        legs = leg_sums(setup.spec, setup.placement, spec, False)
        packed = receiver.admission.handshake.blocks
        blocks = {key: unpack_block_ids(data) for key, data in packed.items()}
        transfers = tuple(zip((0, *ends[:-1]), ends, strict=True))
        return LegPart(legs, blocks, blocks, transfers, share)


def source_of(setup: CoreSetup, route: Route, rank: int) -> tuple[KVCacheSpec, Share]:
    """How that prefill rank keeps what this decode rank gets of it, and which part of the blocks
    it writes. Raises IncompatibleError."""
    layout = layout_of(route)
    at = layout.coordinates(rank)
    layers = stage_layers(setup.spec.num_layers, layout.pp_size, at.pp)
    spec = held_by(setup.spec, layers, layout.tp_size, at.tp, route.block_sizes)
    return spec, share_of(at.cp, layout.cp_size, route.all_cp_ranks)
