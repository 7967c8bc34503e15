"""Checksums of the KV, end to end: a byte that arrives wrong fails its request and no other."""

from __future__ import annotations

import asyncio
import json
import sys

import attrs
import pytest

from pdcore.config import CoreLimits
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.fsm.events import BlocksVerified, Event
from pdcore.scheduler.decode import DecodeCore
from pdcore.server.client import HttpClient, Origin
from pdcore.sim.checks import unrest
from pdcore.sim.clients import Outcome, ask
from pdcore.sim.cluster import Cluster
from pdcore.sim.loop import pass_time
from pdcore.sim.plan import Plan, Request, WorldOptions, make_plan, with_corruption
from pdcore.sim.world import in_world, run_world
from pdcore.testing.world import World, make_world
from pdcore.types import CRC32, NO_CHECKSUMS, RoomKey, SamplingParams
from tests.scenarios.processes import Program

PROMPT = list(range(10, 31))
TEN = SamplingParams(max_tokens=10)
#: An engine that believes what it is given: only the checksums can notice.
TRUSTING = SimulatedConfig(block_size=4, max_model_len=512, verify_all=False)


def corrupt(world: World, byte: int = 0) -> None:
    faults = world.fabric.faults(world.prefill.worker.core.setup.me.incarnation)
    faults.corrupt_next, faults.corrupt_byte = True, byte


def end(world: World, key: RoomKey) -> tuple[str, str]:
    world.run(lambda: world.decode.result(key) is not None)
    result = world.decode.result(key)
    assert result is not None
    return (result.failure.code, result.failure.detail) if result.failure else ("", "")


def check_whole(world: World) -> None:
    """Everything came back, on both sides."""
    world.settle()
    for rank in world.ranks.values():
        for ledger in rank.worker.core.blocks.audit().values():
            assert ledger.free == ledger.total


def check_one_flip(world: World, byte: int) -> None:
    """The first of two requests arrives with a wrong byte."""
    corrupt(world, byte)
    bad = world.submit(PROMPT, sampling=TEN)
    good = world.submit(PROMPT[::-1], sampling=TEN)
    code, detail = end(world, bad)
    assert code == "corrupted", (code, detail)
    assert "did not arrive as it was sent; the first begins at token" in detail
    assert world.decode.tokens(bad) == []
    assert end(world, good) == ("", "")
    assert world.decode.tokens(good) == simulated_tokens(world.model, PROMPT[::-1], 10)
    assert world.run_request(PROMPT, TEN) == simulated_tokens(world.model, PROMPT, 10)
    check_whole(world)


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 6), (6, 4), (3, 16)])
def test_a_wrong_byte_fails_its_request_only(sizes: tuple[int, int], chunk: int | None) -> None:
    """Issue 4.7: whole prompts and early sends, equal blocks and others."""
    limits = CoreLimits() if chunk is None else CoreLimits(prefill_chunk_tokens=chunk)
    for byte in (0, 77, -1):
        world = make_world(
            model=attrs.evolve(TRUSTING, block_size=sizes[0]),
            limits=limits,
            decode_block_size=sizes[1],
            integrity=CRC32,
        )
        check_one_flip(world, byte)


def test_without_checksums_nobody_notices() -> None:
    """The mutant: that same world, not asked."""
    with pytest.raises(AssertionError):
        check_one_flip(make_world(model=TRUSTING), 0)


def test_whole_requests_are_served_with_checksums() -> None:
    world = make_world(integrity=CRC32)
    for length in (1, 4, 5, 63):
        prompt = list(range(10, 10 + length))
        assert world.run_request(prompt, TEN) == simulated_tokens(world.model, prompt, 10)
    check_whole(world)


def test_a_peer_whose_bytes_go_wrong_again_and_again_is_shed() -> None:
    """D25: it counts like a transfer that failed; a Done in between is no success."""
    world = make_world(model=TRUSTING, integrity=CRC32)
    codes = []
    for _ in range(5):
        corrupt(world)
        codes.append(end(world, world.submit(PROMPT, sampling=TEN))[0])
    assert codes == ["corrupted"] * 3 + ["unavailable"] * 2


# --- who asks, who answers --------------------------------------------------------------------


def uneven(prefill: str, decode: str) -> World:
    world = make_world(integrity=decode)
    if prefill != decode:
        options = attrs.evolve(world.prefill.options, integrity=prefill)
        world.ranks["prefill"].options = options
        world.restart("prefill")
    return world


def test_prefill_sends_what_decode_asks_for() -> None:
    world = uneven(NO_CHECKSUMS, CRC32)
    corrupt(world)
    assert end(world, world.submit(PROMPT, sampling=TEN))[0] == "corrupted"
    assert end(world, world.submit(PROMPT, sampling=TEN)) == ("", "")


def test_prefill_that_is_configured_insists_on_it() -> None:
    world = uneven(CRC32, NO_CHECKSUMS)
    code, detail = end(world, world.submit(PROMPT, sampling=TEN))
    assert code == "incompatible"
    assert "integrity: prefill has crc32, decode has none; set both alike" in detail


def test_a_prefill_that_sends_none_is_noticed() -> None:
    """Whoever leaves them out, or sums less than the prompt, is not believed."""
    world = make_world(integrity=CRC32)
    core = world.prefill.worker.core
    handle = core.handle_event

    def without_sums(event: Event, now: float) -> None:
        handle(event, now)
        for record in core.rooms.records.values():
            for leg in record.sender.legs.values():
                leg.summed.clear()

    vars(core)["handle_event"] = without_sums
    code, detail = end(world, world.submit(PROMPT, sampling=TEN))
    assert code == "corrupted"
    assert "asked for checksums of 21 tokens and sent those of 0" in detail
    check_whole(world)


# --- while it is being compared ---------------------------------------------------------------


def hold_answers(world: World) -> list[BlocksVerified]:
    """What has been compared is not told yet."""
    core = world.decode.worker.core
    handle, held = core.handle_event, []

    def held_back(event: Event, now: float) -> None:
        if isinstance(event, BlocksVerified):
            held.append(event)
        else:
            handle(event, now)

    vars(core)["handle_event"] = held_back
    return held


def test_done_is_held_back_until_it_is_compared() -> None:
    """Repeated Dones start nothing anew; the request goes on with the answer."""
    world = make_world(integrity=CRC32)
    held = hold_answers(world)
    key = world.submit(PROMPT, sampling=TEN)
    world.run(lambda: bool(held))
    for _ in range(200):
        world.step()
        world.jump()
    assert len(held) == 1
    assert world.decode.tokens(key) == []
    core = world.decode.worker.core
    del vars(core)["handle_event"]
    core.handle_event(held[0], world.clock.monotonic())
    core.handle_event(held[0], world.clock.monotonic())
    assert end(world, key) == ("", "")
    check_whole(world)


def test_who_is_cancelled_meanwhile_ends_at_once() -> None:
    """The answer then finds nobody; blocks come back all the same."""
    world = make_world(integrity=CRC32)
    held = hold_answers(world)
    key = world.submit(PROMPT, sampling=TEN)
    world.run(lambda: bool(held))
    world.abort(key)
    assert end(world, key)[0] == "cancelled"
    core = world.decode.worker.core
    del vars(core)["handle_event"]
    core.handle_event(held[0], world.clock.monotonic())
    check_whole(world)


# --- groups, and whole deployments ------------------------------------------------------------

REQUEST = Request(0, 0.0, "/v1/completions", (5, 6, 7, 8, 9), 6, False, 5.0, None, None)


def corrupted(options: WorldOptions) -> tuple[list[Outcome], list[list[str]]]:
    """Four requests at once, and one wrong byte from the last rank of the first prefill
    instance: their outcomes, and what failed on each decode rank."""
    plan = attrs.evolve(make_plan(1), options=attrs.evolve(options, integrity=CRC32))

    async def scenario(cluster: Cluster) -> tuple[list[Outcome], list[list[str]]]:
        rank = cluster.instances["p0"].ranks[-1]
        faults = cluster.site.fabric.faults(rank.incarnation)
        faults.corrupt_next, faults.corrupt_byte = True, 5
        requests = [
            attrs.evolve(REQUEST, number=n, prompt=tuple(range(3, 9 + n))) for n in range(4)
        ]
        outcomes = await asyncio.gather(*(ask(cluster, one) for one in requests))
        assert not faults.corrupt_next
        await pass_time(3.0)
        assert unrest(cluster) == []
        return outcomes, [
            [t.failure.code for _, t in one.core.rooms.tombstones._entries.values() if t.failure]
            for one in cluster.ranks()
            if isinstance(one.core, DecodeCore)
        ]

    return in_world(plan, scenario)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (4, 2), (2, 4), (1, 2), (2, 1)])
def test_a_wrong_byte_on_one_rank_ends_its_request_on_all(prefill_tp: int, decode_tp: int) -> None:
    """Each decode rank compares its own legs; the vote makes it one decision (decision 18)."""
    options = WorldOptions(1, 1, prefill_tp=prefill_tp, decode_tp=decode_tp)
    outcomes, failed = corrupted(options)
    assert sorted(o.code for o in outcomes if not o.is_ok) == ["corrupted"]
    assert sum(o.is_ok for o in outcomes) == 3
    assert failed == [["corrupted"]] * decode_tp


@pytest.mark.parametrize("tp", [1, 2])
def test_the_router_tries_another_pair(tp: int) -> None:
    """As for a transfer that failed (decision 19): the client gets its answer."""
    outcomes, failed = corrupted(WorldOptions(2, 2, prefill_tp=tp, decode_tp=tp))
    assert all(outcome.is_ok for outcome in outcomes), outcomes
    assert sorted(code for codes in failed for code in codes) == ["corrupted"] * tp


def corrupted_worlds() -> list[Plan]:
    return [with_corruption(make_plan(seed)) for seed in (1, 3, 4, 8)]


@pytest.mark.parametrize("plan", corrupted_worlds(), ids=lambda plan: str(plan.seed))
def test_a_simulated_deployment_with_wrong_bytes_keeps_its_promises(plan: Plan) -> None:
    """Every fault of the seed and wrong bytes besides: right answers or honest failures, and
    nothing is lost."""
    found = run_world(plan)
    assert found.violations == []
    assert found.faults["corrupt"] > 0


def test_that_deployment_breaks_them_without_checksums() -> None:
    """The mutant: the same wrong bytes, nobody asked."""
    plan = with_corruption(make_plan(1))
    options = attrs.evolve(plan.options, integrity=NO_CHECKSUMS)
    found = run_world(attrs.evolve(plan, options=options))
    assert any("is not what was computed" in one for one in found.violations)


# --- processes --------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="shm is Linux")
def test_processes_serve_with_checksums_what_they_serve_without() -> None:
    """Shared memory, two prefill ranks and one decode rank, as a person would start them."""
    where = ("--simulated", "--integrity", "crc32", "--prefill-tp", "2")
    program = Program("up", "--port", "0", *where)
    try:
        ready = program.wait_for(r"ready: http://([\d.]+):(\d+)")
        asyncio.run(compare(Origin(ready[1], int(ready[2]))))
        assert program.stop() == 0
    finally:
        program.close()


async def compare(origin: Origin) -> None:
    client = HttpClient()
    for length in (1, 16, 100, 700):
        prompt = [7 + j for j in range(length)]
        body = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True, "timeout": 50}
        headers = [("content-type", "application/json")]
        response = await client.request(
            "POST", origin, "/v1/completions", json.dumps(body).encode(), headers=headers
        )
        answer = json.loads(await response.read())
        assert response.status == 200, answer
        expected = simulated_tokens(SimulatedConfig(), prompt, 6)
        assert answer["choices"][0]["token_ids"] == expected
    await client.aclose()
