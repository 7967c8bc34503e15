"""Worlds of the fixed list beside the pairs: groups, the router, peers, ranks, an instance."""

from __future__ import annotations

from typing import Final

from pdcore.fsm.instance import Instance
from pdcore.router.limits import OnPrefillLoss
from pdcore.scheduler.peers import PeerBook
from pdcore.sim.any_order import SideBySide, peer_alone, routed_alone
from pdcore.sim.configurations import Configuration, configuration
from pdcore.sim.group_world import GROUP_MUTANTS, group_world
from pdcore.sim.instance_world import INSTANCE_MUTANTS, InstanceWorld
from pdcore.sim.peer_world import PEER_MUTANTS, PeerWorld, peer_watching
from pdcore.sim.rank_world import RankWorld, rank_watching
from pdcore.sim.router_steps import TracedRouted
from pdcore.sim.router_world import LOSSES, ROUTER_MUTANTS, RouterWorld

_ENDS: Final = (
    "no deadlock",
    "from every state the end can be reached without another fault",
)
_GROUP: Final = (
    "all ranks of a group have the same result, and release in the same tick",
    "no block is freed or read while a write into it may land",
    "source blocks are held while a write or a forward pass may read them",
    *_ENDS,
)
_ROUTER: Final = (
    "the client gets exactly one answer, and a stream one end",
    "a healthy answer is never thrown away",
    "an outcome of a replaced attempt changes nothing",
    "another attempt only before any answer, and beside cancels of the last one",
    "load counts are given back, once",
    "every leg ends",
    *_ENDS,
)
_GROUP_BOUNDS: Final[dict[str, int | str]] = {
    "prefill_ranks": 2,
    "decode_ranks": 2,
    "requests": 1,
    "network": "any loss, duplication, reordering and delay",
    "reduction": "the two pairs of ranks are interchangeable",
}


def _group(name: str, covers: str, split: str, num_chunks: int, *catches: str) -> Configuration:
    return configuration(
        name,
        covers,
        lambda mutant: group_world(mutant, split=split, num_chunks=num_chunks),
        bounds={**_GROUP_BOUNDS, "chunks": num_chunks, "tick": split or "atomic"},
        invariants=_GROUP,
        catches=catches,
    )


def _router(
    name: str,
    covers: str,
    *catches: str,
    is_lossy: bool = False,
    max_attempts: int = 1,
    max_faults: int = 0,
    faults: frozenset[str] | None = None,
    on_prefill_loss: OnPrefillLoss = OnPrefillLoss.RETRY,
) -> Configuration:
    return configuration(
        name,
        covers,
        lambda mutant: RouterWorld(
            is_lossy=is_lossy,
            max_attempts=max_attempts,
            max_faults=max_faults,
            faults=faults,
            routed_type=ROUTER_MUTANTS.get(mutant, TracedRouted),
            on_prefill_loss=on_prefill_loss,
        ),
        bounds={
            "requests": 1,
            "attempts": max_attempts,
            "on_prefill_loss": on_prefill_loss.value,
            "instances": "2 prefill, 2 decode",
            "faults": max_faults or "any number",
            "kinds_of_faults": " / ".join(sorted(faults)) if faults else "all",
        },
        invariants=_ROUTER,
        catches=catches,
    )


OTHER_CONFIGURATIONS: Final[tuple[Configuration, ...]] = (
    _group(
        "group",
        "a TP group of two prefill ranks to one of two decode ranks; the tick is atomic",
        "",
        1,
        *(name for name in GROUP_MUTANTS if name != "no-poison"),
    ),
    _group("group-chunks", "as group, in two chunks", "", 2, "no-poison"),
    _group(
        "group-decode-tick", "as group; decode's votes are snapshots, results come later", "D", 1
    ),
    _group("group-prefill-tick", "as group; prefill's votes are snapshots", "P", 1),
    _group("group-both-ticks", "as group; the votes of both groups are snapshots", "DP", 1),
    _router("router-prompt", "one attempt; nothing is lost and no deadline fires"),
    _router(
        "router-lossy",
        "one attempt; answers lost, late, double; connections break; deadlines",
        "unknown-is-failure",
        is_lossy=True,
    ),
    _router(
        "router-retry",
        "a second attempt while the first one drains",
        "any-attempt",
        "no-retry-cancels",
        max_attempts=2,
        max_faults=3,
    ),
    _router(
        "router-pause",
        "a third attempt after a pause, and everything that may end the pause",
        max_attempts=3,
        max_faults=3,
        faults=LOSSES,
    ),
    _router(
        "router-local",
        "a lost prefill is made good by a decode that computes the prompt itself",
        max_attempts=2,
        max_faults=2,
        on_prefill_loss=OnPrefillLoss.LOCAL_PREFILL,
    ),
    configuration(
        "routed-alone",
        "the table of a routed request: any event, any attempt, any order",
        lambda mutant: SideBySide(routed_alone(), 2),
        bounds={"requests": 2, "attempts": 3},
        invariants=("one answer, one end, nothing after it", *_ENDS),
    ),
    configuration(
        "peer-alone",
        "the table of a peer: any event in any order",
        lambda mutant: SideBySide(peer_alone(), 3),
        bounds={"peers": 3, "lives": 1},
        invariants=("dead only by proof, forgotten only dead and fenced", *_ENDS),
    ),
    configuration(
        "peer",
        "two lives at one address: heartbeats lost, late, misdelivered; stops; proofs of death",
        lambda mutant: PeerWorld(PEER_MUTANTS.get(mutant, PeerBook)),
        bounds={"lives": 2, "heartbeat_misses": 2},
        invariants=("dead only by proof, and never wrongly", *_ENDS),
        catches=tuple(PEER_MUTANTS),
        context=peer_watching,
    ),
    configuration(
        "rank",
        "registrations of two places: leases run out, goodbyes, restarts, old packets",
        lambda mutant: RankWorld(),
        bounds={"places": 2, "lives_at_one_place": 2},
        invariants=(
            "who was replaced or said goodbye never comes back into the route",
            "the epoch grows with every change of the route",
            "a route is served only when every place is held",
            *_ENDS,
        ),
        catches=("replaced-comes-back",),
        context=rank_watching,
    ),
    configuration(
        "instances",
        "two instances of one worker each, side by side: every row in many situations",
        lambda mutant: SideBySide(InstanceWorld(num_workers=1, num_restarts=1), 2),
        bounds={"instances": 2, "workers": 1, "restarts": 1},
        invariants=("as instance", *_ENDS),
    ),
    configuration(
        "instance",
        "two workers, bounded restarts, problems that come and go, a stop at any time",
        lambda mutant: InstanceWorld(INSTANCE_MUTANTS.get(mutant, Instance)),
        bounds={"workers": 2, "restarts": 2},
        invariants=(
            "ready means every worker is ready and no problem is known",
            "the requests of a lost worker are failed at once, of all when it stops",
            "once it drains it takes no more requests",
            *_ENDS,
        ),
        catches=tuple(INSTANCE_MUTANTS),
    ),
)
