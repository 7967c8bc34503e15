"""Blocking calls on virtual time: the code runs, its exchange takes place, the code ends."""

from __future__ import annotations

from pdcore.clock import ManualClock
from pdcore.control.bootstrap_client import BootstrapClient, CallReply, Registrar
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.fsm.events import Event, TopologyFetched
from pdcore.server.bootstrap import create_bootstrap_app
from pdcore.server.client import Origin
from pdcore.sim.blocking import Registering, ReplayedHttp, SimBackground
from pdcore.sim.loop import Process, SimLoop, pass_time
from pdcore.sim.wire import Wire, WireClient
from pdcore.topology import ParallelLayout

WHERE = "127.0.0.1:8300"


class Net:
    def __init__(self, *, listens: bool = True) -> None:
        self.loop = SimLoop(start_s=0.0)
        wire = Wire(self.loop, lambda: 0.01, lambda what, text: None)
        server, self.process = Process("server"), Process("worker")
        table = RankTable(RankTableConfig("127.0.0.1:1", ParallelLayout(1)))
        if listens:
            app = create_bootstrap_app(table, ManualClock())
            wire.listen(Origin("127.0.0.1", 8300), server, app)
        self.http = ReplayedHttp(WireClient(wire, self.process))
        self.client = BootstrapClient(ManualClock(), http=self.http)


def test_an_answer_comes_after_the_time_of_its_exchange() -> None:
    net = Net()

    async def main() -> None:
        reply = await net.http.run(lambda: net.client.fetch_route(WHERE))
        assert reply.failure is not None
        assert reply.failure.code == "unavailable"  # no rank is registered
        assert net.loop.time() > 0.02

    net.loop.run(main())


def test_a_refused_connection_is_what_the_client_makes_of_it() -> None:
    net = Net(listens=False)

    async def main() -> None:
        reply = await net.http.run(lambda: net.client.fetch_route(WHERE))
        assert reply.failure is not None
        assert "refused" in reply.failure.detail

    net.loop.run(main())


def test_a_call_without_an_exchange_is_over_at_once() -> None:
    net = Net()

    async def main() -> None:
        reply = await net.http.run(lambda: net.client.fetch_route("nonsense"))
        assert reply.failure is not None
        assert net.loop.time() == 0.0

    net.loop.run(main())


def test_background_answers_wake_the_loop_and_none_is_lost() -> None:
    """Several calls at once: an answer that comes while others are polled is kept."""
    net = Net()
    wakes: list[float] = []
    background = SimBackground(net.loop, net.http, lambda: wakes.append(net.loop.time()))
    polled: list[Event] = []

    def call() -> TopologyFetched:
        return TopologyFetched(WHERE, None, net.client.fetch_route(WHERE).failure)

    async def main() -> None:
        for _ in range(3):
            background.run(call, lambda error: TopologyFetched(WHERE, None))
            polled.extend(background.poll())
            await pass_time(0.015)
        await pass_time(1.0)
        polled.extend(background.poll())

    net.loop.run(main())
    assert len(polled) == len(wakes) == 3
    assert background.fileno() is None


def test_registering_goes_on_by_its_registrar() -> None:
    net = Net(listens=False)
    registrar = Registrar(WHERE, renew_interval_s=2.0, lease_s=6.0, jitter=lambda: 0.0)
    calls: list[float] = []

    def register() -> CallReply:
        calls.append(net.loop.time())
        return CallReply()

    registering = Registering(registrar, net.http, register, net.loop)

    async def main() -> None:
        await registering.call_if_due()
        task = net.loop.create_task(registering.run())
        await pass_time(5.0)
        task.cancel()

    net.loop.run(main())
    assert calls == [0.0, 2.0, 4.0]
    assert registrar.is_registered(5.0)
