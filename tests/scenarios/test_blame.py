"""Who is blamed when a request times out in the handshake (D25): only who had the time to answer
and did not."""

from __future__ import annotations

import pytest

from pdcore.engine.simulated import simulated_tokens
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.testing.world import Rank, World, make_world
from pdcore.types import RoomKey, SamplingParams

PROMPT = list(range(10, 70))
FIVE = SamplingParams(max_tokens=5)


def code(rank: Rank, key: RoomKey) -> str | None:
    result = rank.result(key)
    assert result is not None
    return None if result.failure is None else result.failure.code


def outcome(world: World, name: str, timeout_s: float, to: tuple[str, ...]) -> str | None:
    """How one request ended at that rank."""
    key = world.submit(PROMPT, sampling=FIVE, to=to, timeout_s=timeout_s)
    world.run(lambda: all(world.ranks[one].result(key) is not None for one in to))
    return code(world.ranks[name], key)


def check_the_next_request_works(world: World) -> None:
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    assert code(world.decode, key) is None
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)


def check_deadlines_are_no_fault_of_the_peer(timeout_s: float) -> None:
    """Requests that prefill never got: their handshakes wait there and are answered Queued."""
    world = make_world()
    codes = {outcome(world, "decode", timeout_s, ("decode",)) for _ in range(4)}
    assert codes == {"deadline_exceeded"}
    check_the_next_request_works(world)
    world.settle()


@pytest.mark.parametrize("timeout_s", [0.02, 8.0])
def test_d25_clients_with_short_deadlines_open_no_breaker(timeout_s: float) -> None:
    """D25: three requests that time out in the handshake, because their clients gave them
    milliseconds or because prefill had not got them, shut a healthy pair for everybody."""
    check_deadlines_are_no_fault_of_the_peer(timeout_s)


def test_d25_blaming_whoever_has_not_answered_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: no answer by the deadline is a failure, whatever the deadline."""
    monkeypatch.setattr(DecodeRecord, "failing", lambda self, now, silence_s: self.unheard())
    with pytest.raises(AssertionError):
        check_deadlines_are_no_fault_of_the_peer(0.02)


def test_d25_a_prefill_that_never_answers_handshakes_is_left_alone() -> None:
    """Its heartbeats come back, its handshakes do not, however long they had."""
    world = make_world()
    vars(world.prefill.worker.core.inbox)["_handshake"] = lambda payload, now: None
    codes = [outcome(world, "decode", 6.0, ("decode",)) for _ in range(5)]
    assert codes == ["deadline_exceeded"] * 3 + ["unavailable"] * 2


@pytest.mark.parametrize(("timeout_s", "last"), [(2.0, "deadline_exceeded"), (6.0, "unavailable")])
def test_d25_a_decode_that_never_grants_is_left_alone_after_a_fair_time(
    timeout_s: float, last: str
) -> None:
    world = make_world()
    vars(world.decode.worker.core.inbox)["_claim"] = lambda payload, now: None
    both = ("prefill", "decode")
    codes = [outcome(world, "prefill", timeout_s, both) for _ in range(4)]
    assert codes == ["deadline_exceeded"] * 3 + [last]
