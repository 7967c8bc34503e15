"""What the strategies draw is valid, small, and of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import attrs
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import pdcore.testing as kit
from pdcore.control import codec
from pdcore.control import messages as m
from pdcore.control.memory import FaultPlan
from pdcore.errors import HTTP_STATUS
from pdcore.sim.plan import Plan, make_plan
from pdcore.testing import make_world, simulated_tokens
from pdcore.testing.strategies import (
    failures,
    fault_plans,
    frames,
    generate_requests,
    incarnations,
    leader_messages,
    leases,
    nonces,
    peer_messages,
    plans,
    room_keys,
    sampling_params,
    worker_messages,
)
from pdcore.types import MAX_ID, Failure, GenerateRequest, LeaseId, Nonce, RoomKey, SamplingParams

#: The same examples every time.
FIXED = settings(max_examples=300, derandomize=True, database=None)
SHRUNK = settings(FIXED, phases=[Phase.generate, Phase.shrink])


@given(room_keys(), leases(), nonces(), incarnations())
def test_identities_are_within_their_bounds(
    key: RoomKey, lease: LeaseId, nonce: Nonce, incarnation: bytes
) -> None:
    assert 1 <= min(key) <= max(key) <= MAX_ID
    for one in (lease, nonce):
        assert len(one.incarnation) == 16
        assert 0 <= one.counter <= MAX_ID
    assert len(incarnation) == 16


@given(failures())
def test_a_failure_has_the_status_of_its_code(failed: Failure) -> None:
    assert failed.http_status == HTTP_STATUS[failed.code]


@pytest.mark.parametrize(
    ("strategy", "union"),
    [
        (peer_messages, m.PeerMessage),
        (leader_messages, m.LeaderMessage),
        (worker_messages, m.WorkerMessage),
    ],
)
def test_every_kind_of_message_is_drawn(
    strategy: Callable[[], st.SearchStrategy[object]], union: object
) -> None:
    """A kind that is added to the protocol is added to its strategy too."""
    seen = set()

    @FIXED
    @given(strategy())
    def look(message: object) -> None:
        seen.add(type(message))

    look()
    assert seen == set(get_args(union))


@given(frames())
def test_a_frame_is_one_that_a_peer_takes(frame: m.Frame) -> None:
    assert codec.decode_frame(codec.encode_frame(frame)) == frame


@given(sampling_params(max_tokens=5), st.integers(0, 2**20))
@settings(max_examples=25)
def test_any_sampling_serves(sampling: SamplingParams, seed: int) -> None:
    """One world with it, and what can be repeated is repeated."""
    world = make_world(seed=seed)
    tokens = world.run_request([5, 6, 7], sampling)
    assert sampling.min_tokens <= len(tokens) <= 5
    if sampling.temperature == 0.0 or sampling.seed is not None:
        assert tokens == simulated_tokens(world.model, [5, 6, 7], len(tokens), sampling)


def test_sampling_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0, expected at least 1"):
        find(sampling_params(max_tokens=0), lambda _: True)


@given(generate_requests(unix_s=1000.0, max_prompt=6, vocab_size=11))
@settings(max_examples=25)
def test_a_core_takes_any_request_and_computes_it(request: GenerateRequest) -> None:
    assert 1 <= len(request.prompt_token_ids) <= 6
    assert max(request.prompt_token_ids) < 11
    assert request.expires_at_s == 1060.0
    core = make_world().decode.worker.core
    core.submit(attrs.evolve(request, is_local=True), 1000.0)
    batches = []
    for _ in range(8):
        core.tick(1000.0)
        batches.append(core.schedule(1000.0))
    (batch,) = [one for one in batches if one is not None]
    assert tuple(batch.input_ids) == request.prompt_token_ids


@given(fault_plans(max_chance=0.2, max_delay_s=0.01))
def test_a_faulty_network_is_as_bad_as_it_may_be(faults: FaultPlan) -> None:
    assert max(faults.drop, faults.duplicate, faults.reorder) <= 0.2
    assert 0.0 <= faults.min_delay_s <= faults.max_delay_s <= 0.01


@given(fault_plans())
@settings(max_examples=10)
def test_any_faulty_network_only_delays(faults: FaultPlan) -> None:
    """D26: what is lost is sent again."""
    world = make_world(faults=faults, seed=1)
    assert world.run_request([5, 6, 7]) == simulated_tokens(world.model, [5, 6, 7], 8)


@given(plans(max_requests=3, max_faults=2))
def test_a_plan_is_part_of_a_seeds_world(plan: Plan) -> None:
    whole = make_plan(plan.seed)
    assert plan == whole.only([f.number for f in plan.faults], [r.number for r in plan.requests])
    assert 1 <= len(plan.requests) <= 3
    assert len(plan.faults) <= 2


def test_a_plan_shrinks_to_what_is_needed() -> None:
    """A streamed request and a killed worker are wanted: no other is left."""

    def is_wanted(plan: Plan) -> bool:
        is_killed = any(fault.kind == "crash_worker" for fault in plan.faults)
        return is_killed and any(request.is_streamed for request in plan.requests)

    found = find(plans(), is_wanted, settings=SHRUNK)
    assert [fault.kind for fault in found.faults] == ["crash_worker"]
    assert [request.is_streamed for request in found.requests] == [True]


def test_without_hypothesis_the_remedy_is_named_and_the_rest_works() -> None:
    code = (
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "from pdcore.testing import make_plan\n"
        "try:\n"
        "    from pdcore.testing import frames\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error, '|', error.name)\n"
    )
    source = str(Path(kit.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.stdout.strip() == (
        "the strategies of pdcore.testing need hypothesis: "
        "run `pip install 'pdcore[testing]'` | hypothesis"
    )
