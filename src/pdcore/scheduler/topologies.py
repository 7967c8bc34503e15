"""What decode knows about prefill instances: routes, fetched off the tick (D28).

One entry per bootstrap address: unknown, being fetched, good until its time to live, or
refused with a reason (negative cache, D14). An instance that cannot be reached fails the
requests that wait for it after ``topology_ttl_s``, never the loop (D20).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

from pdcore.control.messages import Route, RouteRank
from pdcore.errors import IncompatibleError, InvalidRequest, failure
from pdcore.kv.slices import check_reshard
from pdcore.scheduler.setup import CoreSetup
from pdcore.topology import (
    InstanceProfile,
    ParallelLayout,
    RankCoordinates,
    TargetRankMapping,
    check_compatible,
    choose_dp_rank,
    map_target_ranks,
)
from pdcore.types import Failure, Incarnation, PeerRef

#: Bootstrap addresses remembered; more than a deployment has prefill instances.
MAX_ENTRIES: Final = 1024
#: Process lives remembered as over; a bootstrap server forgets one when its lease ends.
MAX_OVER: Final = 4096

_INCARNATION: Final = re.compile("[0-9a-f]{32}")


class TopologyEntry:
    """``route`` and ``refusal`` are exclusive; both None while nothing is known."""

    __slots__ = (
        "fetched_s",
        "is_fetching",
        "latest",
        "problem",
        "refusal",
        "retry_s",
        "route",
        "targets",
    )

    def __init__(self) -> None:
        self.route: Route | None = None
        #: Of that route, by dp rank: as :meth:`Topologies.targets` found them.
        self.targets: dict[int, tuple[list[PeerRef], int] | Failure] = {}
        #: The last route that was served here, whether it may still be used or not.
        self.latest: Route | None = None
        self.refusal: Failure | None = None
        #: Why the last fetch brought nothing; shown to requests that give up.
        self.problem: Failure | None = None
        self.is_fetching = False
        self.fetched_s = float("-inf")
        #: Not before this: a fetch that failed is repeated at intervals, not in a spin (D20).
        self.retry_s = float("-inf")


class Topologies:
    """Bounded: the addresses come with requests, so a client chooses them (D6, D41)."""

    def __init__(self, setup: CoreSetup) -> None:
        self.setup = setup
        self._decode = setup.profile()
        #: Least recently used first.
        self.entries: OrderedDict[str, TopologyEntry] = OrderedDict()
        #: Process lives that a newer epoch of their own instance's route has left out; the
        #: core takes them from here and fails their rooms (D32).
        self.evicted: list[Incarnation] = []
        #: In hexadecimal, as routes name them; oldest first.
        self._over: OrderedDict[str, None] = OrderedDict()

    def lookup(self, bootstrap: str, now: float) -> TopologyEntry:
        """The entry of an address; a refusal that is too old counts as unknown."""
        entry = self.entries.get(bootstrap)
        if entry is None:
            entry = self.entries[bootstrap] = TopologyEntry()
        self.entries.move_to_end(bootstrap)
        while len(self.entries) > MAX_ENTRIES:
            # Whoever waits for a forgotten one asks for it again.
            self.entries.popitem(last=False)
        if entry.refusal is not None and not self._is_fresh(entry, now):
            entry.refusal = None
        return entry

    def needs_fetch(self, bootstrap: str, now: float) -> bool:
        """True once per fetch: the caller emits FetchTopology (single flight)."""
        entry = self.lookup(bootstrap, now)
        known = self._is_fresh(entry, now) and (entry.route or entry.refusal)
        if entry.is_fetching or known or now < entry.retry_s:
            return False
        entry.is_fetching = True
        return True

    def record(
        self, bootstrap: str, route: Route | None, problem: Failure | None, now: float
    ) -> TopologyEntry:
        """Store the answer of a fetch. A route that cannot be paired becomes a refusal; one
        that still names a life that is over is no answer yet (D32)."""
        entry = self.lookup(bootstrap, now)
        entry.is_fetching = False
        if route is not None and (gone := self._gone(route)) is not None:
            detail = f"prefill at {bootstrap}: rank {gone} is gone, and not registered anew"
            route, problem = None, failure("unavailable", detail)
        if route is None:
            entry.problem = problem or failure("unreachable", f"no route from {bootstrap}")
            if entry.problem.http_status < 500 or entry.problem.code == "incompatible":
                # Asking again cannot help (an address that may not be asked, another
                # protocol), so nobody waits for it.
                entry.route, entry.refusal, entry.fetched_s = None, entry.problem, now
                return entry
            if entry.problem.code == "unavailable":
                # Its own server says that ranks are missing: this route is over (D48).
                entry.route = None
            # Nobody answers: a stale route may still be good, the lifecycles notice if not.
            entry.retry_s = now + self.setup.limits.topology_retry_s
            return entry
        entry.fetched_s = now
        entry.problem = None
        entry.route, entry.refusal, entry.targets = route, None, {}
        self._compare(entry.latest, route)
        entry.latest = route
        try:
            check_pair(self.setup, profile_of(route))
            for key, rank in route.ranks.items():
                _check_rank(key, rank)
        except IncompatibleError as error:
            entry.route = None
            entry.refusal = failure("incompatible", f"prefill at {bootstrap}: {error}")
        return entry

    def refused(self, now: float) -> dict[str, str]:
        """Prefill instance -> why this rank cannot be its decode, as long as that is fresh."""
        return {
            entry.latest.instance: entry.refusal.detail
            for entry in self.entries.values()
            if entry.latest is not None and entry.refusal is not None and self._is_fresh(entry, now)
        }

    def end(self, incarnation: Incarnation) -> None:
        """A prefill rank's life is over, by proof: until its successor has registered, the
        bootstrap server goes on naming it, and that route would be a dead end for its whole
        time to live."""
        self._over[incarnation.hex()] = None
        while len(self._over) > MAX_OVER:
            self._over.popitem(last=False)
        self.forget(incarnation)

    def forget(self, incarnation: Incarnation) -> None:
        """A prefill rank is silent: its route must be asked for again."""
        for entry in self.entries.values():
            route = entry.route
            if route is not None and any(
                r.incarnation == incarnation.hex() for r in route.ranks.values()
            ):
                entry.fetched_s = float("-inf")
                entry.route = None

    def _compare(self, former: Route | None, route: Route) -> None:
        """Another epoch: who of the former one is not in it any more?"""
        if former is None or (former.instance, former.epoch) == (route.instance, route.epoch):
            return
        if former.instance == route.instance:
            here = {rank.incarnation for rank in route.ranks.values()}
            gone = {r.incarnation for r in former.ranks.values()} - here
            self.evicted.extend(
                Incarnation(bytes.fromhex(one))
                for one in sorted(gone)
                if _INCARNATION.fullmatch(one)
            )

    def _gone(self, route: Route) -> str | None:
        """The key of a rank whose life is over."""
        return next((key for key, r in route.ranks.items() if r.incarnation in self._over), None)

    def _is_fresh(self, entry: TopologyEntry, now: float) -> bool:
        return now - entry.fetched_s < self.setup.limits.topology_ttl_s

    def targets_of(
        self, entry: TopologyEntry, route: Route, room: int, named_dp_rank: int | None
    ) -> tuple[list[PeerRef], int] | Failure:
        """:meth:`targets` of the entry's route. All requests of one dp rank have the same."""
        try:
            dp_rank = choose_dp_rank(room, route.dp_size, named_dp_rank)
        except InvalidRequest:
            return self.targets(route, room, named_dp_rank)
        if dp_rank not in entry.targets:
            entry.targets[dp_rank] = self.targets(route, room, dp_rank)
        return entry.targets[dp_rank]

    def targets(
        self, route: Route, room: int, named_dp_rank: int | None
    ) -> tuple[list[PeerRef], int] | Failure:
        """(prefill ranks to send a handshake to, handshakes each of them needs). The route says
        how many dp ranks prefill has, and so which of them an unnamed one is (R60, D21)."""
        try:
            dp_rank = choose_dp_rank(room, route.dp_size, named_dp_rank)
        except InvalidRequest as error:
            return failure("incompatible", f"{error} ({route.instance})")
        prefill = profile_of(route)
        layout = layout_of(route)
        mapping = map_to(self.setup, self._decode, prefill)
        peers: list[PeerRef] = []
        for at, is_dummy in mapping.targets(dp_rank):
            rank = route.ranks.get(layout.route_key(at))
            if rank is None:
                return failure("unavailable", f"prefill rank {layout.route_key(at)} is missing")
            if not is_dummy:
                address = f"tcp://{bracket(rank.rank_ip)}:{rank.rank_port}"
                incarnation = Incarnation(bytes.fromhex(rank.incarnation))
                peers.append(PeerRef(route.instance, layout.rank(at), incarnation, address))
        return peers, mapping.required_dst_info_num


def check_pair(setup: CoreSetup, prefill: InstanceProfile) -> None:
    """Can this decode rank be filled by that prefill? Everything that can be known when the
    topology is loaded (D30, D36): the layouts are the same, so our own entries say whether
    their heads divide over the ranks of both sides.

    Raises IncompatibleError; whatever is about sizes names both whole shapes.
    """
    decode = setup.profile()
    check_compatible(decode, prefill)
    try:
        check_reshard(setup.spec, prefill.tp_size, decode.tp_size)
    except IncompatibleError as error:
        raise IncompatibleError(
            f"{error} (prefill is {prefill.shape}, decode is {decode.shape})"
        ) from None
    if len(set(map_to(setup, decode, prefill).dst_info_nums)) > 1:
        # One handshake goes to all targets, and says how many each of them waits for.
        raise IncompatibleError(
            f"pp_size: {setup.spec.num_layers} layers do not end at the same stages on both "
            f"sides, use a multiple of both (prefill is {prefill.shape}, decode is {decode.shape})"
        )


def map_to(
    setup: CoreSetup, decode: InstanceProfile, prefill: InstanceProfile
) -> TargetRankMapping:
    """The ranks of that prefill that this decode rank, of profile ``decode``, asks for its KV
    (R58).

    Also those that write nothing: copies of MLA rows, CP ranks of an instance whose first one
    sends. A group moves a request when all of its ranks vote for it, and a rank votes when it has
    been asked; its plan is empty, and its Done is counted (R45 CHANGE)."""
    stages = setup.layout.pp_size > 1
    return map_target_ranks(
        decode,
        prefill,
        RankCoordinates(
            0, 0, setup.spec.tp_rank, setup.layout.coordinates(setup.me.rank).pp if stages else 0
        ),
        all_cp_ranks=True,
        num_layers=setup.spec.num_layers,
    )


def _check_rank(key: str, rank: RouteRank) -> None:
    """The answer of another process is not trusted to be well-formed (D58)."""
    if not _INCARNATION.fullmatch(rank.incarnation):
        raise IncompatibleError(
            f"rank {key}: incarnation {rank.incarnation[:40]!r} is not 32 hex digits"
        )
    if not rank.rank_ip or not 1 <= rank.rank_port <= 65535:
        raise IncompatibleError(
            f"rank {key}: {rank.rank_ip[:40]!r} port {rank.rank_port} is no address"
        )


def layout_of(route: Route) -> ParallelLayout:
    """How the ranks of that prefill instance are numbered."""
    group = route.attn_tp_size * route.attn_cp_size
    world = group * route.dp_size * route.pp_size
    return ParallelLayout(world, route.attn_tp_size, route.attn_cp_size, route.pp_size)


def profile_of(route: Route) -> InstanceProfile:
    return InstanceProfile(
        tp_size=route.attn_tp_size,
        cp_size=route.attn_cp_size,
        dp_size=route.dp_size,
        block_sizes=route.block_sizes,
        kv_cache_dtype=route.kv_cache_dtype,
        max_prefill_tokens=route.max_prefill_tokens,
        layout_digest=route.layout_digest,
        fingerprint=route.fingerprint,
        transport=route.transport,
        protocol_min=route.protocol_min,
        protocol_max=route.protocol_max,
        pp_size=route.pp_size,
        all_cp_ranks=route.all_cp_ranks,
    )


def bracket(host: str) -> str:
    """IPv6 literals need brackets in an address."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
