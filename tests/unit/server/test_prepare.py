"""A parsed request becomes the worker's. test_leg.py drives the rest through HTTP; here are
what an error names and what a request carries of its time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcore.errors import InvalidRequest, PdcoreError
from pdcore.server.http import failure_of
from pdcore.server.openai import Endpoint, parse_request
from pdcore.server.prepare import LegOptions, Preparer
from pdcore.types import GenerateRequest, Role
from tests.unit.server.kit import TEXT, World, run

PD: dict[str, Any] = {
    "bootstrap_room": 5,
    "attempt": 7,
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 18800,
}


def prepare(
    endpoint: Endpoint, fields: dict[str, Any], role: Role = Role.DECODE, dp_size: int = 1
) -> GenerateRequest:
    world = World(num_workers=dp_size, dp_size=dp_size)
    options = LegOptions(role=role, instance="127.0.0.1:8100", request_timeout_s=60.0)
    preparer = Preparer(options, TEXT, world.dispatcher, world.clock)
    parsed = parse_request(endpoint, msgspec.json.encode({**PD, **fields}))

    async def play() -> GenerateRequest:
        return await preparer.prepare(parsed)

    return run(play())


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": [1] * 97}, "prompt_too_long", "prompt"),
        ({"prompt": "x" * 1000}, "prompt_too_long", "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 97}]}, "prompt_too_long", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 999}]}, "prompt_too_long", "messages"),
        ({"prompt": "hi", "model": "another"}, "model_not_found", "model"),
        ({"prompt": [300]}, "invalid_request", "prompt"),
    ],
)
def test_an_error_names_the_field_that_is_at_fault(
    role: Role, fields: dict[str, Any], code: str, param: str
) -> None:
    """OpenAI's ``param`` was null for these."""
    endpoint = Endpoint.CHAT if "messages" in fields else Endpoint.GENERATE
    with pytest.raises(PdcoreError) as caught:
        prepare(endpoint, fields, role)
    why, found = failure_of(caught.value)
    assert (why.code, found) == (code, param)


def test_a_local_prefill_names_no_bootstrap_server_and_is_decodes_alone() -> None:
    fields = {"prompt": "hi", "local_prefill": True}
    fields |= {"bootstrap_host": None, "bootstrap_port": None}
    request = prepare(Endpoint.GENERATE, fields)
    assert (request.is_local, request.bootstrap) == (True, "")
    assert not prepare(Endpoint.GENERATE, {"prompt": "hi"}).is_local
    with pytest.raises(InvalidRequest, match="local_prefill: is for decode instances"):
        prepare(Endpoint.GENERATE, fields, Role.PREFILL)
    with pytest.raises(InvalidRequest, match="attempt: is required"):
        prepare(Endpoint.GENERATE, {**fields, "attempt": None})


def test_a_request_has_the_time_that_the_router_left_it() -> None:
    """Rule 8: absolute expiry and remaining seconds; without a router the client's timeout,
    else the instance's own limit."""
    ours = prepare(Endpoint.GENERATE, {"prompt": "hi", "remaining_s": 7.5, "expires_at_s": 99.0})
    assert (ours.remaining_s, ours.expires_at_s) == (7.5, 99.0)
    asked = prepare(Endpoint.GENERATE, {"prompt": "hi", "timeout": 3.0})
    assert asked.remaining_s == 3.0
    assert prepare(Endpoint.GENERATE, {"prompt": "hi"}).remaining_s == 60.0


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_an_unnamed_dp_rank_is_chosen_where_its_number_is_known(dp_size: int) -> None:
    """R60, D21: prefill knows how many dp ranks it has; decode, whose own number says nothing,
    hands on that nobody named one. A rank that is named is the same on both sides, also the
    first one."""
    hi = {"prompt": "hi", "bootstrap_room": 8}
    ours = prepare(Endpoint.GENERATE, hi, Role.PREFILL, dp_size)
    assert ours.prefill_dp_rank == 8 % dp_size
    assert prepare(Endpoint.GENERATE, hi, Role.DECODE, dp_size).prefill_dp_rank is None
    for named in range(dp_size):
        fields = {**hi, "disagg_prefill_dp_rank": named}
        for role in (Role.PREFILL, Role.DECODE):
            assert prepare(Endpoint.GENERATE, fields, role, dp_size).prefill_dp_rank == named
    wrong = {"prompt": "x" * 1000, "disagg_prefill_dp_rank": dp_size}
    says = rf"disagg_prefill_dp_rank: {dp_size} is outside 0\.\.{dp_size - 1} of the prefill"
    with pytest.raises(InvalidRequest, match=says):  # said before its text is encoded
        prepare(Endpoint.GENERATE, wrong, Role.PREFILL, dp_size)
