"""A worker process against a real leader link: ready, drained, and honest exit statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import SupportsIndex

import attrs
import pytest

from pdcore.config import InstanceConfig, ModelConfig, WorkerConfig, worker_config
from pdcore.control.link import LeaderLink
from pdcore.control.messages import LeaderMessage, Stop, WorkerHealth, WorkerMessage, WorkerReady
from pdcore.engine.base import GroupLost
from pdcore.errors import ConfigError, EngineError, GroupBroken
from pdcore.server.process import EXIT_FAILED, EXIT_USAGE, Child, Failed, Report, spawn
from pdcore.server.worker_main import StoppablePort, exit_status

BOUND_S = 60.0
MODULE = "pdcore.server.worker_main"


class Rig:
    """One worker process, and what its leader hears."""

    def __init__(self, **changes: object) -> None:
        self.messages: list[WorkerMessage] = []
        self.reports: list[Report] = []
        self.ready = asyncio.Event()
        self.link = LeaderLink(self._on_message)
        told = worker_config(
            InstanceConfig(model=ModelConfig(model_path="simulated")),
            instance="127.0.0.1:8001",
            rank=0,
            local_rank=0,
            link_address=self.link.address,
            bootstrap="",
            bootstrap_token="",
            parent_pid=0,
        )
        self.config = attrs.evolve(told, **{"transport": "loopback", **changes})

    def start(self) -> Child:
        child = spawn("worker", MODULE, self.config.encode())
        child.watch(self.reports.append)
        return child

    def _on_message(self, rank: int, message: WorkerMessage) -> None:
        self.messages.append(message)
        if isinstance(message, WorkerReady):
            self.ready.set()


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await main()

    asyncio.run(bounded())


def test_ready_then_drained_by_its_leader_and_by_a_signal() -> None:
    """Health comes before ready, so that a problem is never behind a readiness."""

    async def main() -> None:
        rig = Rig(role="decode")
        await rig.link.start()
        first, second = rig.start(), Rig(role="decode")
        await second.link.start()
        other = second.start()
        await rig.ready.wait()
        assert isinstance(rig.messages[0], WorkerHealth)
        assert isinstance(rig.messages[1], WorkerReady)
        assert rig.messages[1].transport == "loopback"
        assert rig.link.send(0, Stop(0.0))
        assert first.exited is not None
        assert await first.exited == 0
        await second.ready.wait()
        assert await other.stop(BOUND_S) == 0
        rig.link.close()
        second.link.close()

    run(main)


def test_a_prefill_whose_bootstrap_server_is_away_says_so_and_stays() -> None:
    """D33: not ready, with the reason, and still trying."""

    async def main() -> None:
        rig = Rig(role="prefill", bootstrap="127.0.0.1:1")
        await rig.link.start()
        child = rig.start()
        await rig.ready.wait()
        health = rig.messages[0]
        assert isinstance(health, WorkerHealth)
        assert "not registered at the bootstrap server 127.0.0.1:1" in health.problems[0]
        assert await child.stop(BOUND_S) == 0
        rig.link.close()

    run(main)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 3, "kv_cache_bytes": None}, "max_prefill_tokens"),
        ({"transport": "carrier-pigeon"}, "unknown name 'carrier-pigeon'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_2(
    changes: dict[str, object], words: str
) -> None:
    async def main() -> None:
        rig = Rig(role="decode", log_level="error", **changes)
        child = rig.start()
        assert child.exited is not None
        assert await child.exited == EXIT_USAGE
        (failed,) = (r for r in rig.reports if isinstance(r, Failed))
        assert words in failed.message
        rig.link.close()

    run(main)


def check_statuses(status_of: Callable[[Exception], int]) -> None:
    for mistake in (ConfigError("num_blocks: 0"), EngineError("no such model")):
        assert status_of(mistake) == EXIT_USAGE
    for bad_luck in (GroupLost("tp_rank 1 died"), GroupBroken("out of step"), OSError("no memory")):
        assert status_of(bad_luck) == EXIT_FAILED


def test_who_lost_its_group_is_started_again() -> None:
    """D45: a rank that is killed while the others meet it or warm up leaves them with an error
    of the engine. It is nobody's mistake: the instance must not give up for it."""
    check_statuses(exit_status)

    def mutant(error: Exception) -> int:
        return EXIT_USAGE if isinstance(error, ConfigError | EngineError) else EXIT_FAILED

    with pytest.raises(AssertionError):
        check_statuses(mutant)


def test_garbage_instead_of_a_configuration() -> None:
    async def main() -> None:
        child = spawn("worker", MODULE, b"not json")
        reports: list[Report] = []
        assert await child.watch(reports.append) == EXIT_USAGE
        assert isinstance(reports[0], Failed)

    run(main)


def test_a_signal_is_a_stop_message() -> None:
    """D59: SIGTERM drains like the leader's word."""

    class Port:
        def receive(self, limit: int = 256) -> list[object]:
            return []

        def send(self, message: WorkerMessage) -> None:
            raise AssertionError("nothing is sent here")

    woken: list[bool] = []
    port = StoppablePort(Port(), lambda: woken.append(True))
    port.handle_signal(15, None)
    assert woken
    (stop,) = port.receive()
    assert isinstance(stop, Stop)
    assert port.receive() == []


def test_the_configuration_is_what_the_leader_wrote() -> None:
    rig_config = worker_config(
        InstanceConfig(),
        instance="a:1",
        rank=0,
        local_rank=0,
        link_address="x",
        bootstrap="",
        bootstrap_token="",
        parent_pid=0,
    )
    assert WorkerConfig.decode(rig_config.encode()) == rig_config


class SilentPort:
    """A leader's port that says nothing; a signal arrives while it is read."""

    def __init__(self) -> None:
        self.on_receive: list[Callable[[], None]] = []

    def receive(self, limit: int = 256) -> list[LeaderMessage]:
        for act in self.on_receive:
            act()
        return []

    def send(self, message: WorkerMessage) -> None:
        pass


def test_no_signal_is_lost_between_two_lines() -> None:
    """D59: a second SIGTERM that came after ``extend`` and before ``clear`` was dropped."""

    class Stops(list[LeaderMessage]):
        """A second signal interrupts whatever takes the first one out."""

        def __init__(self, port: StoppablePort) -> None:
            super().__init__()
            self.port = port
            self.has_struck = False

        def strike(self) -> None:
            if not self.has_struck:
                self.has_struck = True
                self.port.handle_signal(15, None)

        def __iter__(self) -> Iterator[LeaderMessage]:
            yield from list(super().__iter__())
            self.strike()

        def pop(self, index: SupportsIndex = -1) -> LeaderMessage:
            one = super().pop(index)
            self.strike()
            return one

    class Mutant(StoppablePort):
        def receive(self, limit: int = 256) -> list[LeaderMessage]:
            messages = self._port.receive(limit)
            messages.extend(iter(self._stops))
            self._stops.clear()
            return messages

    def check(port: StoppablePort) -> None:
        port._stops = Stops(port)
        port.handle_signal(15, None)
        found = [*port.receive(), *port.receive()]
        assert len(found) == 2, "a signal was lost"
        assert port.receive() == []

    check(StoppablePort(SilentPort(), lambda: None))
    with pytest.raises(AssertionError, match="was lost"):
        check(Mutant(SilentPort(), lambda: None))
