"""Who is where, and who talks to whom: pure arithmetic on ranks (R1-R6, R57-R60).

An instance is one complete pp x dp x cp x tp arrangement of ranks of one role. Node
placement says which ranks a node runs; rank coordinates say what a rank holds; the
target rank mapping says which prefill ranks write into one decode rank, and how many
answers each side waits for. The lifecycles only count what this module says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import attrs

from pdcore.errors import ConfigError, IncompatibleError, InvalidRequest


class NodePlacement(NamedTuple):
    """What node ``node_index`` of a role runs (R3)."""

    instance: int
    rank_in_instance: int
    is_leader: bool
    leader_address: str
    rank_offset: int
    local_world_size: int


def place_node(
    world_size: int, devices_per_node: int, node_index: int, ips: Sequence[str]
) -> NodePlacement:
    """R3: ``world_size`` ranks per instance, ``ips`` the role's nodes in order.

    Raises ConfigError for sizes below 1, a world size that is not a multiple of the
    devices per node (smaller is allowed: the node is not full), or an index outside
    ``ips``.
    """
    _check_world(world_size, devices_per_node)
    if not 0 <= node_index < len(ips):
        raise ConfigError(
            f"node_index {node_index} is outside the list of {len(ips)} ips; count from 0 "
            f"within this role's own list"
        )
    nodes = max(1, world_size // devices_per_node)
    instance, rank_in_instance = divmod(node_index, nodes)
    if (instance + 1) * nodes > len(ips):
        raise ConfigError(
            f"node_index {node_index} belongs to instance {instance}, which needs {nodes} "
            f"nodes, but ips has only {len(ips)}; add nodes or lower world_size"
        )
    offset = rank_in_instance * devices_per_node
    return NodePlacement(
        instance=instance,
        rank_in_instance=rank_in_instance,
        is_leader=rank_in_instance == 0,
        leader_address=ips[instance * nodes],
        rank_offset=offset,
        local_world_size=min(devices_per_node, world_size - offset),
    )


def leader_addresses(world_size: int, devices_per_node: int, ips: Sequence[str]) -> list[str]:
    """The leader of each complete instance: router targets and bootstrap hosts (R5)."""
    _check_world(world_size, devices_per_node)
    nodes = max(1, world_size // devices_per_node)
    return [ips[i] for i in range(0, len(ips) - nodes + 1, nodes)]


def _check_world(world_size: int, devices_per_node: int) -> None:
    if world_size < 1 or devices_per_node < 1:
        raise ConfigError(
            f"world_size {world_size} and devices_per_node {devices_per_node} must be >= 1"
        )
    if world_size > devices_per_node and world_size % devices_per_node:
        raise ConfigError(
            f"world_size {world_size} is not a multiple of devices_per_node {devices_per_node}"
        )


class RankCoordinates(NamedTuple):
    """Where a rank sits in its instance."""

    dp: int
    cp: int
    tp: int
    pp: int = 0


@attrs.frozen
class ParallelLayout:
    """Sizes of one instance. Raises ConfigError when they do not divide (R4)."""

    world_size: int
    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    #: Every CP rank writes its share of the KV, not the first alone all of it (R21).
    all_cp_ranks: bool = False

    def __attrs_post_init__(self) -> None:
        sizes = (self.world_size, self.tp_size, self.cp_size, self.pp_size)
        if min(sizes) < 1 or self.world_size % (self.tp_size * self.cp_size * self.pp_size):
            raise ConfigError(
                f"world_size {self.world_size} must be a positive multiple of tp_size "
                f"{self.tp_size} x cp_size {self.cp_size} x pp_size {self.pp_size}"
            )

    @property
    def group_size(self) -> int:
        """Ranks that move the same requests in the same tick (R91)."""
        return self.tp_size * self.cp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.group_size * self.pp_size)

    def coordinates(self, rank: int) -> RankCoordinates:
        """R4: ``rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp``."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside 0..{self.world_size - 1}")
        rest, tp = divmod(rank, self.tp_size)
        rest, cp = divmod(rest, self.cp_size)
        pp, dp = divmod(rest, self.dp_size)
        return RankCoordinates(dp, cp, tp, pp)

    def rank(self, at: RankCoordinates) -> int:
        return ((at.pp * self.dp_size + at.dp) * self.cp_size + at.cp) * self.tp_size + at.tp

    def is_dp_leader(self, rank: int) -> bool:
        """First rank of its DP partition (R2)."""
        return rank % self.group_size == 0

    def group_ranks(self, rank: int) -> range:
        """The tp x cp partition of a rank, contiguous (R91)."""
        first = rank - rank % self.group_size
        return range(first, first + self.group_size)

    def route_key(self, at: RankCoordinates) -> str:
        """``dp,cp,tp`` when pp_size is 1, else ``dp,cp,tp,pp`` (R4)."""
        base = f"{at.dp},{at.cp},{at.tp}"
        return base if self.pp_size == 1 else f"{base},{at.pp}"

    def expected_route_keys(self) -> frozenset[str]:
        """Exactly the keys that make an instance ready (R10, D31)."""
        return frozenset(self.route_key(self.coordinates(r)) for r in range(self.world_size))


def parse_route_key(key: str) -> RankCoordinates:
    """The coordinates a route key names. Raises ValueError for anything else."""
    parts = key.split(",")
    if len(parts) not in (3, 4) or not all(p.isascii() and p.isdigit() for p in parts):
        raise ValueError(f"route key must be dp,cp,tp or dp,cp,tp,pp, got {key!r}")
    return RankCoordinates(*(int(p) for p in parts))


def stage_layers(num_layers: int, pp_size: int, stage: int) -> range:
    """Layers of one pipeline stage: even, the first stages take the remainder (R4)."""
    if not 0 <= stage < pp_size or num_layers < pp_size:
        raise ConfigError(
            f"stage {stage} of pp_size {pp_size} cannot hold part of {num_layers} layers"
        )
    base, extra = divmod(num_layers, pp_size)
    start = stage * base + min(stage, extra)
    return range(start, start + base + (stage < extra))


#: Ranks of one instance, as many as a route may name. A peer that claims more costs whoever
#: counts its ranks seconds and gigabytes.
MAX_RANKS: Final = 65536

#: The axes along which the ranks of an instance are arranged.
AXES: Final = ("tp_size", "cp_size", "dp_size", "pp_size")


@attrs.frozen
class InstanceProfile:
    """What one instance declares and another checks. Empty or 0 means "not told"."""

    tp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    block_sizes: Mapping[str, int] = attrs.Factory(dict)
    kv_cache_dtype: str = ""
    max_prefill_tokens: int = 0
    layout_digest: str = ""
    fingerprint: str = ""
    transport: str = ""
    protocol_min: int = 1
    protocol_max: int = 1
    all_cp_ranks: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """In the order of :data:`AXES`."""
        return self.tp_size, self.cp_size, self.dp_size, self.pp_size

    @property
    def shape(self) -> str:
        """For people: the whole arrangement, in every refusal that is about sizes."""
        return "tp {} x cp {} x dp {} x pp {}".format(*self.sizes)


def check_compatible(decode: InstanceProfile, prefill: InstanceProfile) -> None:
    """R57, D14, D35: raises IncompatibleError naming both values, else returns.

    The caller marks that prefill instance incompatible and fails only its requests.
    """
    check_shapes(decode, prefill)
    if max(prefill.protocol_min, decode.protocol_min) > min(
        prefill.protocol_max, decode.protocol_max
    ):
        raise _mismatch(
            "protocol versions",
            f"{prefill.protocol_min}..{prefill.protocol_max}",
            f"{decode.protocol_min}..{decode.protocol_max}",
            "the ranges must overlap: upgrade one side",
        )
    if prefill.transport and decode.transport and prefill.transport != decode.transport:
        raise _mismatch("transport", prefill.transport, decode.transport, "choose one for both")
    is_staged = max(prefill.pp_size, decode.pp_size) > 1
    if prefill.block_sizes.keys() != decode.block_sizes.keys() and not is_staged:
        # The sizes may differ (:mod:`pdcore.kv.reblock`), the manager keys may not; a stage
        # has those of its own layers.
        raise _mismatch(
            "block_sizes",
            dict(prefill.block_sizes),
            dict(decode.block_sizes),
            "both must have the same manager keys",
        )
    ours, theirs = attrs.asdict(decode, recurse=False), attrs.asdict(prefill, recurse=False)
    for name in ("kv_cache_dtype", "layout_digest", "fingerprint"):
        if ours[name] and theirs[name] and ours[name] != theirs[name]:
            raise _mismatch(name, theirs[name], ours[name], "both sides must load the same model")
    caps = prefill.max_prefill_tokens, decode.max_prefill_tokens
    if min(caps) > 0 and caps[1] < caps[0]:
        raise _mismatch("max_prefill_tokens", *caps, "decode's must not be smaller")


def check_shapes(
    decode: InstanceProfile, prefill: InstanceProfile, num_layers: int | None = None
) -> None:
    """D30: can every rank of one arrangement find its counterparts in the other?

    TP and PP sizes must divide one way or the other, decode has no CP (R57), and no side has
    more stages than the model has layers, or more ranks than anybody has. Prefill's CP and both
    sides' DP are free. Raises IncompatibleError with both whole shapes, so that a pair is
    refused when the topology is loaded and not when the first rank is looked for.
    """
    try:
        for name, theirs, ours in zip(AXES, prefill.sizes, decode.sizes, strict=True):
            if min(theirs, ours) < 1:
                raise _mismatch(name, theirs, ours, "must be >= 1")
        ranks = math.prod(prefill.sizes), math.prod(decode.sizes)
        if max(ranks) > MAX_RANKS:
            raise _mismatch("ranks", *ranks, f"an instance has at most {MAX_RANKS}")
        if decode.cp_size != 1:
            raise _mismatch("cp_size", prefill.cp_size, decode.cp_size, "decode must have 1")
        check_divisible("tp_size", decode.tp_size, prefill.tp_size)
        check_divisible("pp_size", decode.pp_size, prefill.pp_size)
        stages = max(prefill.pp_size, decode.pp_size)
        if num_layers is not None and num_layers < stages:
            raise _mismatch(
                "pp_size", prefill.pp_size, decode.pp_size, f"the model has {num_layers} layers"
            )
    except IncompatibleError as error:
        raise IncompatibleError(
            f"{error} (prefill is {prefill.shape}, decode is {decode.shape})"
        ) from None


def _mismatch(name: str, prefill: object, decode: object, remedy: str) -> IncompatibleError:
    return IncompatibleError(f"{name}: prefill has {prefill}, decode has {decode}; {remedy}")


def check_divisible(name: str, decode: int, prefill: int) -> None:
    """D30: unequal sizes must divide, or the mapping names ranks that do not exist."""
    if decode < 1 or prefill < 1 or (decode % prefill and prefill % decode):
        raise _mismatch(name, prefill, decode, "one must be a multiple of the other")


@attrs.frozen
class TargetRankMapping:
    """The prefill ranks one decode rank sends its handshake to (R58).

    ``target_tp_rank`` is the first real target. Ranks in ``dummy_tp_ranks`` hold the
    same MLA rows as it, write nothing and are not counted (``topologies.map_to`` asks them too).
    ``required_prefill_response_num`` prefill ranks must report Done here.

    ``dst_info_nums``: how many handshakes arrive at a prefill rank in all, by the stages in
    ``target_pp_ranks``. They differ between stages where the stages of one side do not end
    where stages of the other do (10 layers on 2 and on 4 stages: 3, 3, 2, 2).
    """

    target_tp_rank: int
    target_tp_ranks: tuple[int, ...]
    target_cp_ranks: tuple[int, ...]
    dst_info_nums: tuple[int, ...]
    required_prefill_response_num: int
    dummy_tp_ranks: tuple[int, ...] = ()
    target_pp_ranks: tuple[int, ...] = (0,)

    @property
    def required_dst_info_num(self) -> int:
        """R58: of the first of our stages; of all of them unless they differ."""
        return self.dst_info_nums[0]

    def info_num(self, at: RankCoordinates) -> int:
        """Handshakes that the prefill rank ``at``, one of our targets, waits for."""
        return self.dst_info_nums[self.target_pp_ranks.index(at.pp)]

    def targets(self, dp_rank: int) -> list[tuple[RankCoordinates, bool]]:
        """(coordinates, is dummy) of every rank to contact, in a fixed order."""
        return [
            (RankCoordinates(dp_rank, cp, tp, pp), tp in self.dummy_tp_ranks)
            for pp in self.target_pp_ranks
            for cp in self.target_cp_ranks
            for tp in self.target_tp_ranks
        ]


def map_target_ranks(
    decode: InstanceProfile,
    prefill: InstanceProfile,
    at: RankCoordinates,
    *,
    is_mla: bool = False,
    all_cp_ranks: bool = False,
    num_layers: int | None = None,
) -> TargetRankMapping:
    """R58 for the decode rank ``at``, with R4's pipeline rule.

    ``all_cp_ranks``: every prefill CP rank sends its share (R21), else only cp 0.
    ``num_layers`` is needed only when either side has pp_size > 1. Raises
    IncompatibleError for shapes that do not pair (:func:`check_shapes`), ConfigError for a
    rank that decode does not have.
    """
    check_shapes(decode, prefill, num_layers)
    for name, value, size in (("tp", at.tp, decode.tp_size), ("pp", at.pp, decode.pp_size)):
        if not 0 <= value < size:
            raise ConfigError(f"{name} rank {value} is outside 0..{size - 1}")
    dummies: tuple[int, ...] = ()
    if decode.tp_size >= prefill.tp_size:
        ratio = decode.tp_size // prefill.tp_size
        ranks: tuple[int, ...] = (at.tp // ratio,)
        infos, responses = ratio, 1
    else:
        span = prefill.tp_size // decode.tp_size
        ranks = tuple(range(at.tp * span, (at.tp + 1) * span))
        infos, responses = 1, 1 if is_mla else span
        dummies = ranks[1:] if is_mla else ()
    cp_ranks = tuple(range(prefill.cp_size)) if all_cp_ranks else (0,)
    stages, stage_infos = _overlapping_stages(decode.pp_size, prefill.pp_size, at.pp, num_layers)
    return TargetRankMapping(
        target_tp_rank=ranks[0],
        target_tp_ranks=ranks,
        target_cp_ranks=cp_ranks,
        dst_info_nums=tuple(infos * served for served in stage_infos),
        required_prefill_response_num=responses * len(cp_ranks) * len(stages),
        dummy_tp_ranks=dummies,
        target_pp_ranks=stages,
    )


def _overlapping_stages(
    decode_pp: int, prefill_pp: int, stage: int, num_layers: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prefill stages that own any of our layers, decode stages that each of them serves)."""
    if decode_pp == 1 and prefill_pp == 1:
        return (0,), (1,)
    if num_layers is None:
        raise ConfigError("num_layers is needed to map pipeline stages")
    theirs = [stage_layers(num_layers, prefill_pp, s) for s in range(prefill_pp)]
    ours = [stage_layers(num_layers, decode_pp, s) for s in range(decode_pp)]
    mine = tuple(s for s, layers in enumerate(theirs) if _overlap(layers, ours[stage]))
    return mine, tuple(sum(_overlap(theirs[s], layers) for layers in ours) for s in mine)


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def choose_dp_rank(room: int, dp_size: int, named: int | None) -> int:
    """R60, D21: the prefill dp rank of a request: the one it names, else ``room % dp_size``.

    Prefill leader and decode rank both ask here, each with the prefill instance's ``dp_size``:
    who is told no rank finds the one that the other finds; the router, which tells both, asks with
    a number of its own. Raises InvalidRequest for a rank that the instance does not have.
    """
    if named is None:
        return room % dp_size
    if not 0 <= named < dp_size:
        raise InvalidRequest(
            "disagg_prefill_dp_rank",
            f"{named} is outside 0..{dp_size - 1} of the prefill instance; leave it out to have "
            "one chosen",
        )
    return named
