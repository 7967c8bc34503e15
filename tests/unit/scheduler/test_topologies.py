"""Routes of prefill instances: asked once, refused by name, mapped to ranks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Route, RouteRank
from pdcore.errors import failure
from pdcore.kv.spec import KVCacheSpec
from pdcore.scheduler.setup import CoreSetup
from pdcore.scheduler.topologies import MAX_ENTRIES, MAX_OVER, Topologies, bracket
from pdcore.topology import ParallelLayout, choose_dp_rank
from pdcore.types import Failure, Incarnation, PeerRef
from tests.unit.scheduler.kit import PREFILL, make_route, make_setup, make_spec

AT = "bootstrap:1"
LIMITS = CoreLimits(topology_ttl_s=10.0, topology_retry_s=1.0)


def make_topologies(**changes: object) -> Topologies:
    return Topologies(make_setup(limits=LIMITS, **changes))


def decode_rank(tp_size: int, tp_rank: int, *, is_mla: bool = False) -> CoreSetup:
    heads = {"num_heads": 8 // tp_size, "total_num_heads": 8, "is_mla": is_mla}
    spec = KVCacheSpec(make_spec(**heads).entries, tp_size, tp_rank)
    return make_setup(limits=LIMITS, spec=spec, layout=ParallelLayout(tp_size, tp_size))


def wide_route(setup: CoreSetup, tp: int, cp: int = 1, dp: int = 1) -> Route:
    """Rank r of the instance has incarnation byte r and port 100 + r."""
    layout = ParallelLayout(tp * cp * dp, tp, cp)
    ranks = {
        layout.route_key(layout.coordinates(r)): RouteRank(
            "10.0.0.7", 100 + r, bytes([r] * 16).hex()
        )
        for r in range(layout.world_size)
    }
    return make_route(setup, attn_tp_size=tp, attn_cp_size=cp, dp_size=dp, ranks=ranks)


def mapped(
    setup: CoreSetup, route: Route, dp_rank: int | None = 0, room: int = 1
) -> tuple[list[int], int]:
    targets = Topologies(setup).targets(route, room, dp_rank)
    assert not isinstance(targets, Failure), targets
    peers, num_required = targets
    for peer in peers:
        assert peer.address == f"tcp://10.0.0.7:{100 + peer.rank}"
        assert peer.incarnation == bytes([peer.rank] * 16)
    return [peer.rank for peer in peers], num_required


def test_one_rank_each() -> None:
    setup = make_setup()
    assert Topologies(setup).targets(make_route(setup), 1, 0) == ([PREFILL], 1)


@pytest.mark.parametrize(
    ("decode_tp", "tp_rank", "prefill_tp", "ranks", "num_required"),
    [
        (2, 0, 2, [0], 1),
        (2, 1, 2, [1], 1),
        (4, 3, 2, [1], 2),
        (4, 1, 2, [0], 2),
        (1, 0, 4, [0, 1, 2, 3], 1),
        (2, 1, 4, [2, 3], 1),
    ],
)
def test_r58_the_ranks_of_unequal_groups(
    decode_tp: int, tp_rank: int, prefill_tp: int, ranks: list[int], num_required: int
) -> None:
    """R58: whom to ask, and how many handshakes each of them waits for."""
    setup = decode_rank(decode_tp, tp_rank)
    assert mapped(setup, wide_route(setup, prefill_tp)) == (ranks, num_required)


def test_ranks_that_write_nothing_are_asked_too() -> None:
    """R45, R58: a group votes as one, and a rank that nobody asks never votes: MLA's copies."""
    setup = decode_rank(1, 0, is_mla=True)
    assert mapped(setup, wide_route(setup, 4)) == ([0, 1, 2, 3], 1)


def test_the_dp_partition_shifts_the_rank() -> None:
    """R4: rank = (dp * cp_size + cp) * tp_size + tp; every cp rank is asked (R45)."""
    setup = decode_rank(2, 1)
    route = wide_route(setup, tp=2, cp=2, dp=3)
    assert [mapped(setup, route, dp) for dp in range(3)] == [
        ([1, 3], 1),
        ([5, 7], 1),
        ([9, 11], 1),
    ]


def check_an_unnamed_dp_rank_is_the_rooms(of: Callable[[CoreSetup, Route, int], int]) -> None:
    setup = decode_rank(2, 1)
    for dp in (1, 2, 3, 8):
        route = wide_route(setup, tp=2, cp=2, dp=dp)
        for room in (1, 2, 8, 9, (1 << 63) - 1):
            assert of(setup, route, room) == (room % dp) * 4 + 1


def test_r60_without_a_name_it_is_the_rooms_dp_rank_by_the_size_in_the_route() -> None:
    """R60, D21: nobody knew prefill's dp_size before. The mutant takes the first."""
    check_an_unnamed_dp_rank_is_the_rooms(lambda s, r, room: mapped(s, r, None, room)[0][0])
    with pytest.raises(AssertionError):
        check_an_unnamed_dp_rank_is_the_rooms(lambda s, r, room: mapped(s, r, 0, room)[0][0])


def test_d21_a_dp_rank_that_does_not_exist_fails_the_request() -> None:
    setup = make_setup()
    problem = Topologies(setup).targets(make_route(setup), 1, 1)
    assert isinstance(problem, Failure)
    assert problem.code == "incompatible"
    assert "disagg_prefill_dp_rank: 1 is outside 0..0 of the prefill instance" in problem.detail
    assert problem.detail.endswith("(prefill)")


def test_a_missing_rank_fails_the_request_and_is_named() -> None:
    setup = decode_rank(1, 0)
    route = wide_route(setup, 2)
    del route.ranks["0,0,1"]
    problem = Topologies(setup).targets(route, 1, 0)
    assert isinstance(problem, Failure)
    assert (problem.code, problem.http_status) == ("unavailable", 503)
    assert "0,0,1" in problem.detail


@pytest.mark.parametrize(
    ("host", "shown"), [("10.0.0.7", "10.0.0.7"), ("::1", "[::1]"), ("[fe80::1]", "[fe80::1]")]
)
def test_an_ipv6_literal_is_bracketed(host: str, shown: str) -> None:
    assert bracket(host) == shown
    setup = make_setup()
    rank = RouteRank(host, 5, PREFILL.incarnation.hex())
    targets = Topologies(setup).targets(make_route(setup, ranks={"0,0,0": rank}), 1, 0)
    assert not isinstance(targets, Failure)
    assert targets[0][0].address == f"tcp://{shown}:5"


def test_d28_one_fetch_at_a_time_and_none_while_the_answer_is_fresh() -> None:
    """D28: the route is fetched off the tick, once for everybody who waits."""
    known = make_topologies()
    assert known.needs_fetch(AT, 0.0)
    assert not known.needs_fetch(AT, 0.0)
    assert known.needs_fetch("bootstrap:2", 0.0)
    route = make_route(known.setup)
    entry = known.record(AT, route, None, 5.0)
    assert entry.route is route
    assert not known.needs_fetch(AT, 14.9)
    assert known.needs_fetch(AT, 15.0)
    assert known.lookup(AT, 15.0).route is route, "an old route is used while it is asked again"
    assert not known.needs_fetch(AT, 16.0)


@pytest.mark.parametrize(
    ("setup", "changes", "named"),
    [
        (decode_rank(2, 0), {"attn_tp_size": 3}, "tp_size: prefill has 3, decode has 2"),
        (decode_rank(2, 0), {"attn_tp_size": 6}, "its 8 heads do not divide over both"),
        (
            make_setup(spec=KVCacheSpec(make_spec(is_per_rank=True).entries)),
            {"attn_tp_size": 2, "dp_size": 3},
            "layer0.k: prefill has tp_size 2, decode has 1; it holds one value per token and rank",
        ),
    ],
)
def test_d30_d36_what_cannot_be_sliced_is_refused_when_the_route_is_read(
    setup: CoreSetup, changes: dict[str, object], named: str
) -> None:
    """D30, D36: sizes that do not divide, heads that do not, scales kept once per rank; with
    both whole shapes, before any rank is looked for."""
    known = Topologies(setup)
    tp, dp = int(str(changes["attn_tp_size"])), int(str(changes.get("dp_size", 1)))
    entry = known.record(AT, wide_route(setup, tp, dp=dp), None, 0.0)
    assert entry.route is None
    assert entry.refusal is not None
    assert entry.refusal.http_status == 502
    assert named in entry.refusal.detail
    ours = setup.spec.tp_size
    assert f"prefill is tp {tp} x cp 1 x dp {dp} x pp 1" in entry.refusal.detail
    assert f"decode is tp {ours} x cp 1 x dp 1 x pp 1" in entry.refusal.detail


def test_d20_a_failed_fetch_is_repeated_at_intervals() -> None:
    known = make_topologies()
    assert known.needs_fetch(AT, 0.0)
    problem = failure("unavailable", "2 of 4 ranks are missing")
    entry = known.record(AT, None, problem, 0.2)
    assert (entry.route, entry.refusal, entry.problem) == (None, None, problem)
    assert not known.needs_fetch(AT, 1.1)
    assert known.needs_fetch(AT, 1.2)
    nothing = known.record(AT, None, None, 1.3)
    assert nothing.problem is not None
    assert AT in nothing.problem.detail


def test_a_failed_fetch_keeps_the_route_that_was_known() -> None:
    known = make_topologies()
    route = make_route(known.setup)
    known.record(AT, route, None, 0.0)
    assert known.needs_fetch(AT, 10.0)
    assert known.record(AT, None, failure("unreachable", "x"), 10.1).route is route
    assert not known.needs_fetch(AT, 10.2)
    assert known.needs_fetch(AT, 11.2)


def test_d14_a_refusal_is_remembered_and_asked_again_when_it_is_old() -> None:
    """D14: negative cache, both values in the text."""
    known = make_topologies()
    assert known.needs_fetch(AT, 0.0)
    entry = known.record(AT, make_route(known.setup, fingerprint="other"), None, 1.0)
    assert entry.route is None
    assert entry.refusal is not None
    assert "prefill has other, decode has model" in entry.refusal.detail
    # Routers read it in /health and choose another pair.
    assert known.refused(10.9) == {"prefill": entry.refusal.detail}
    assert known.refused(11.0) == {}
    assert not known.needs_fetch(AT, 10.9)
    assert known.lookup(AT, 10.9).refusal is not None
    assert known.lookup(AT, 11.0).refusal is None
    assert known.needs_fetch(AT, 11.0)
    assert known.record(AT, make_route(known.setup), None, 11.5).refusal is None


@pytest.mark.parametrize("code", ["invalid_request", "incompatible"])
def test_d41_what_asking_again_cannot_help_is_refused_at_once(code: str) -> None:
    """D41: a forbidden bootstrap address does not hold its requests for the time budget."""
    known = make_topologies()
    assert known.needs_fetch(AT, 0.0)
    entry = known.record(AT, None, failure(code, "not among the allowed"), 0.0)
    assert entry.refusal is not None
    assert entry.refusal.code == code
    assert not known.needs_fetch(AT, 5.0)
    assert known.needs_fetch(AT, 10.0)


@pytest.mark.parametrize(
    ("rank", "named"),
    [
        (RouteRank("10.0.0.7", 1, "zz" * 16), "incarnation"),
        (RouteRank("10.0.0.7", 1, "00" * 15), "incarnation"),
        (RouteRank("10.0.0.7", 1, ""), "incarnation"),
        (RouteRank("", 1, "00" * 16), "address"),
        (RouteRank("10.0.0.7", 0, "00" * 16), "address"),
        (RouteRank("10.0.0.7", 70_000, "00" * 16), "address"),
    ],
)
def test_d58_a_malformed_rank_refuses_the_route_and_ends_no_loop(
    rank: RouteRank, named: str
) -> None:
    """D45, D58: the answer of another server is checked when it comes."""
    known = make_topologies()
    entry = known.record(AT, make_route(known.setup, ranks={"0,0,0": rank}), None, 0.0)
    assert entry.route is None
    assert entry.refusal is not None
    assert named in entry.refusal.detail


def test_a_life_that_is_over_takes_its_route_along() -> None:
    """SGLang PR34289, 36029: only routes with that incarnation are asked for again."""
    known = make_topologies()
    other = PeerRef("other", 0, Incarnation(b"Q" * 16), "tcp://other:1")
    known.record(AT, make_route(known.setup), None, 0.0)
    known.record("bootstrap:2", make_route(known.setup, other), None, 0.0)
    known.forget(PREFILL.incarnation)
    assert known.lookup(AT, 1.0).route is None
    assert known.needs_fetch(AT, 1.0)
    assert known.lookup("bootstrap:2", 1.0).route is not None
    assert not known.needs_fetch("bootstrap:2", 1.0)


def check_prefill_ranks_have_prefills_numbers(known: Topologies) -> None:
    """Prefill with cp 2 and dp 2, decode with cp 1: dp rank 1 begins at rank 2."""
    targets = known.targets(wide_route(known.setup, 1, cp=2, dp=2), 8, 1)
    assert not isinstance(targets, Failure), targets
    assert [peer.rank for peer in targets[0]] == [2, 3]


class OwnSizes(Topologies):
    """Mutant: numbers prefill's ranks with this side's cp size, as the seed did."""

    def targets(
        self, route: Route, room: int, named_dp_rank: int | None
    ) -> tuple[list[PeerRef], int] | Failure:
        found = super().targets(route, room, named_dp_rank)
        if isinstance(found, Failure):
            return found
        at = ParallelLayout(route.dp_size, 1, self.setup.layout.cp_size)
        rank = at.rank(at.coordinates(choose_dp_rank(room, route.dp_size, named_dp_rank)))
        return [peer._replace(rank=rank) for peer in found[0]], found[1]


def test_d38_a_rank_is_numbered_with_the_sizes_of_its_own_instance() -> None:
    """D38, R48: cp and tp sizes come with the route."""
    check_prefill_ranks_have_prefills_numbers(Topologies(make_setup()))


def test_d38_mutant_using_decodes_sizes_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_prefill_ranks_have_prefills_numbers(OwnSizes(make_setup()))


def check_dead_ranks_are_not_used(known: Topologies) -> None:
    """The registry may name a dead rank until its successor has registered."""
    dead, alive = make_route(known.setup), make_route(known.setup, SUCCESSOR)
    known.record(AT, dead, None, 0.0)
    known.end(PREFILL.incarnation)
    assert known.needs_fetch(AT, 0.1)
    entry = known.record(AT, dead, None, 0.2)
    assert entry.route is None, "a dead rank is not a target"
    assert entry.refusal is None, "whoever waits goes on waiting"
    assert entry.problem is not None
    assert entry.problem.code == "unavailable"
    assert not known.needs_fetch(AT, 0.3)
    assert known.needs_fetch(AT, 0.2 + LIMITS.topology_retry_s)
    assert known.record(AT, alive, None, 1.3).route is alive


SUCCESSOR = PeerRef(PREFILL.instance, PREFILL.rank, Incarnation(b"S" * 16), PREFILL.address)


class Credulous(Topologies):
    """Mutant: takes the registry's word for a life that it knows to be over."""

    def end(self, incarnation: Incarnation) -> None:
        self.forget(incarnation)


def test_d32_a_route_that_names_a_life_that_is_over_is_no_answer() -> None:
    """D32, D28: fetched in the moments after a death, such a route was cached for its whole
    time to live, and every request to the restarted prefill timed out meanwhile."""
    check_dead_ranks_are_not_used(make_topologies())


def test_d32_mutant_believing_the_registry_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_dead_ranks_are_not_used(Credulous(make_setup(limits=LIMITS)))


def test_d6_lives_that_are_over_are_remembered_in_a_bounded_table() -> None:
    known = make_topologies()
    for n in range(MAX_OVER + 1):
        known.end(Incarnation(n.to_bytes(16, "big")))
    assert len(known._over) == MAX_OVER


def test_d6_addresses_that_clients_choose_fill_a_bounded_table() -> None:
    known = make_topologies()
    known.record(AT, make_route(known.setup), None, 0.0)
    for i in range(2 * MAX_ENTRIES):
        known.needs_fetch(f"stranger:{i}", 0.0)
        assert known.lookup(AT, 0.0).route is not None, "what is used stays"
    assert len(known.entries) == MAX_ENTRIES


def test_d32_another_epoch_drops_the_cache_and_says_who_left() -> None:
    """D32: the same instance at the same address, one of its ranks in another process."""
    known = make_topologies()
    former = wide_route(known.setup, tp=2)
    ranks = {**former.ranks, "0,0,1": RouteRank("10.0.0.7", 7, "ab" * 16)}
    newer = msgspec.structs.replace(former, epoch=former.epoch + 1, ranks=ranks)
    known.record(AT, former, None, 0.0)
    assert known.evicted == []
    known.record(AT, newer, None, 1.0)
    assert known.evicted == [Incarnation(bytes([1] * 16))]
    assert known.lookup(AT, 1.0).route is newer
    known.record(AT, newer, None, 2.0)
    assert len(known.evicted) == 1, "told once"


def test_d32_who_left_is_known_although_the_route_was_forgotten_in_between() -> None:
    known = make_topologies()
    former = make_route(known.setup)
    known.record(AT, former, None, 0.0)
    known.forget(PREFILL.incarnation)
    known.record(
        AT, msgspec.structs.replace(make_route(known.setup, SUCCESSOR), epoch=9), None, 1.0
    )
    assert known.evicted == [PREFILL.incarnation]


def test_another_instance_at_the_address_evicts_nobody() -> None:
    """It says nothing about the ranks of the former one."""
    known = make_topologies()
    other = PeerRef("other", 0, Incarnation(b"Q" * 16), "tcp://other:1")
    known.record(AT, make_route(known.setup), None, 0.0)
    known.record(AT, make_route(known.setup, other), None, 1.0)
    assert known.evicted == []


def test_d48_a_route_whose_own_server_says_that_it_is_over_is_dropped() -> None:
    """D48: 503 with the missing ranks. A server out of reach says nothing of the kind."""
    known = make_topologies()
    route = make_route(known.setup)
    known.record(AT, route, None, 0.0)
    assert known.record(AT, None, failure("unreachable", "x"), 10.0).route is route
    gone = failure("unavailable", "1 of 1 ranks (dp,cp,tp) are missing: 0,0,0")
    assert known.record(AT, None, gone, 11.5).route is None
