"""The shell around the router's core. test_router.py drives it through HTTP; here is what
only it decides: which answer is passed on, and what is closed when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest

from pdcore.clock import ManualClock
from pdcore.fsm.routed import Leg
from pdcore.router.core import RouterCore, RouterLimits
from pdcore.router.fleet import Fleet, Health, Report
from pdcore.router.policies import ClientFields, parse_targets
from pdcore.server.client import ConnectFailed, Origin, PoolTimeout, Timeout
from pdcore.server.exchange import DEFAULT_TIMEOUT, Exchange
from pdcore.server.http import ClientGone
from pdcore.server.session import Session, Shell, error_code
from tests.unit.server.kit import ManualTimers, run, settle


class Upstream:
    """A client whose exchanges the test completes; ``cancelled`` lists those given up."""

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self.bodies: dict[str, bytes] = {}
        self.refused: set[int] = set()
        self.busy: set[int] = set()
        self.broken = False

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
        if self.broken:
            raise RuntimeError("a bug")
        if origin.port in self.busy:
            raise PoolTimeout(f"all connections to {origin.netloc} stayed busy")
        if origin.port in self.refused:
            raise ConnectFailed(f"cannot connect to {origin.netloc}")
        name = f"{origin.host}{target}"
        exchange = self.exchanges[name] = Exchange(1 << 20)
        self.bodies[name] = body
        await exchange.head()
        return exchange

    async def aclose(self) -> None:
        pass

    def reply(self, name: str, status: int, body: bytes = b"{}") -> None:
        exchange = self.exchanges[name]
        exchange.headers.append((b"content-type", b"application/json"))
        exchange.on_head(status)
        exchange.on_body(body)
        exchange.on_complete()

    def stream(self, name: str) -> Exchange:
        exchange = self.exchanges[name]
        exchange.headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        exchange.on_head(200)
        return exchange


class Scene:
    def __init__(self, num_decode: int = 1) -> None:
        decodes = [f"d{i}:{10 + i}" for i in range(num_decode)]
        self.fleet = Fleet(*parse_targets(["p0:1"], decodes))
        for _, member in self.fleet.members():
            self.fleet.report(member, Report(True))
        self.core = RouterCore(self.fleet, RouterLimits(), random.Random(1))
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.upstream = Upstream()
        self.shell = Shell(
            self.core, self.upstream, self.clock, self.timers, max_reply_bytes=1 << 20
        )

    async def open(self) -> Session:
        fields = {"prompt": msgspec.Raw(b'"hi"')}
        session = self.shell.open("/generate", fields, ClientFields(room=5))
        assert isinstance(session, Session)
        await settle(5)
        return session


def test_decodes_answer_is_passed_on_and_prefills_exchange_closed() -> None:
    async def play() -> None:
        scene = Scene()
        session = await scene.open()
        prefill = scene.upstream.exchanges["p0/generate"]
        assert scene.upstream.bodies["p0/generate"] == scene.upstream.bodies["d0/generate"]
        scene.upstream.reply("d0/generate", 200, b'{"a":1}')
        decision = await session.decided
        assert decision.reply is not None
        assert (decision.reply.status, decision.reply.body) == (200, b'{"a":1}')
        await settle(5)
        with pytest.raises(Exception, match="closed by the reader"):
            await prefill.head()
        scene.shell.close(session)
        assert scene.core.counters["late"] == 0

    run(play())


def test_a_stream_is_handed_over_open_and_closed_by_the_deadline() -> None:
    async def play() -> None:
        scene = Scene()
        session = await scene.open()
        exchange = scene.upstream.stream("d0/generate")
        decision = await session.decided
        assert decision.stream is exchange
        scene.timers.advance(1806)
        await settle(5)
        assert session.stream_failure is not None
        with pytest.raises(Exception, match="closed by the reader"):
            await exchange.next_chunk()
        scene.shell.close(session)
        await scene.shell.aclose()

    run(play())


def test_an_answer_that_came_in_the_tick_of_the_deadline_is_the_answer() -> None:
    """Completion beats expiry: the work was done, and a 504 would throw it away."""

    async def check(kind: type[Shell]) -> None:
        scene = Scene()
        scene.shell = kind(
            scene.core, scene.upstream, scene.clock, scene.timers, max_reply_bytes=1 << 20
        )
        session = await scene.open()
        scene.upstream.reply("d0/generate", 200)
        scene.timers.advance(1806)
        decision = await session.decided
        assert decision.reply is not None, "thrown away"
        scene.shell.close(session)
        await scene.shell.aclose()

    class Mutant(Shell):
        def _on_timer(self) -> None:
            self._timer = None
            self._expire()

    run(check(Shell))
    with pytest.raises(AssertionError, match="thrown away"):
        run(check(Mutant))


def test_leaving_before_the_answer_wakes_the_handler() -> None:
    async def play() -> None:
        scene = Scene()
        session = await scene.open()
        waiting = asyncio.ensure_future(session.decided)
        scene.shell.leave(session)
        scene.shell.leave(session)
        with pytest.raises(ClientGone):
            await waiting
        await settle(5)
        for name in ("p0/cancel", "d0/cancel"):
            scene.upstream.reply(name, 200, b'{"known":true}')
        await settle(5)
        assert scene.core.snapshot()["cancels"] == 0
        scene.shell.close(session)
        await scene.shell.aclose()

    run(play())


@pytest.mark.parametrize("body", [b'{"known":false}', b"no json"])
def test_a_cancel_without_a_clear_answer_is_sent_again(body: bytes) -> None:
    async def play() -> None:
        scene = Scene()
        session = await scene.open()
        scene.shell.leave(session)
        await settle(5)
        scene.upstream.reply("p0/cancel", 200, body)
        first = scene.upstream.exchanges["p0/cancel"]
        await settle(5)
        scene.timers.advance(0.05)
        await settle(5)
        assert scene.upstream.exchanges["p0/cancel"] is not first
        scene.shell.close(session)
        await scene.shell.aclose()

    run(play())


def test_a_refused_decode_goes_to_the_other_one() -> None:
    async def play() -> None:
        scene = Scene(num_decode=2)
        scene.upstream.refused = {11}  # room 5 of one and two: decode 1
        session = await scene.open()
        await settle(10)
        (name,) = [n for n in scene.upstream.exchanges if n.startswith("d")]
        first, second = msgspec.json.decode(scene.upstream.bodies[name]), session.attempt
        assert first["attempt"] == second
        assert first["replaces"] not in (None, second)
        scene.upstream.reply(name, 200)
        assert (await session.decided).reply is not None
        scene.shell.close(session)
        await scene.shell.aclose()

    run(play())


def test_an_answer_that_is_too_large_is_not_asked_for_again() -> None:
    """It repeats anywhere: each of three instances computed it, and none was at fault."""

    async def play() -> None:
        scene = Scene(num_decode=2)
        session = await scene.open()
        (name,) = [one for one in scene.upstream.exchanges if one.startswith("d")]
        scene.upstream.reply(name, 200, b"{" + b" " * (1 << 20))
        decision = await session.decided
        assert decision.reply is not None
        assert decision.reply.status == 502
        assert b"exceeds 1048576 bytes" in decision.reply.body
        assert scene.core.counters["retried"] == 0
        scene.shell.close(session)
        await scene.shell.aclose()

    run(play())


def test_a_leg_without_a_free_connection_is_not_one_that_is_down() -> None:
    async def play() -> None:
        scene = Scene(num_decode=2)
        scene.upstream.busy = {11}
        session = await scene.open()
        await settle(10)
        assert [m.health for m in scene.fleet.decodes] == [Health.UP, Health.UP]
        scene.upstream.reply("d0/generate", 200)
        assert (await session.decided).reply is not None
        scene.shell.close(session)
        await scene.shell.aclose()

    run(play())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"message":"x","code":"peer_lost"}}', "peer_lost"),
        (b'{"error":{"code":null}}', ""),
        (b'{"error":{}}', ""),
        (b"<html>", ""),
        (b"\xff", ""),
        (b'{"error":' + b"[" * 100_000, ""),
    ],
)
def test_the_code_of_an_error_is_read_whatever_the_body_is(body: bytes, code: str) -> None:
    assert error_code(body) == code


def test_a_leg_that_ends_by_a_bug_is_a_lost_leg() -> None:
    """An exception nobody expected ended the task unseen, and the client waited for ever."""

    async def check(scene: Scene) -> None:
        scene.upstream.broken = True
        session = await scene.open()
        await settle(5)
        assert session.decided.done(), "the client waits for its deadline"
        decision = await session.decided
        assert decision.failure is not None
        assert "internal error" in decision.failure.detail
        scene.shell.close(session)
        await scene.shell.aclose()

    class Mutant(Shell):
        def _on_leg_done(
            self, session: Session, attempt: int, leg: Leg, task: asyncio.Task[None]
        ) -> None:
            if not task.cancelled():
                task.exception()

    async def mutant() -> None:
        scene = Scene()
        scene.shell = Mutant(
            scene.core, scene.upstream, scene.clock, scene.timers, max_reply_bytes=1 << 20
        )
        await check(scene)

    async def real() -> None:
        await check(Scene())

    run(real())
    with pytest.raises(AssertionError, match="waits for its deadline"):
        run(mutant())


def test_a_cancel_that_ends_by_a_bug_is_sent_again() -> None:
    async def play() -> None:
        scene = Scene()
        session = await scene.open()
        scene.upstream.broken = True
        scene.shell.leave(session)
        await settle(5)
        scene.upstream.broken = False
        assert "d0/cancel" not in scene.upstream.exchanges
        scene.timers.advance(0.06)
        await settle(5)
        assert "d0/cancel" in scene.upstream.exchanges
        scene.shell.close(session)
        await scene.shell.aclose()

    run(play())
