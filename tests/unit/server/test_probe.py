"""The router asks its instances how they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pdcore.router.fleet import UNREACHABLE_AFTER, Fleet, Health, Member
from pdcore.router.policies import parse_targets
from pdcore.server.client import (
    ConnectFailed,
    HttpError,
    Origin,
    OutOfConnections,
    PoolTimeout,
    Timeout,
)
from pdcore.server.exchange import DEFAULT_TIMEOUT, Exchange
from pdcore.server.probe import Prober
from tests.unit.server.kit import run, settle


class FakeClient:
    """Answers /health by port; counts how often it was asked."""

    def __init__(self, answers: dict[int, tuple[int, bytes] | HttpError]) -> None:
        self.answers = answers
        self.num_asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def request(
        self,
        method: str,
        origin: Origin,
        target: str,
        body: bytes = b"",
        *,
        headers: Sequence[tuple[str, str]] = (),
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Exchange:
        assert (method, target, body) == ("GET", "/health", b"")
        assert timeout.total_s == 2.0
        self.num_asked += 1
        await self.gate.wait()
        answer = self.answers[origin.port]
        if isinstance(answer, HttpError):
            raise answer
        exchange = Exchange(1 << 20)
        exchange.on_head(answer[0])
        exchange.on_body(answer[1])
        exchange.on_complete()
        return exchange

    async def aclose(self) -> None:
        pass


def prober(answers: dict[int, Any]) -> tuple[Fleet, FakeClient, Prober]:
    fleet = Fleet(*parse_targets(["p:1", "p:2"], ["d:3"], [0, 0]))
    client = FakeClient(answers)
    return fleet, client, Prober(fleet, client, timeout_s=2.0)


UP = b'{"status":"Up","instance":"10.0.0.1:1","dp_size":4,"bootstrap":"10.0.0.1:40000","x":1}'
SICK = b'{"status":"UnHealthy","problems":["rank 1 is gone: killed"]}'


def test_what_an_instance_says_is_kept() -> None:
    """D21 (dp_size), D48 (a dead worker is no 200)."""

    async def play() -> None:
        refused = ConnectFailed("cannot connect to d:3")
        fleet, _, probe = prober({1: (200, UP), 2: (503, SICK), 3: refused})
        await probe.probe_all()
        first, second = fleet.prefills
        assert (first.health, first.instance, first.dp_size) == (Health.UP, "10.0.0.1:1", 4)
        assert first.bootstrap_port == 40000
        assert (second.health, second.detail) == (Health.DOWN, "rank 1 is gone: killed")
        assert (fleet.decodes[0].health, fleet.decodes[0].detail) == (
            Health.DOWN,
            "cannot connect to d:3",
        )

    run(play())


def test_the_peers_that_an_instance_refuses_are_kept_until_its_next_answer() -> None:
    """vllm PR #55471: health is per pair."""

    async def play() -> None:
        body = b'{"status":"Up","refused_peers":{"10.0.0.9:8001":"rank 0: silent"}}'
        answers = {1: (200, UP), 2: (200, UP), 3: (200, body)}
        fleet, _, probe = prober(answers)
        await probe.probe_all()
        (decode,) = fleet.decodes
        assert (decode.health, decode.refused) == (Health.UP, {"10.0.0.9:8001"})
        answers[3] = (200, b'{"status":"Up"}')
        await probe.probe_all()
        assert decode.refused == set()

    run(play())


@pytest.mark.parametrize("body", [b"", b"ok", b"[]", b'{"dp_size":"4"}', b'{"dp_size":0}'])
def test_a_server_that_says_less_is_up_and_nothing_is_assumed(body: bytes) -> None:
    async def play() -> None:
        fleet, _, probe = prober(dict.fromkeys((1, 2, 3), (200, body)))
        await probe.probe_all()
        member = fleet.prefills[0]
        assert (member.health, member.dp_size, member.instance) == (Health.UP, None, "p:1")
        assert fleet.problem() is None

    run(play())


def test_two_in_need_share_one_round() -> None:
    async def play() -> None:
        _, client, probe = prober(dict.fromkeys((1, 2, 3), (200, UP)))
        client.gate.clear()
        waiting = [asyncio.create_task(probe.probe_all()) for _ in range(20)]
        await settle()
        waiting[0].cancel()
        await settle()
        client.gate.set()
        await asyncio.gather(*waiting[1:])
        assert client.num_asked == 3
        await probe.probe_all()
        assert client.num_asked == 6

    run(play())


def test_it_goes_on_until_it_is_cancelled() -> None:
    async def play() -> None:
        fleet, client, _ = prober(dict.fromkeys((1, 2, 3), (200, UP)))
        task = asyncio.create_task(Prober(fleet, client, interval_s=0.0, timeout_s=2.0).run())
        while client.num_asked < 9:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(play())


@pytest.mark.parametrize("port", ["\u00b2", "0", "65536", "9" * 5000, "", "-1"])
def test_a_port_that_is_none_is_not_taken(port: str) -> None:
    """isdigit is true for a superscript two, and int() raises for it."""

    async def play() -> None:
        body = b'{"status":"Up","bootstrap":"10.0.0.1:%s"}' % port.encode()
        fleet, _, probe = prober(dict.fromkeys((1, 2, 3), (200, body)))
        await probe.probe_all()
        assert (fleet.prefills[0].health, fleet.prefills[0].bootstrap_port) == (Health.UP, 0)

    run(play())


def test_a_bug_in_one_probe_ends_neither_the_others_nor_the_prober() -> None:
    async def check(kind: type[Prober]) -> None:
        fleet, client, _ = prober({2: (200, UP), 3: (200, UP)})  # no answer for 1: a KeyError
        task = asyncio.create_task(kind(fleet, client, interval_s=0.0, timeout_s=2.0).run())
        while client.num_asked < 9 and not task.done():
            await asyncio.sleep(0)
        assert not task.done(), "nobody probes any more"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [m.health for _, m in fleet.members()] == [Health.DOWN, Health.UP, Health.UP]

    class Mutant(Prober):
        """An exception that is not HttpError is not expected."""

        async def probe_all(self) -> None:
            reports = [await self._probe(*known) for known in self._fleet.members()]
            assert len(reports) == 3

    run(check(Prober))
    with pytest.raises(AssertionError, match="nobody probes"):
        run(check(Mutant))


def test_an_instance_that_answers_nothing_is_told_from_one_that_is_ill() -> None:
    async def play() -> None:
        fleet, _, probe = prober({1: (200, UP), 2: (503, SICK), 3: ConnectFailed("refused")})
        for _ in range(UNREACHABLE_AFTER):
            await probe.probe_all()
        gone = [m.target.netloc for _, m in fleet.members() if m.stays_unreachable]
        assert gone == ["d:3"]

    run(play())


def test_an_instance_that_stays_away_is_evicted_once_and_again_after_it_was_back() -> None:
    """D48: eviction is of an instance without a word, not of one that is ill."""

    async def play() -> None:
        fleet, client, _ = prober({1: (200, UP), 2: (503, SICK), 3: ConnectFailed("refused")})
        evicted: list[tuple[Member, str]] = []
        probe = Prober(fleet, client, timeout_s=2.0, on_evicted=lambda *gone: evicted.append(gone))
        for _ in range(UNREACHABLE_AFTER - 1):
            await probe.probe_all()
        assert evicted == []
        for _ in range(5):
            await probe.probe_all()
        assert evicted == [(fleet.decodes[0], "d:3 gave no answer to 10 probes in a row: refused")]
        client.answers[3] = (200, UP)
        await probe.probe_all()
        client.answers[3] = ConnectFailed("refused")
        for _ in range(UNREACHABLE_AFTER):
            await probe.probe_all()
        assert len(evicted) == 2

    run(play())


@pytest.mark.parametrize(
    "error",
    [
        PoolTimeout("all 2048 connections to d:3 stayed busy for 2 s"),
        OutOfConnections("cannot open a connection to d:3: Too many open files"),
    ],
)
def test_connections_that_are_all_busy_say_nothing_against_an_instance(error: HttpError) -> None:
    """2048 long streams took every connection, or the router had no descriptor left: the
    probe got none, and an instance that served them all was Down, after ten probes gone."""

    async def play() -> None:
        fleet, client, probe = prober(dict.fromkeys((1, 2, 3), (200, UP)))
        await probe.probe_all()
        client.answers[3] = error
        for _ in range(2 * UNREACHABLE_AFTER):
            await probe.probe_all()
        assert fleet.decodes[0].health is Health.UP
        assert not fleet.decodes[0].stays_unreachable

    run(play())


def test_an_instance_listed_under_the_other_role_is_not_used_and_told_apart() -> None:
    async def play() -> None:
        mode = b'{"status":"Up","disaggregation_mode":"%s"}'
        fleet, _, probe = prober(
            {1: (200, mode % b"DECODE"), 2: (200, mode % b"PREFILL"), 3: (200, mode % b"PREFILL")}
        )
        await probe.probe_all()
        health = [m.health for _, m in fleet.members()]
        assert health == [Health.DOWN, Health.UP, Health.DOWN]
        assert fleet.prefills[0].detail == (
            "p:1 is listed in prefill_addrs, but it says that it is a decode instance: list the "
            "address of a prefill instance there"
        )
        assert "d:3 is listed in decode_addrs" in fleet.decodes[0].detail

    run(play())
