"""The small cluster that the pair worlds are made of: ranks, their process lives, requests.

A *place* is where a rank runs; processes come and go there. Everything is spelled as the
product spells it (setups, routes, requests), only small: one cache entry, blocks of four
tokens, one block a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import attrs

from pdcore.config import CoreLimits
from pdcore.control.messages import Route
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.scheduler.route import route_of
from pdcore.scheduler.setup import CoreSetup
from pdcore.topology import ParallelLayout
from pdcore.types import GenerateRequest, Incarnation, PeerRef, RoomKey, SamplingParams

#: Tokens of a block, and of one forward pass.
BLOCK: Final = 4
MAX_MODEL_LEN: Final = 64
#: Every token that is sampled.
TOKEN: Final = 7
DECODE_INSTANCE: Final = "decode"


@attrs.frozen
class Place:
    """One rank of one instance."""

    name: str
    is_decode: bool
    instance: str
    rank: int = 0
    tp_size: int = 1

    @property
    def bootstrap(self) -> str:
        """Address of the bootstrap server of this place's instance."""
        return f"{self.instance}-bootstrap:1"

    def ref(self, life: int) -> PeerRef:
        return _ref(self, life)


@lru_cache(maxsize=1024)
def _ref(place: Place, life: int) -> PeerRef:
    mark = f"{place.name}.{life}".encode()
    incarnation = Incarnation(mark.ljust(16, b"_"))
    return PeerRef(place.instance, place.rank, incarnation, f"tcp://{place.name}:1")


def life_of(incarnation: Incarnation) -> str:
    """ "prefill0.1": the name of a process life, for people."""
    return incarnation.rstrip(b"_").decode() or "anybody"


@attrs.frozen
class Dispatch:
    """One (room, attempt): which prefill instance, and the attempt it replaces."""

    key: RoomKey
    prefill: str
    replaces: int | None = None


#: The one decode rank of most worlds.
DECODE: Final = Place("decode", True, DECODE_INSTANCE)


@attrs.frozen
class Shape:
    """Sizes of a world: what makes it finite."""

    prefill: tuple[Place, ...]
    dispatches: tuple[Dispatch, ...]
    num_chunks: int = 1
    decode: tuple[Place, ...] = (DECODE,)
    #: Output tokens; the first comes from prefill, so 1 is over when its KV has come.
    num_outputs: int = 1
    #: Requests that the decode pool and its metadata slots have room for.
    decode_rooms: int = 2
    prefill_rooms: int = 2
    quarantine_s: float = 0.0
    is_enforced: bool = False
    #: Entities that may be created for one key on one place: more than one needs eviction.
    num_entities: int = 1

    @property
    def num_tokens(self) -> int:
        return BLOCK * self.num_chunks

    def request(self, index: int) -> GenerateRequest:
        dispatch = self.dispatches[index]
        return GenerateRequest(
            key=dispatch.key,
            request_id=f"request {dispatch.key.room}",
            prompt_token_ids=tuple(range(10, 10 + self.num_tokens)),
            sampling=SamplingParams(max_tokens=self.num_outputs),
            expires_at_s=1e9,
            remaining_s=60.0,
            bootstrap=f"{dispatch.prefill}-bootstrap:1",
            prefill=dispatch.prefill,
            decode=DECODE_INSTANCE,
            replaces=dispatch.replaces,
        )


def setup_of(place: Place, life: int, shape: Shape) -> CoreSetup:
    """What a process life at this place is told about itself."""
    heads = max(1, 2 // place.tp_size)
    entry = KVCacheEntry("layer0.kv", "full", "uint8", BLOCK, heads, 2, 4)
    rooms = shape.decode_rooms if place.is_decode else shape.prefill_rooms
    num_blocks = num_blocks_of(place, shape)
    return CoreSetup(
        me=place.ref(life),
        limits=CoreLimits(
            prefill_chunk_tokens=BLOCK,
            num_metadata_slots=rooms,
            num_reserved_decode_tokens=0,
            max_running=2,
            peer_failures=1_000_000,
        ),
        spec=KVCacheSpec((entry,), place.tp_size, place.rank if place.tp_size > 1 else 0),
        placement=KVPlacement(num_blocks, (1,), (0,), (entry.item_len,)),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset(),
        fingerprint="model",
        transport="loopback",
        transport_descriptor=b"here",
        layout=ParallelLayout(place.tp_size, place.tp_size),
        quarantine_s=shape.quarantine_s,
    )


def num_blocks_of(place: Place, shape: Shape) -> int:
    """The null block, and as many as the rooms of this place need; decode takes one more
    for the first generated token."""
    if place.is_decode:
        return 1 + shape.decode_rooms * (shape.num_chunks + 1)
    return 1 + shape.prefill_rooms * shape.num_chunks


def route_to(places: Sequence[Place], lives: Sequence[int], shape: Shape) -> Route:
    """What the bootstrap server of one instance answers while these lives are registered."""
    return route_of([setup_of(p, n, shape) for p, n in zip(places, lives, strict=True)])
