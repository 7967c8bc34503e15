"""The workers of one life of an instance: linked to each other, and to their leader."""

from __future__ import annotations

import attrs

from pdcore.sim.cluster import Cluster
from pdcore.sim.group_life import any_of
from pdcore.sim.plan import WorldOptions, make_plan
from pdcore.sim.world import in_world


def test_each_rank_has_a_process_and_a_life_of_its_own() -> None:
    async def scenario(cluster: Cluster) -> None:
        ranks = cluster.instances["p0"].ranks
        assert [rank.process.name for rank in ranks] == ["p0.worker", "p0.worker1"]
        assert [rank.index for rank in ranks] == [0, 1]
        assert len({rank.incarnation for rank in ranks}) == 2
        drawn = {any_of(ranks, cluster.site).index for _ in range(50)}
        assert drawn == {0, 1}
        (alone,) = cluster.instances["d0"].ranks
        before = cluster.site.rng.getstate()
        assert any_of([alone], cluster.site) is alone
        assert cluster.site.rng.getstate() == before, "nothing is drawn where there is no choice"

    options = WorldOptions(1, 1, prefill_tp=2)
    in_world(attrs.evolve(make_plan(1), options=options), scenario)
