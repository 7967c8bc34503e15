"""What a rank tells others about itself: one source for registrations and routes."""

from __future__ import annotations

import attrs
import pytest

from pdcore.config import CoreLimits
from pdcore.errors import ConfigError, RegistrationConflict
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
    found = decode.targets(route, 0)
    assert isinstance(found, tuple)
    assert [peer.address for peer in found[0]] == ["tcp://host:1", "tcp://host:2"]


def test_a_route_without_all_its_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0,0,0 \(not registered\)"):
        route_of([rank(1)])
    with pytest.raises(ConfigError, match="at least one prefill rank"):
        route_of([])


def test_ranks_that_disagree_are_refused() -> None:
    other = rank(1, limits=CoreLimits(max_prefill_tokens=7))
    with pytest.raises(RegistrationConflict, match="max_prefill_tokens"):
        route_of([rank(0), other])
