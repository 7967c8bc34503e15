"""Cores without a worker: requests, setups, and a prefill and a decode core wired by hand.

The tests of single modules need less than a world: no clock, no network. ``exchange`` carries
effects between two cores as the shell would, and hands the ones it is not asked for back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import attrs
import msgspec

from pdcore.config import CoreLimits
from pdcore.control.messages import Handshake, PeerMessage, Route, RouteRank
from pdcore.fsm.effects import Effect, ReduceVotes, ReportFinished, SendMessage
from pdcore.fsm.events import MessageReceived, TopologyFetched, VotesReduced
from pdcore.kv.cache import KVBlocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.prefill import PrefillCore
from pdcore.scheduler.setup import CoreSetup
from pdcore.types import GenerateRequest, Incarnation, PeerRef, RoomKey, SamplingParams

BLOCK = 4
PREFILL = PeerRef("prefill", 0, Incarnation(b"P" * 16), "tcp://prefill:1")
DECODE = PeerRef("decode", 0, Incarnation(b"D" * 16), "tcp://decode:1")
_rooms = itertools.count(1)


def make_spec(**changes: object) -> KVCacheSpec:
    entry = KVCacheEntry("layer0.k", "full", "uint8", BLOCK, 2, 2, 16)
    entry = attrs.evolve(entry, **changes)
    return KVCacheSpec((entry, attrs.evolve(entry, name="layer0.v")))


def make_setup(
    me: PeerRef = DECODE,
    limits: CoreLimits | None = None,
    spec: KVCacheSpec | None = None,
    num_blocks: int = 64,
    **changes: object,
) -> CoreSetup:
    spec = spec or make_spec()
    item = spec.entries[0].item_len
    count = len(spec.entries)
    placement = KVPlacement(
        num_blocks, (1,) * count, tuple(i * item for i in range(count)), (item * count,) * count
    )
    setup = CoreSetup(
        me=me,
        limits=limits or CoreLimits(),
        spec=spec,
        placement=placement,
        max_model_len=512,
        eos_token_ids=frozenset({2}),
        fingerprint="model",
        transport="loopback",
        transport_descriptor=b"here",
    )
    return attrs.evolve(setup, **changes)


def make_request(
    num_tokens: int = 8,
    key: RoomKey | None = None,
    remaining_s: float = 60.0,
    max_tokens: int = 4,
    **changes: object,
) -> GenerateRequest:
    number = next(_rooms)
    request = GenerateRequest(
        key=key or RoomKey(number, number),
        request_id="r",
        prompt_token_ids=tuple(10 + i for i in range(num_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        expires_at_s=1e9,
        remaining_s=remaining_s,
        bootstrap="bootstrap:1",
        prefill="prefill",
        decode="decode",
    )
    return attrs.evolve(request, **changes)


def make_prefill(
    limits: CoreLimits | None = None, num_blocks: int = 64, **changes: object
) -> PrefillCore:
    setup = make_setup(PREFILL, limits, num_blocks=num_blocks, **changes)
    return PrefillCore(setup, KVBlocks(setup.spec, num_blocks, setup.max_model_len))


def make_decode(
    limits: CoreLimits | None = None, num_blocks: int = 64, **changes: object
) -> DecodeCore:
    setup = make_setup(DECODE, limits, num_blocks=num_blocks, **changes)
    return DecodeCore(setup, KVBlocks(setup.spec, num_blocks, setup.max_model_len))


def make_route(setup: CoreSetup, peer: PeerRef = PREFILL, **changes: object) -> Route:
    """The route of one prefill rank that is compatible with ``setup``."""
    profile = setup.profile()
    fields: dict[str, object] = {
        "attn_tp_size": 1,
        "attn_cp_size": 1,
        "dp_size": 1,
        "block_sizes": dict(profile.block_sizes),
        "kv_cache_dtype": profile.kv_cache_dtype,
        "max_prefill_tokens": profile.max_prefill_tokens,
        "ranks": {"0,0,0": RouteRank(peer.instance, 1, peer.incarnation.hex())},
        "instance": peer.instance,
        "layout_digest": profile.layout_digest,
        "fingerprint": profile.fingerprint,
        "transport": profile.transport,
    }
    return Route(**{**fields, **changes})


def tick(core: PrefillCore | DecodeCore, now: float = 0.0) -> list[Effect]:
    """Ticks with a group of one until nothing changes; returns the other effects."""
    kept: list[Effect] = []
    for _ in range(20):
        if core.wants_tick:
            core.tick(now)
        effects = core.poll_effects()
        if not effects:
            return kept
        for effect in effects:
            if isinstance(effect, ReduceVotes):
                core.handle_event(VotesReduced(effect.sequence, effect.votes), now)
            else:
                kept.append(effect)
    raise AssertionError(f"{core.snapshot()} does not come to rest")


def tell(
    core: PrefillCore | DecodeCore, sender: PeerRef, message: PeerMessage, now: float = 0.0
) -> None:
    core.handle_event(MessageReceived(sender, core.setup.me.incarnation, message), now)


def sent(effects: Iterable[Effect], kind: type[PeerMessage]) -> list[PeerMessage]:
    """The messages of one kind among effects."""
    messages = [e.message for e in effects if isinstance(e, SendMessage)]
    return [m for m in messages if isinstance(m, kind)]


def results(effects: Iterable[Effect]) -> list[ReportFinished]:
    return [e for e in effects if isinstance(e, ReportFinished)]


def exchange(
    prefill: PrefillCore, decode: DecodeCore, now: float = 0.0, *, rounds: int = 10
) -> list[Effect]:
    """Carry messages between the two until both rest; returns every other effect."""
    kept: list[Effect] = []
    pairs: Sequence[tuple[PrefillCore | DecodeCore, PrefillCore | DecodeCore]] = (
        (decode, prefill),
        (prefill, decode),
    )
    for _ in range(rounds):
        moved = False
        for sender, receiver in pairs:
            for effect in tick(sender, now):
                if isinstance(effect, SendMessage):
                    moved = True
                    tell(receiver, sender.setup.me, effect.message, now)
                else:
                    kept.append(effect)
        if not moved:
            break
    return kept


def start(decode: DecodeCore, request: GenerateRequest, now: float = 0.0) -> list[Effect]:
    """Submit at decode with a known route, and let it come to rest."""
    decode.submit(request, now)
    effects = tick(decode, now)
    event = TopologyFetched(request.bootstrap, make_route(decode.setup))
    decode.handle_event(event, now)
    return [*effects, *tick(decode, now)]


def handshake_of(effects: Iterable[Effect]) -> Handshake:
    (message,) = sent(effects, Handshake)
    assert isinstance(message, Handshake)
    return message


def handshake_for(request: GenerateRequest, **changes: object) -> Handshake:
    """What the decode rank of this request would send."""
    return msgspec.structs.replace(handshake_of(start(make_decode(), request)), **changes)
