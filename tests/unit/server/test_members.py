"""The processes of a cluster, one by one; tests/unit/server/test_cluster.py has real ones."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from pdcore.config import InstanceConfig, RouterConfig, ServerConfig
from pdcore.server.leader_main import LeaderSpec, RouterSpec, Spec
from pdcore.server.members import Keeper, at_former_addresses
from pdcore.server.process import EXIT_USAGE, Bound, Child, Health, Progress, Ready, Report

INSTANCE = InstanceConfig()
SPEC = LeaderSpec(INSTANCE, "cache", "run")
QUICK = ServerConfig(restart_initial_s=0.01, restart_max_s=0.01, max_restarts=2)


class FakeChild(Child):
    """A process that the test ends."""

    def __init__(self) -> None:
        self.failure = ""
        self.log = Path("x.log")
        self.exited = None
        self.say: Callable[[Report], None] = lambda report: None

    def watch(self, on_report: Callable[[Report], None]) -> asyncio.Future[int]:
        self.say = on_report
        self.exited = asyncio.get_running_loop().create_future()
        return self.exited


class Nursery(Keeper):
    """Children without processes; ``specs`` of every start."""

    def __init__(self, config: ServerConfig = QUICK) -> None:
        self.news = asyncio.Event()
        super().__init__(Path(), config, self.news.set)
        self.specs: list[Spec] = []
        self.errors: list[OSError] = []

    def spawn(self, name: str, spec: Spec) -> Child:
        self.specs.append(spec)
        if self.errors:
            raise self.errors.pop()
        return FakeChild()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.news.clear()
                await self.news.wait()


def child_of(keeper: Keeper, index: int = 0) -> FakeChild:
    child = keeper.members[index].child
    assert isinstance(child, FakeChild)
    return child


def end(keeper: Keeper, status: int, index: int = 0) -> None:
    exited = child_of(keeper, index).exited
    assert exited is not None
    exited.set_result(status)


def served(keeper: Keeper, index: int = 0) -> None:
    child_of(keeper, index).say(Bound("127.0.0.1:81", "127.0.0.1:82"))
    child_of(keeper, index).say(Ready())


def test_d45_whoever_served_is_started_again_at_its_addresses() -> None:
    """D45: for as long as every life serves."""

    async def main() -> None:
        keeper = Nursery()
        keeper.add("prefill-0", "prefill", SPEC)
        keeper.is_restarting = True
        for life in range(2, 8):
            served(keeper)
            end(keeper, -9)
            await keeper.until(lambda n=life: len(keeper.specs) == n)
            (member,) = keeper.members
            assert (member.status, member.deaths.failures) == ("starting again", 0)
        assert keeper.specs[0] is SPEC
        assert set(map(str, keeper.specs[1:])) == {
            str(at_former_addresses(SPEC, Bound("127.0.0.1:81", "127.0.0.1:82")))
        }
        assert keeper.ended() is None

    asyncio.run(main())


def test_d45_starts_that_never_serve_are_bounded() -> None:
    """D45: also those that could not even be made."""

    async def main() -> None:
        keeper = Nursery()
        keeper.add("prefill-0", "prefill", SPEC)
        keeper.is_restarting = True
        keeper.errors = [OSError(errno.EAGAIN, "no process left")]
        end(keeper, 1)
        await keeper.until(lambda: len(keeper.specs) == 3)
        end(keeper, 1)
        await keeper.until(lambda: keeper.ended() is not None)
        assert keeper.ended() == "prefill-0 ended: exit status 1 (log: x.log)"
        assert len(keeper.specs) == 3

    asyncio.run(main())


def test_d45_a_port_that_somebody_took_meanwhile_is_tried_again() -> None:
    """D45: "cannot listen" is a mistake of the user's (exit status 2) at the first start. Of one
    that has served it ended the whole cluster, because an outgoing connection had its port for
    a moment; now it counts as any start that failed, and the last reason is told."""

    async def main() -> None:
        keeper = Nursery()
        keeper.add("prefill-0", "prefill", SPEC)
        keeper.is_restarting = True
        served(keeper)
        end(keeper, -9)
        await keeper.until(lambda: len(keeper.specs) == 2)
        child_of(keeper).failure = "cannot listen on 127.0.0.1:81"
        end(keeper, EXIT_USAGE)
        await keeper.until(lambda: len(keeper.specs) == 3)
        assert keeper.ended() is None
        served(keeper)
        for number in (4, 5, 6):
            end(keeper, EXIT_USAGE)
            await keeper.until(lambda number=number: len(keeper.specs) == number)
        end(keeper, EXIT_USAGE)
        child_of(keeper).failure = "cannot listen on 127.0.0.1:81"
        await keeper.until(lambda: keeper.ended() is not None)
        assert keeper.ended() == "prefill-0 ended: cannot listen on 127.0.0.1:81 (log: x.log)"

    asyncio.run(main())


@pytest.mark.parametrize("is_leaving", [False, True])
def test_nobody_is_started_again_while_it_starts_or_ends(is_leaving: bool) -> None:
    async def main() -> None:
        keeper = Nursery()
        keeper.add("prefill-0", "prefill", SPEC)
        keeper.is_restarting = is_leaving
        if is_leaving:
            keeper.leave()
        end(keeper, 1)
        keeper.news.clear()
        await keeper.news.wait()
        assert (keeper.ended() is None) is is_leaving
        assert len(keeper.specs) == 1

    asyncio.run(main())


def test_a_restart_that_waits_is_given_up_when_all_leave() -> None:
    async def main() -> None:
        keeper = Nursery(ServerConfig(restart_initial_s=1000.0, restart_max_s=1000.0))
        keeper.add("prefill-0", "prefill", SPEC)
        keeper.is_restarting = True
        served(keeper)
        end(keeper, -9)
        await keeper.until(lambda: bool(keeper._restarts))
        assert keeper.members[0].status == "ended: killed by SIGKILL; it is started again"
        (task,) = keeper._restarts
        keeper.leave()
        await asyncio.wait([task], timeout=20)
        assert task.cancelled()
        assert len(keeper.specs) == 1

    asyncio.run(main())


def test_a_router_is_ready_when_every_instance_is() -> None:
    """And it stays so while one of them starts again: the others serve."""

    async def main() -> None:
        keeper = Nursery()
        keeper.add("prefill-0", "prefill", SPEC)
        keeper.add("router", "router", SPEC)
        child_of(keeper).say(Progress("loading"))
        child_of(keeper, 1).say(Ready())
        instance, router = keeper.members
        assert [instance.status, router.status] == ["loading", "waiting for the instances"]
        served(keeper)
        assert [instance.status, router.status] == ["ready", "ready"]
        child_of(keeper).say(Health(["rank 0: gone"]))
        assert instance.status == "not ready any more: rank 0: gone"
        assert router.status == "ready"
        assert repr(router) == "Member(router, ready)"

    asyncio.run(main())


def test_a_router_keeps_its_port() -> None:
    config = RouterConfig(port=0, prefill_addrs=("a:1",), decode_addrs=("b:1",))
    again = at_former_addresses(RouterSpec(config), Bound("127.0.0.1:83"))
    assert isinstance(again, RouterSpec)
    assert again.config.port == 83


def test_former_addresses_are_kept() -> None:
    assert at_former_addresses(SPEC, None) is SPEC
    again = at_former_addresses(SPEC, Bound("127.0.0.1:81", "127.0.0.1:82"))
    assert isinstance(again, LeaderSpec)
    assert (again.config.disagg.http_port, again.config.disagg.bootstrap_port) == (81, 82)
    assert again.config.disagg.link_port == 0
    decode = at_former_addresses(SPEC, Bound("[::1]:81"))
    assert isinstance(decode, LeaderSpec)
    assert decode.config.disagg.bootstrap_port == INSTANCE.disagg.bootstrap_port


def test_d45_a_restart_that_fails_by_a_bug_is_the_end_and_says_so() -> None:
    """D45: nobody waits for a member that no one starts any more."""

    async def main() -> None:
        keeper = Nursery()
        keeper.add("prefill-0", "prefill", SPEC)
        keeper.is_restarting = True
        served(keeper)
        child_of(keeper).say(Bound("no port"))
        end(keeper, -9)
        await keeper.until(lambda: keeper.ended() is not None)
        ended = keeper.ended()
        assert ended is not None
        assert ended.startswith("prefill-0 ended: cannot be started: ValueError")

    asyncio.run(main())
