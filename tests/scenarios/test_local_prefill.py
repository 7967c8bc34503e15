"""Local prefill: decode computes a prompt itself, where no prefill instance is left to do it."""

from __future__ import annotations

import attrs
import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Accepted
from pdcore.engine.simulated import simulated_tokens
from pdcore.testing.world import World, make_world
from pdcore.types import GenerateRequest, RoomKey, SamplingParams

PROMPT = list(range(10, 40))


def local(world: World, number: int, prompt: list[int], **changes: object) -> RoomKey:
    request = GenerateRequest(
        key=RoomKey(number, number),
        request_id=f"r{number}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=8),
        expires_at_s=world.clock.unix() + 60.0,
        remaining_s=60.0,
        is_local=True,
    )
    request = attrs.evolve(request, **changes)
    world.decode.port.submit(request)
    return request.key


def ended(world: World, *keys: RoomKey) -> list[str | None]:
    world.run(lambda: all(world.decode.result(key) is not None for key in keys))
    results = [world.decode.result(key) for key in keys]
    return [None if r is None or r.failure is None else r.failure.code for r in results]


def at_rest(world: World) -> None:
    core = world.decode.worker.core
    for ledger in core.blocks.ledger().values():
        assert (ledger.held, ledger.leased, ledger.quarantined) == (0, 0, 0)
    core.blocks.audit()
    assert core.live_keys() == []


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_it_gives_the_tokens_of_a_monolithic_run(max_tokens: int) -> None:
    """The simulated engine checks every KV entry that a step builds on."""
    world = make_world()
    key = local(world, 1, PROMPT, sampling=SamplingParams(max_tokens=max_tokens))
    assert ended(world, key) == [None]
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, max_tokens)
    assert [m for m in world.decode.said if isinstance(m, Accepted)] == [Accepted(key)]
    assert world.prefill.result(key) is None
    assert not world.prefill.worker.core.rooms.records, "no prefill instance has a part in it"
    at_rest(world)


def test_long_prompts_many_at_once_and_others_beside_them() -> None:
    """In chunks, in a pool that cannot hold them all, among requests whose KV moves."""
    limits = CoreLimits(prefill_chunk_tokens=16, num_reserved_decode_tokens=0)
    world = make_world(limits=limits, num_blocks=40)
    prompts = {number: [number] * (20 + 7 * number) for number in range(1, 7)}
    keys = {number: local(world, number, prompt) for number, prompt in prompts.items()}
    moved = [world.submit(PROMPT, sampling=SamplingParams(max_tokens=8)) for _ in range(3)]
    assert ended(world, *keys.values(), *moved) == [None] * 9
    for number, key in keys.items():
        expected = simulated_tokens(world.model, prompts[number], 8)
        assert world.decode.tokens(key) == expected
    for key in moved:
        assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 8)
    at_rest(world)


def test_it_ends_by_abort_by_deadline_and_by_refusal_like_any_other() -> None:
    world = make_world()
    aborted = local(world, 1, PROMPT, sampling=SamplingParams(max_tokens=400))
    late = local(world, 2, PROMPT, remaining_s=0.0)
    long = local(world, 3, [7] * 100_000)
    assert ended(world, late, long) == ["deadline_exceeded", "prompt_too_long"]
    world.run(lambda: bool(world.decode.tokens(aborted)))
    world.decode.port.abort(aborted, "the client is gone")
    assert ended(world, aborted) == ["cancelled"]
    at_rest(world)


def test_an_abort_before_its_first_step_ends_it() -> None:
    """Also one that spares a request which has its KV: a local one needs nobody's."""
    world = make_world()
    key = local(world, 1, PROMPT)
    world.decode.port.abort(key, "the client is gone")
    assert ended(world, key) == ["cancelled"]
    at_rest(world)


def test_it_replaces_an_attempt_that_lost_its_prefill() -> None:
    """The old attempt drains beside it; the router names it."""
    world = make_world()
    lost = world.submit(PROMPT, key=RoomKey(5, 1), to=("decode",))
    world.run(lambda: bool(world.decode.worker.core.rooms.records))
    key = local(world, 5, PROMPT, key=RoomKey(5, 2), replaces=1)
    assert ended(world, lost, key) == ["cancelled", None]
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 8)
