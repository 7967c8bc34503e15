"""Which instances serve a request, and what the router adds to it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import ConfigError, InvalidRequest
from pdcore.router.policies import (
    ROUTER_ONLY,
    ClientFields,
    Target,
    check_prompt,
    choose_pair,
    find_bootstrap,
    inject,
    name_dp_rank,
    new_id,
    parse_targets,
    read_fields,
)
from pdcore.types import MAX_ID

Choose = Callable[[int, int, int], tuple[int, int]]


def raw(**fields: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in fields.items()}


# --- targets ------------------------------------------------------------------------------


def seeds_pair(room: int, num_prefill: int, num_decode: int) -> tuple[int, int]:
    """Mutant, R30 as the seed has it: the same modulo on both lists."""
    return room % num_prefill, room % num_decode


def check_every_pair_is_used_evenly(choose: Choose, num_prefill: int, num_decode: int) -> None:
    turn = math.lcm(num_prefill, num_decode)
    rooms = range(1, 1 + turn * num_decode * 3)
    used = Counter(choose(room, num_prefill, num_decode) for room in rooms)
    assert len(used) == num_prefill * num_decode, "some pairs never carry a request"
    assert len(set(used.values())) == 1


def test_room_five_of_two_and_two() -> None:
    """R30's vector: room 5 -> prefill-1, decode-1."""
    assert choose_pair(5, 2, 2) == (1, 1)
    assert choose_pair(5, 1, 1) == (0, 0)


@given(st.integers(1, 6), st.integers(1, 6))
def test_no_prefill_is_married_to_one_decode(num_prefill: int, num_decode: int) -> None:
    """D47b: the same modulo on both lists pins prefill i to decode i."""
    check_every_pair_is_used_evenly(choose_pair, num_prefill, num_decode)
    if math.gcd(num_prefill, num_decode) > 1:
        with pytest.raises(AssertionError):
            check_every_pair_is_used_evenly(seeds_pair, num_prefill, num_decode)


@given(st.integers(1, MAX_ID), st.integers(1, 9), st.integers(1, 9))
def test_the_choice_is_in_range_and_prefill_is_r30s(room: int, p: int, d: int) -> None:
    i, k = choose_pair(room, p, d)
    assert i == room % p
    assert 0 <= k < d
    if room < math.lcm(p, d):
        assert k == room % d


def seeds_dp_rank(room: int, dp_size: int | None, wanted: int | None) -> int | None:
    """Mutant: the seed's router hard-wires 0."""
    return 0


def check_dp_ranks_are_used_evenly(
    choose: Callable[[int, int | None, int | None], int | None],
) -> None:
    used = Counter(choose(room, 4, None) for room in range(400))
    assert used == dict.fromkeys(range(4), 100)


def test_the_dp_rank_is_the_rooms_or_the_clients_never_a_constant() -> None:
    """D21."""
    check_dp_ranks_are_used_evenly(name_dp_rank)
    with pytest.raises(AssertionError):
        check_dp_ranks_are_used_evenly(seeds_dp_rank)
    assert name_dp_rank(5, None, None) is None
    assert name_dp_rank(5, 4, 3) == 3
    assert name_dp_rank(5, None, 3) == 3
    with pytest.raises(InvalidRequest, match="disagg_prefill_dp_rank: 4 is outside"):
        name_dp_rank(5, 4, 4)


def test_addresses_are_normalised() -> None:
    """R29."""
    prefills, decodes = parse_targets(["p0:8001", "http://p1:8001/"], ["http://[::1]:8100"])
    assert prefills == (Target("p0:8001", "p0", 8001, 18800), Target("p1:8001", "p1", 8001, 18800))
    assert decodes == (Target("[::1]:8100", "::1", 8100, 0),)
    assert prefills[1].url == "http://p1:8001"


def test_bootstrap_ports_are_one_for_all_or_one_each() -> None:
    """D47b: zip() dropped the prefill addresses that had no port."""
    prefills, _ = parse_targets(["a:1", "b:1"], ["d:1"], [5, 6])
    assert [t.bootstrap_port for t in prefills] == [5, 6]
    with pytest.raises(ConfigError, match="2 ports for 3 prefill addresses"):
        parse_targets(["a:1", "b:1", "c:1"], ["d:1"], [5, 6])


@pytest.mark.parametrize(
    ("prefill", "decode", "says"),
    [
        ([], ["d:1"], "prefill_addrs: at least one"),
        (["p:1"], [], "decode_addrs: at least one"),
        (["p:1", "http://p:1"], ["d:1"], "prefill_addrs: p:1 is listed twice"),
        (["p"], ["d:1"], "prefill_addrs: expected a port"),
        (["ftp://p:1"], ["d:1"], "prefill_addrs: expected host:port"),
    ],
)
def test_addresses_that_cannot_be_used(prefill: list[str], decode: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_targets(prefill, decode)


# --- what a client may say -----------------------------------------------------------------


def test_a_client_may_choose_the_room_and_name_what_is_configured() -> None:
    """R31: fields are kept where the client sets them."""
    read = read_fields(
        raw(
            bootstrap_room=MAX_ID,
            bootstrap_host="h",
            bootstrap_port=1,
            disagg_prefill_dp_rank=0,
            replaces=3,
            timeout=2,
        )
    )
    assert read == ClientFields(MAX_ID, "h", 1, 0, 3, 2.0)
    assert read_fields(raw(prompt="x", bootstrap_room=None, timeout=None)) == ClientFields()


@pytest.mark.parametrize("name", ROUTER_ONLY)
def test_what_only_the_router_knows_is_refused(name: str) -> None:
    """Attempts are minted here: a client's could end another client's request."""
    with pytest.raises(InvalidRequest, match=f"{name}: is set by the router"):
        read_fields(raw(**{name: 1}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bootstrap_room": 0}, "bootstrap_room: expected an integer in 1.."),
        ({"bootstrap_room": 1 << 63}, "bootstrap_room: expected"),
        ({"bootstrap_room": "5"}, "bootstrap_room: expected an integer in 1.*got '5'"),
        ({"bootstrap_room": True}, "bootstrap_room: expected"),
        ({"bootstrap_room": 1.5}, "bootstrap_room: expected"),
        ({"bootstrap_host": 5}, "bootstrap_host: expected a host name"),
        ({"bootstrap_port": 0}, "bootstrap_port: expected an integer in 1..65535"),
        ({"disagg_prefill_dp_rank": -1}, "disagg_prefill_dp_rank: expected"),
        ({"replaces": True}, "replaces: expected"),
        ({"timeout": 0}, "timeout: expected seconds above 0"),
        ({"timeout": "1"}, "timeout: expected seconds above 0, at most 1e6, got '1'"),
        ({"prompt": ["a", "b"]}, "prompt: holds 2 prompts"),
        ({"prompt": [[1], [2], [3]]}, "prompt: holds 3 prompts"),
    ],
)
def test_a_field_that_is_wrong_is_named(fields: dict[str, Any], says: str) -> None:
    """R33 and R31's bounds."""
    with pytest.raises(InvalidRequest, match=says):
        read_fields(raw(**fields))


@pytest.mark.parametrize("prompt", [b'"a"', b' [ "a" ] ', b"[1,2,3]", b"[]", b"5", b"[[1,2]]"])
def test_one_prompt_is_left_to_the_legs(prompt: bytes) -> None:
    check_prompt(prompt)


KNOWN = [("p0", 18800), ("p1", 18800), ("p1", 18801)]


def test_a_bootstrap_address_must_be_configured() -> None:
    """D41: the seed honoured any host a client named; decode then contacted it."""
    assert find_bootstrap(None, None, KNOWN) == [0, 1, 2]
    assert find_bootstrap("p1", None, KNOWN) == [1, 2]
    assert find_bootstrap("p1", 18801, KNOWN) == [2]
    assert find_bootstrap(None, 18801, KNOWN) == [2]

    def refuses(find: Callable[[str | None, int | None, Any], list[int]]) -> None:
        for host, port in (("evil", None), ("evil", 18800), ("p0", 18801), (None, 1)):
            try:
                find(host, port, KNOWN)
            except InvalidRequest:
                continue
            raise AssertionError(f"{host}:{port} would be contacted")

    def seeds(host: str | None, port: int | None, known: Any) -> list[int]:
        """Mutant: whatever the client says."""
        return [0]

    refuses(find_bootstrap)
    with pytest.raises(AssertionError, match="would be contacted"):
        refuses(seeds)


def test_injection_goes_over_the_clients_fields_and_leaves_the_rest_untouched() -> None:
    fields = {
        "prompt": msgspec.Raw(b'"\\u0061"'),
        "x": msgspec.Raw(b"1.50"),
        "attempt": msgspec.Raw(b"1"),
    }
    body = inject(fields, {"attempt": 7, "replaces": None})
    assert b'"prompt":"\\u0061"' in body
    assert b'"x":1.50' in body
    assert json.loads(body) == {"prompt": "a", "x": 1.5, "attempt": 7, "replaces": None}


def test_ids_have_63_bits_and_are_never_zero() -> None:
    class Zero:
        def getrandbits(self, k: int, /) -> int:
            return 0

    assert new_id(Zero()) == 1
    rng = random.Random(5)
    ids = [new_id(rng) for _ in range(1000)]
    assert all(0 < one <= MAX_ID for one in ids)
    assert max(ids) > MAX_ID // 2
    assert len(set(ids)) == 1000
