"""Public reports, group G: the router's books, draining, and what may be started again.

vllm-ascend and Dynamo.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.control.messages import Finished, Stop
from pdcore.errors import InvalidRequest, PdcoreError
from pdcore.fsm.routed import Leg
from pdcore.router.core import RouterCore, RouterLimits
from pdcore.router.events import (
    Answer,
    ClientLeft,
    Dispatch,
    LegAnswered,
    LegLost,
    RouterEvent,
    StreamBegan,
    StreamEnded,
)
from pdcore.router.fleet import Fleet, Member, Report
from pdcore.router.policies import ClientFields, parse_targets
from pdcore.server.openai import Endpoint, parse_request
from pdcore.testing.world import World, make_world
from pdcore.types import SamplingParams
from tests.scenarios.reports.fleet import (
    FIVE,
    check_nothing_leaked,
    check_right,
    is_posted,
)


def make_router() -> tuple[RouterCore, list[Member]]:
    fleet = Fleet(*parse_targets(["p0:1", "p1:1"], ["d0:1", "d1:1"]))
    members = [member for _, member in fleet.members()]
    for member in members:
        fleet.report(member, Report(True, "Up", dp_size=1))
    core = RouterCore(fleet, RouterLimits(request_timeout_s=50.0), random.Random(5))
    return core, members


#: (kind, which request, leg, status) of one piece of news; which attempt is drawn by use.
NEWS = st.tuples(
    st.sampled_from(["submit", "answer", "lost", "refused", "began", "ended", "left", "time"]),
    st.integers(0, 5),
    st.sampled_from(Leg),
    st.sampled_from([200, 202, 400, 429, 500, 502, 503]),
    st.booleans(),
)


def event_of(kind: str, ticket: int, attempt: int, leg: Leg, status: int) -> RouterEvent:
    events: dict[str, RouterEvent] = {
        "answer": LegAnswered(ticket, attempt, leg, status),
        "lost": LegLost(ticket, attempt, leg, True, "gone"),
        "refused": LegLost(ticket, attempt, leg, False, "refused"),
        "began": StreamBegan(ticket, attempt),
        "ended": StreamEnded(ticket, attempt),
        "left": ClientLeft(ticket),
    }
    return events[kind]


def check_books(
    core: RouterCore, members: list[Member], news: list[tuple[str, int, Leg, int, bool]]
) -> None:
    """Never below zero, twice the requests in flight at any time, zero at the end."""
    now_s = 0.0
    tickets: list[int] = []
    attempts: dict[int, list[int]] = {}
    for kind, which, leg, status, is_old in news:
        if kind == "submit":
            try:
                tickets.append(core.submit(ClientFields(room=which + 1), now_s, now_s))
            except PdcoreError:
                continue
        elif kind == "time":
            now_s += status / 20.0
            core.handle_timeout(now_s)
        elif tickets:
            ticket = tickets[which % len(tickets)]
            known = attempts.get(ticket, [1])
            attempt = known[0] if is_old else known[-1]
            core.handle_event(event_of(kind, ticket, attempt, leg, status), now_s)
        for effect in core.poll_effects():
            if isinstance(effect, Dispatch):
                attempts.setdefault(effect.ticket, []).append(effect.attempt)
        for member in members:
            core.fleet.report(member, Report(True, "Up", dp_size=1))
        live = [member.num_live for member in members]
        assert min(live) >= 0, f"a load below zero attracts everything: {live}"
        assert sum(live) <= 2 * int(str(core.snapshot()["in_flight"]))
    core.handle_timeout(now_s + 1000.0)
    assert core.snapshot()["in_flight"] == 0
    assert [member.num_live for member in members] == [0, 0, 0, 0]


@given(st.lists(NEWS, max_size=40))
@settings(max_examples=60)
def test_a_load_is_given_back_exactly_once(news: list[tuple[str, int, Leg, int, bool]]) -> None:
    """vllm-ascend #14967, vllm-ascend #16517, vllm-ascend #13341: whatever fails, is retried,
    answered twice or left, in whatever order, of whichever attempt."""
    check_books(*make_router(), news)


def test_the_mutant_that_gives_back_on_every_failure_is_caught() -> None:
    """The reported rule: each handler of a failure gives the load back."""
    core, members = make_router()
    handle = core.handle_event

    def twice(event: RouterEvent, now_s: float) -> None:
        if isinstance(event, LegLost):
            members[0].num_live -= 1
        handle(event, now_s)

    object.__setattr__(core, "handle_event", twice)
    news = [("submit", 1, Leg.PREFILL, 200, False), ("refused", 0, Leg.PREFILL, 503, False)]
    with pytest.raises(AssertionError):
        check_books(core, members, news)


# --- drain ----------------------------------------------------------------------------------------


def drive(world: World, until: Callable[[], bool]) -> None:
    """Steps the ranks that have not stopped, one piece of a transfer at a time."""
    for _ in range(4000):
        worked = [r.worker.step(0.0) for r in world.ranks.values() if not r.worker._is_stopped]
        world.fabric.step()
        if until():
            return
        if not any(worked):
            world.clock.advance(0.01)
    raise AssertionError("the drain does not end")


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("num_requests", [1, 5])
def test_a_drain_is_over_when_nothing_is_in_transfer(first: str, num_requests: int) -> None:
    """dynamo #4917, dynamo #13559: prefill is told to stop when it has computed everything
    and its writes are on their way. It is there until decode has acknowledged them: no
    request, no held block, no transfer left, and no client with a 500."""
    world = make_world(stepped=True)
    keys = [world.submit([9 + i] * 20, sampling=FIVE) for i in range(num_requests)]
    world.run(lambda: is_posted(world) and len(world.prefill.worker.core.live_keys()) >= len(keys))
    world.ranks[first].port.put(Stop(60.0))
    seen_in_transfer = []

    def is_over() -> bool:
        rank = world.ranks[first]
        if world.fabric.pending():
            seen_in_transfer.append(rank.worker._is_stopped)
        return rank.worker._is_stopped

    drive(world, is_over)
    assert seen_in_transfer
    if first == "prefill":
        assert not any(seen_in_transfer), "it stopped under a transfer"
    ledger = world.ranks[first].worker.core.blocks.audit()["full"]
    assert ledger.free == ledger.total
    drive(world, lambda: all(world.decode.result(key) for key in keys))
    for i, key in enumerate(keys):
        check_right(world.decode, key, world.model, [9 + i] * 20, 5)


# --- what may be started again ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "refused", "answer"])
@pytest.mark.parametrize("leg", list(Leg))
def test_nothing_moves_elsewhere_after_its_first_token(how: str, leg: Leg) -> None:
    """dynamo #7930: tokens that were sent are never replayed on another instance, where a
    grammar or a second sample would be in another state. The stream ends with an error."""
    core, members = make_router()
    ticket = core.submit(ClientFields(room=4), 0.0, 0.0)
    (dispatch,) = [e for e in core.poll_effects() if isinstance(e, Dispatch)]
    core.handle_event(LegAnswered(ticket, dispatch.attempt, Leg.PREFILL, 202), 0.0)
    core.handle_event(StreamBegan(ticket, dispatch.attempt), 0.1)
    core.handle_event(event_of(how, ticket, dispatch.attempt, leg, 503), 0.2)
    core.handle_timeout(40.0)
    effects = core.poll_effects()
    assert not [e for e in effects if isinstance(e, Dispatch)]
    assert len([e for e in effects if isinstance(e, Answer)]) == 1
    core.handle_timeout(1000.0)
    assert [member.num_live for member in members] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", b"2"), ("best_of", b"2"), ("guided_json", b"{}"), ("guided_regex", b'"a+"')],
)
def test_what_could_not_be_replayed_is_refused_at_the_door(name: str, value: bytes) -> None:
    """dynamo #7930: several samples and guided decoding are refused by name, so that no
    retry and no retraction meets one of them."""
    body = b'{"prompt": "hi", "%s": %s}' % (name.encode(), value)
    with pytest.raises(InvalidRequest) as refused:
        parse_request(Endpoint.COMPLETIONS, body)
    assert refused.value.field == name


def test_a_retracted_request_keeps_what_was_said() -> None:
    """dynamo #7930: retraction computes the prompt and the tokens that were sent; it draws
    none of them again."""
    world = make_world(num_blocks=19, prefill_blocks=64)
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
    alone = make_world(num_blocks=64)
    wanted = [alone.run_request([n] * 12, sampling) for n in (20, 30)]
    keys = [world.submit([n] * 12, sampling=sampling) for n in (20, 30)]
    world.run(lambda: all(world.decode.result(key) for key in keys))
    ends = [m for m in world.decode.said if isinstance(m, Finished)]
    assert [end.failure for end in ends] == [None, None]
    assert [world.decode.tokens(key) for key in keys] == wanted
    world.settle()
    check_nothing_leaked(world)
