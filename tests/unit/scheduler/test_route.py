"""What a rank tells others about itself: one source for registrations and routes."""

from __future__ import annotations

import attrs
import pytest

from pdcore.config import CoreLimits
from pdcore.errors import ConfigError, RegistrationConflict
from pdcore.kv.layout import staged
from pdcore.kv.spec import KVCacheSpec
from pdcore.scheduler.route import registration_of, route_of
from pdcore.scheduler.setup import CoreSetup
from pdcore.scheduler.topologies import Topologies
from pdcore.topology import ParallelLayout
from pdcore.types import Incarnation, PeerRef
from tests.unit.scheduler.kit import DECODE, PREFILL, make_setup, make_spec


def rank(number: int, **changes: object) -> CoreSetup:
    """One rank of a prefill instance of two TP ranks."""
    spec = attrs.evolve(make_spec(num_heads=1), tp_size=2, tp_rank=number)
    me = PeerRef("prefill", number, Incarnation(bytes([number]) * 16), f"tcp://host:{number + 1}")
    return make_setup(me, spec=spec, layout=ParallelLayout(2, tp_size=2), **changes)


def test_a_registration_says_where_the_rank_is_and_what_it_holds() -> None:
    setup = make_setup(PeerRef("prefill", 0, Incarnation(b"P" * 16), "tcp://[::1]:40123"))
    told = registration_of(setup)
    assert (told.rank_ip, told.rank_port) == ("::1", 40123)
    assert told.incarnation == "50" * 16
    assert told.block_sizes == {"full": 4}
    assert told.layout_digest == setup.spec.digest()
    assert (told.attn_tp_size, told.attn_dp_size) == (1, 1)


@pytest.mark.parametrize("address", ["mem://prefill", "tcp://prefill", "tcp://:1", "prefill:1"])
def test_an_address_that_no_route_can_carry_is_named(address: str) -> None:
    setup = make_setup(PREFILL._replace(address=address))
    with pytest.raises(ConfigError, match="use tcp://host:port"):
        registration_of(setup)


def test_decode_finds_every_rank_of_the_route() -> None:
    route = route_of([rank(1), rank(0)])
    assert list(route.ranks) == ["0,0,0", "0,0,1"]
    assert route.instance == "prefill"
    decode = Topologies(make_setup(DECODE))
    entry = decode.record("here", route, None, 0.0)
    assert entry.refusal is None
    found = decode.targets(route, 1, 0)
    assert isinstance(found, tuple)
    assert [peer.address for peer in found[0]] == ["tcp://host:1", "tcp://host:2"]


def stage(number: int, me: PeerRef, pp_size: int, num_layers: int) -> CoreSetup:
    """Rank ``number`` is a stage of its own."""
    first = make_spec().entries[0]
    model = KVCacheSpec(
        tuple(attrs.evolve(first, name=f"layer{i}.k", layer=i) for i in range(num_layers))
    )
    me = me._replace(rank=number, incarnation=Incarnation(bytes([number]) * 16))
    return make_setup(
        me._replace(address=f"tcp://host:{number + 1}"),
        spec=staged(model, pp_size, number),
        layout=ParallelLayout(pp_size, pp_size=pp_size),
    )


def test_r4_a_decode_stage_finds_the_prefill_stages_of_its_layers() -> None:
    """R4: four stages into two and into one, two into four; each prefill stage waits for as
    many handshakes as decode stages have a layer of it."""
    for prefill_pp, decode_pp, expected in (
        (4, 2, [([0, 1], 1), ([2, 3], 1)]),
        (4, 1, [([0, 1, 2, 3], 1)]),
        (2, 4, [([0], 2), ([0], 2), ([1], 2), ([1], 2)]),
    ):
        route = route_of([stage(n, PREFILL, prefill_pp, 8) for n in range(prefill_pp)])
        for number, (ranks, num_required) in enumerate(expected):
            decode = Topologies(stage(number, DECODE, decode_pp, 8))
            assert decode.record("here", route, None, 0.0).refusal is None
            found = decode.targets(route, 1, 0)
            assert isinstance(found, tuple)
            assert ([peer.rank for peer in found[0]], found[1]) == (ranks, num_required)


@pytest.mark.parametrize(
    ("prefill_pp", "decode_pp", "message"),
    [
        (2, 4, "10 layers do not end at the same stages"),
        (2, 3, "pp_size: prefill has 2, decode has 3; one must be a multiple"),
    ],
)
def test_r4_stages_that_one_handshake_cannot_serve_are_refused_at_load(
    prefill_pp: int, decode_pp: int, message: str
) -> None:
    """D30: 5, 5 and 3, 3, 2, 2: the second decode stage would have to name two numbers."""
    route = route_of([stage(n, PREFILL, prefill_pp, 10) for n in range(prefill_pp)])
    entry = Topologies(stage(1, DECODE, decode_pp, 10)).record("here", route, None, 0.0)
    assert entry.refusal is not None
    assert message in entry.refusal.detail
    assert f"prefill is tp 1 x cp 1 x dp 1 x pp {prefill_pp}" in entry.refusal.detail
    assert f"decode is tp 1 x cp 1 x dp 1 x pp {decode_pp}" in entry.refusal.detail


@pytest.mark.parametrize("every", [False, True])
def test_r58_the_route_says_whether_all_cp_ranks_send(every: bool) -> None:
    """R21, R58: one setting, prefill's; decode asks all of them all the same (R45)."""
    layout = ParallelLayout(3, cp_size=3, all_cp_ranks=every)
    peers = [PREFILL._replace(rank=n, incarnation=Incarnation(bytes([n]) * 16)) for n in range(3)]
    route = route_of([make_setup(peer, layout=layout) for peer in peers])
    decode = Topologies(make_setup(DECODE))
    assert decode.record("here", route, None, 0.0).refusal is None
    found = decode.targets(route, 1, 0)
    assert isinstance(found, tuple)
    assert route.all_cp_ranks is every
    assert ([p.rank for p in found[0]], found[1]) == ([0, 1, 2], 1)


def test_a_route_without_all_its_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0,0,0 \(not registered\)"):
        route_of([rank(1)])
    with pytest.raises(ConfigError, match="at least one prefill rank"):
        route_of([])


def test_ranks_that_disagree_are_refused() -> None:
    other = rank(1, limits=CoreLimits(max_prefill_tokens=7))
    with pytest.raises(RegistrationConflict, match="max_prefill_tokens"):
        route_of([rank(0), other])
