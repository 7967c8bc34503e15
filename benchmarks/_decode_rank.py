"""A DecodeCore without sockets, engine or transport: the benchmark plays prefill and leader.

Every request goes the real way (route, admission, handshake, claim, grant, STATUS Done), so
what runs afterwards is in the state that serving leaves it in.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pdcore.config import CoreLimits
from pdcore.control.messages import (
    Claim,
    Grant,
    Handshake,
    Route,
    RouteRank,
    Status,
    StatusKind,
)
from pdcore.fsm.effects import (
    Effect,
    FetchTopology,
    ReduceVotes,
    ReportFinished,
    SendMessage,
)
from pdcore.fsm.events import Event, MessageReceived, TopologyFetched, VotesReduced
from pdcore.kv.cache import KVBlocks
from pdcore.kv.metadata import MetadataRecord, encode_record
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.setup import CoreSetup
from pdcore.types import (
    GenerateRequest,
    Incarnation,
    LeaseId,
    Nonce,
    PeerRef,
    RoomKey,
    SamplingParams,
)

BLOCK_SIZE = 16
EOS = 2
FIRST_TOKEN = 7
MAX_MODEL_LEN = 8192
PREFILL = PeerRef("prefill:1", 0, Incarnation(b"P" * 16), "tcp://prefill:1")
DECODE = PeerRef("decode:1", 0, Incarnation(b"D" * 16), "tcp://decode:1")
#: One layer: the scheduler's work does not depend on their number.
SPEC = KVCacheSpec((KVCacheEntry("layers.0.k", "full", "float32", BLOCK_SIZE, 1, 1, 8),))


class DecodeRank:
    """``core`` with up to ``max_running`` sequences over ``num_blocks`` blocks."""

    def __init__(self, max_running: int, num_blocks: int, num_slots: int = 64) -> None:
        limits = CoreLimits(
            max_running=max_running,
            max_queued_requests=1 << 20,
            num_metadata_slots=num_slots,
        )
        stride = SPEC.entries[0].item_len
        self.setup = CoreSetup(
            me=DECODE,
            limits=limits,
            spec=SPEC,
            placement=KVPlacement(num_blocks, (0,), (0,), (stride,)),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            fingerprint="benchmark",
            transport="loopback",
        )
        self.blocks = KVBlocks(SPEC, num_blocks, MAX_MODEL_LEN)
        self.core = DecodeCore(self.setup, self.blocks)
        self.finished: list[ReportFinished] = []
        #: Everything else the core reported, when somebody wants to look.
        self.reports: list[Effect] | None = None
        self.now = 1000.0
        self._rooms = itertools.count(1)
        self._leases: dict[RoomKey, LeaseId] = {}
        self._hashes: dict[RoomKey, tuple[int, int]] = {}

    def submit(self, num_prompt_tokens: int, max_tokens: int) -> RoomKey:
        key = RoomKey(next(self._rooms), 1)
        request = GenerateRequest(
            key,
            f"r{key.room}",
            tuple(range(10, 10 + num_prompt_tokens)),
            SamplingParams(max_tokens=max_tokens),
            expires_at_s=1e9,
            remaining_s=1e6,
            bootstrap="prefill:8998",
        )
        self.core.submit(request, self.now)
        return key

    def settle(self) -> None:
        """Tick, and play everybody else, until nothing changes any more."""
        core = self.core
        while True:
            if core.wants_tick:
                core.tick(self.now)
            effects = core.poll_effects()
            if not effects:
                return
            for effect in effects:
                event = self.answer(effect)
                if event is not None:
                    core.handle_event(event, self.now)

    def answer(self, effect: Effect) -> Event | None:
        match effect:
            case ReduceVotes():
                return VotesReduced(effect.sequence, effect.votes)
            case SendMessage(_, Handshake() as handshake):
                self._leases[handshake.key] = handshake.lease
                self._hashes[handshake.key] = (handshake.num_tokens, handshake.ids_hash)
                nonce = Nonce(PREFILL.incarnation, handshake.key.room)
                return self._say(Claim(handshake.key, handshake.lease, nonce))
            case SendMessage(_, Grant() as grant):
                num_tokens, ids_hash = self._hashes.pop(grant.key)
                metadata = MetadataRecord(
                    *grant.key, grant.nonce, FIRST_TOKEN, None, num_tokens, ids_hash
                )
                lease = self._leases.pop(grant.key)
                done = Status(
                    grant.key, lease, StatusKind.DONE, grant.nonce, None, encode_record(metadata)
                )
                return self._say(done)
            case FetchTopology():
                return TopologyFetched(effect.bootstrap, self._route())
            case ReportFinished():
                self.finished.append(effect)
            case _ if self.reports is not None:
                self.reports.append(effect)
        return None

    def _say(self, message: Claim | Status) -> Event:
        return MessageReceived(PREFILL, DECODE.incarnation, message)

    def _route(self) -> Route:
        profile = self.setup.profile()
        return Route(
            attn_tp_size=1,
            attn_cp_size=1,
            dp_size=1,
            block_sizes=dict(profile.block_sizes),
            kv_cache_dtype=profile.kv_cache_dtype,
            max_prefill_tokens=profile.max_prefill_tokens,
            ranks={"0,0,0": RouteRank("prefill", 1, PREFILL.incarnation.hex())},
            instance=PREFILL.instance,
            layout_digest=profile.layout_digest,
            fingerprint=profile.fingerprint,
            transport=profile.transport,
            protocol_min=profile.protocol_min,
            protocol_max=profile.protocol_max,
        )


def needs(prompts: Sequence[int]) -> int:
    """Blocks that these prompts and one more token each take."""
    return sum(-(-(n + 1) // BLOCK_SIZE) for n in prompts)
