"""Links within a simulated group: in order, and only to who lives."""

from __future__ import annotations

from pdcore.sim.group_links import GroupLinks
from pdcore.sim.loop import Process, pass_time
from pdcore.sim.plan import make_plan
from pdcore.sim.site import make_site


class Rank:
    def __init__(self, name: str) -> None:
        self.process = Process(name)
        self.num_woken = 0

    def wake(self) -> None:
        self.num_woken += 1


def test_what_is_said_arrives_in_order_and_wakes_the_other() -> None:
    site = make_site(make_plan(1))
    links = GroupLinks(site)
    ports = [links.port(index) for index in range(3)]
    ranks = [Rank(f"r{index}") for index in range(3)]
    links.members.extend(ranks)

    async def scenario() -> None:
        for number in range(20):
            ports[1].send(0, b"%d" % number)
        ports[2].send(0, b"other")
        site.loop.stop_process(ranks[2].process)
        ports[0].send(2, b"late")
        assert ports[0].receive() == [], "nothing is there at once"
        await pass_time(0.1)
        got = ports[0].receive()
        assert [data for sender, data in got if sender == 1] == [b"%d" % n for n in range(20)]
        assert (2, b"other") in got
        assert ranks[0].num_woken == 21
        assert ports[2].receive() == [], "a stopped process hears nothing"
        site.loop.resume_process(ranks[2].process)
        await pass_time(0.1)
        assert ports[2].receive() == [(0, b"late")]

    site.loop.run(scenario())
