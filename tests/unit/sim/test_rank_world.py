"""Places and the lives that hold them, in the production rank table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdcore.control.messages import RankRegistration
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.fsm.effects import Effect
from pdcore.fsm.rank import RANK, Rank
from pdcore.sim.explore import explore, replay
from pdcore.sim.firing import ROW_IDS
from pdcore.sim.rank_world import LEASE_S, RETENTION_S, RankWorld, rank_watching
from pdcore.topology import ParallelLayout


def test_the_living_get_into_the_route_and_the_replaced_stay_out() -> None:
    """D31, D32, R24: leases, restarts, goodbyes and packets that are as old as can be."""
    with rank_watching():
        found = explore(RankWorld())
    assert found.violations == ()
    assert found.exhausted
    assert set(ROW_IDS[RANK.name]) == found.rows.keys()


class Forgetful(Rank):
    """The mutant: who was replaced may come back, as in the seed (D32)."""

    __slots__ = ()

    def is_not_replaced(self, payload: RankRegistration) -> bool:
        return True


class SilentChange(Rank):
    """The mutant: a lease that runs out changes the route and tells nobody."""

    __slots__ = ()

    def withdraw(self, payload: object) -> Sequence[Effect]:
        self.in_route = ""
        return ()


def table_of(kind: type[Rank]) -> RankTable:
    layout = ParallelLayout(world_size=2, tp_size=2, cp_size=1, pp_size=1)
    config = RankTableConfig("prefill:1", layout, lease_s=LEASE_S, retention_s=RETENTION_S)
    table = RankTable(config)
    ranks = vars(table)["_ranks"]
    for place in list(ranks):
        ranks[place] = kind(place)
    return table


@pytest.mark.parametrize(
    ("mutant", "problem"),
    [(Forgetful, "in the route again"), (SilentChange, "epoch did not grow")],
)
def test_a_mutant_is_caught(mutant: type[Rank], problem: str) -> None:
    found = explore(RankWorld(lambda: table_of(mutant)))
    with pytest.raises(AssertionError, match=problem):
        assert not found.violations, found.violations[0].problem


def test_an_old_registration_does_not_undo_a_restart() -> None:
    """D32, as a history: A registers, dies, is forgotten; B comes; A's packet comes again."""
    wait = ["a second passes"] * int(LEASE_S + RETENTION_S + 1)
    way = ["A registers port 1", "A dies", *wait, "B starts", "B registers"]
    steps = replay(RankWorld(), [*way, "A registers port 1"])
    assert "incarnation=bbbbbbbb" in steps[-1].state
    assert not steps[-1].problems
