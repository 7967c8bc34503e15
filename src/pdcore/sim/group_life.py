"""One life of the workers of a simulated instance: one process for each rank of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdcore.control.codec import encode_link
from pdcore.sim.group_links import GroupLinks
from pdcore.sim.leader import SimLeader
from pdcore.sim.loop import Process
from pdcore.sim.rank import Seat, SimRank
from pdcore.sim.site import Site


def spawn_group(
    site: Site, seat: Seat, leader: SimLeader, on_stepped: Callable[[SimRank], None]
) -> list[SimRank]:
    """Built and linked to each other and to their leader; nothing is announced yet."""
    links, ranks = GroupLinks(site), []
    for index in range(seat.tp_size):
        rank = _spawn(site, seat, leader, on_stepped, index, links)
        ranks.append(rank)
        links.members.append(rank)
        leader.link.attach(rank)
    return ranks


def any_of(ranks: Sequence[SimRank], site: Site) -> SimRank:
    """One of them, drawn where there is a choice."""
    return ranks[0] if len(ranks) == 1 else site.rng.choice(ranks)


def _spawn(
    site: Site,
    seat: Seat,
    leader: SimLeader,
    on_stepped: Callable[[SimRank], None],
    index: int,
    links: GroupLinks,
) -> SimRank:
    name = "worker" if index == 0 else f"worker{index}"
    process = Process(f"{seat.name}.{name}", seat.name)

    def build() -> SimRank:
        return SimRank(
            site,
            seat,
            process,
            lambda message: leader.link.from_worker(index, rank.incarnation, encode_link(message)),
            on_stepped,
            index,
            links,
        )

    rank = process.context.run(build)
    return rank
