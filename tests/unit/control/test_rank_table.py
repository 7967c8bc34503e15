"""The bootstrap state: what registers, what is refused, when an instance is ready."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.control.messages import RankRegistration, Route
from pdcore.control.rank_table import SHARED_FIELDS, RankTable, RankTableConfig
from pdcore.errors import ConfigError, InvalidRequest, RegistrationConflict
from pdcore.topology import ParallelLayout
from pdcore.types import MAX_ID

LAYOUT = ParallelLayout(world_size=4, tp_size=2)  # tp 2, cp 1, dp 2
CONFIG = RankTableConfig("p0:8001", LAYOUT, lease_s=15.0, retention_s=100.0, room_ttl_s=60.0)
KEYS = ["0,0,0", "0,0,1", "1,0,0", "1,0,1"]
FIRST, SECOND, THIRD = "1" * 32, "2" * 32, "3" * 32


def registration(dp: int = 0, tp: int = 0, **changes: object) -> RankRegistration:
    base = RankRegistration(
        attn_tp_size=2,
        attn_tp_rank=tp,
        attn_cp_size=1,
        attn_cp_rank=0,
        attn_dp_size=2,
        attn_dp_rank=dp,
        rank_ip=f"p{dp}",
        rank_port=35123 + 2 * dp + tp,
        block_sizes={"full": 32},
        kv_cache_dtype="bfloat16",
        max_prefill_tokens=8192,
        incarnation=FIRST,
        layout_digest="digest",
        fingerprint="print",
        transport="shm",
        protocol_min=1,
        protocol_max=1,
    )
    return msgspec.structs.replace(base, **changes)


def full_table(config: RankTableConfig = CONFIG, now: float = 0.0) -> RankTable:
    table = RankTable(config)
    for dp, tp in itertools.product(range(2), range(2)):
        table.register(registration(dp, tp), now)
    return table


def decoded(table: RankTable, now: float) -> Route:
    encoded = table.route(now)
    assert encoded is not None
    return msgspec.json.decode(encoded.body, type=Route)


def test_r25_the_worked_example() -> None:
    """R25: tp 2, cp 1, dp 2, block 32, bfloat16, ports 35123..35126 on p0, p0, p1, p1."""
    table = RankTable(CONFIG)
    assert table.missing(0.0) == KEYS
    for i, (dp, tp) in enumerate(itertools.product(range(2), range(2))):
        assert table.route(0.0) is None, f"ready with {i} of 4 ranks"
        assert table.register(registration(dp, tp), 0.0)
    assert table.missing(0.0) == []
    route = table.route(0.0)
    assert route is not None
    body = msgspec.json.decode(route.body)
    assert body["attn_tp_size"] == 2
    assert body["attn_cp_size"] == 1
    assert body["dp_size"] == 2
    assert body["block_sizes"] == {"full": 32}
    assert body["kv_cache_dtype"] == "bfloat16"
    assert body["max_prefill_tokens"] == 8192
    assert {k: (r["rank_ip"], r["rank_port"]) for k, r in body["ranks"].items()} == {
        "0,0,0": ("p0", 35123),
        "0,0,1": ("p0", 35124),
        "1,0,0": ("p1", 35125),
        "1,0,1": ("p1", 35126),
    }
    assert all(rank["incarnation"] == FIRST for rank in body["ranks"].values())


def test_the_route_is_serialised_once_per_version() -> None:
    table = full_table()
    first = table.route(1.0)
    assert table.route(2.0) is first
    assert not table.register(registration(), 3.0), "a renewal changes no route"
    assert table.route(3.0) is first
    assert table.register(registration(incarnation=SECOND), 4.0)
    second = table.route(4.0)
    assert first is not None
    assert second is not None
    assert second.etag != first.etag
    assert decoded(table, 4.0).epoch > msgspec.json.decode(first.body)["epoch"]


def test_an_etag_of_another_server_life_never_matches() -> None:
    """Two servers at the same epoch with other ranks behind it: the content is in the tag."""
    one, other = full_table(), RankTable(CONFIG)
    for dp, tp in itertools.product(range(2), range(2)):
        other.register(registration(dp, tp, incarnation=SECOND), 0.0)
    a, b = one.route(0.0), other.route(0.0)
    assert a is not None
    assert b is not None
    assert one.epoch == other.epoch
    assert a.etag != b.etag
    assert RankTable(CONFIG, first_epoch=1_000).epoch == 1_000


# --- D31 --------------------------------------------------------------------------------


def check_foreign_ranks_do_not_make_ready(
    register: Callable[[RankRegistration], object], is_ready: Callable[[], bool]
) -> None:
    for i in range(4):
        try:
            register(registration(0, 0, attn_dp_rank=99 + i, incarnation=f"{i}" * 32))
        except (InvalidRequest, RegistrationConflict):
            continue
    assert not is_ready(), "ready without a single rank of its own topology"


class SeedTable:
    """The seed's rule: count what registers."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[int, int, int], RankRegistration] = {}

    def register(self, r: RankRegistration) -> None:
        self.ranks[r.attn_dp_rank, r.attn_cp_rank, r.attn_tp_rank] = r

    def is_ready(self) -> bool:
        return len(self.ranks) >= 4


def test_d31_ready_means_exactly_the_expected_ranks() -> None:
    """D31: four registrations with dp 99..102 made the seed's route 200."""
    table = RankTable(CONFIG)
    check_foreign_ranks_do_not_make_ready(
        lambda r: table.register(r, 0.0), lambda: not table.missing(0.0)
    )
    seed = SeedTable()
    with pytest.raises(AssertionError, match="ready without"):
        check_foreign_ranks_do_not_make_ready(seed.register, seed.is_ready)


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"attn_dp_rank": 2}, "attn_dp_rank", "must be 0..1, got 2"),
        ({"attn_tp_rank": 99}, "attn_tp_rank", "must be 0..1, got 99"),
        ({"attn_cp_rank": 1}, "attn_cp_rank", "must be 0..0, got 1"),
        ({"protocol_min": 2}, "protocol_min", "2 is above protocol_max 1"),
        ({"rank_ip": "0.0.0.0"}, "rank_ip", "nobody can connect to"),
        ({"rank_ip": "[::]"}, "rank_ip", "nobody can connect to"),
        ({"rank_ip": ""}, "rank_ip", "nobody can connect to"),
    ],
)
def test_d31_out_of_range_is_an_invalid_request(
    changes: dict[str, object], field: str, text: str
) -> None:
    table = RankTable(CONFIG)
    with pytest.raises(InvalidRequest) as caught:
        table.register(registration(**changes), 0.0)
    assert caught.value.field == field
    assert text in str(caught.value)
    assert table.missing(0.0) == KEYS


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attn_tp_size": 4}, "attn_tp_size"),
        ({"attn_cp_size": 2}, "attn_cp_size"),
        ({"attn_dp_size": 1}, "attn_dp_size"),
    ],
)
def test_d31_sizes_that_contradict_the_configuration(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(RegistrationConflict, match="this instance is configured with") as caught:
        RankTable(CONFIG).register(registration(**changes), 0.0)
    assert caught.value.field == field


OTHER_VALUES: dict[str, object] = {
    "block_sizes": {"full": 64},
    "kv_cache_dtype": "int8",
    "max_prefill_tokens": 4096,
    "layout_digest": "other",
    "fingerprint": "other",
    "transport": "tcp",
    "protocol_min": 2,
    "protocol_max": 2,
    "all_cp_ranks": True,
}


def test_r4_pipeline_stages_register_with_their_stage() -> None:
    """R4: keys dp,cp,tp,pp; a stage that does not exist, or another number of them, is
    refused by name."""
    table = RankTable(RankTableConfig("p0:8001", ParallelLayout(8, tp_size=2, pp_size=2)))
    with pytest.raises(RegistrationConflict) as conflict:
        table.register(registration(), 0.0)
    assert conflict.value.field == "pp_size"
    with pytest.raises(InvalidRequest) as invalid:
        table.register(registration(pp_size=2, pp_rank=2), 0.0)
    assert invalid.value.field == "pp_rank"
    for dp, tp, pp in itertools.product(range(2), range(2), range(2)):
        assert table.missing(0.0)
        table.register(registration(dp, tp, pp_size=2, pp_rank=pp), 0.0)
    route = decoded(table, 0.0)
    assert (route.pp_size, route.all_cp_ranks) == (2, False)
    assert set(route.ranks) == set(table.config.layout.expected_route_keys())
    assert "1,0,1,1" in route.ranks


@pytest.mark.parametrize("field", SHARED_FIELDS)
def test_d31_ranks_of_an_instance_must_agree(field: str) -> None:
    """D31, D35: not "the last writer wins" for block sizes, dtype, cap and the rest."""
    table = RankTable(CONFIG)
    changes = {"protocol_max": 2} | {field: OTHER_VALUES[field]}
    base = {"protocol_max": 1 if field == "protocol_max" else 2}
    table.register(registration(0, 0, **base), 0.0)
    with pytest.raises(RegistrationConflict, match=r"rank 0,0,1 says .* rank 0,0,0 has") as caught:
        table.register(registration(0, 1, **changes), 0.0)
    assert caught.value.field == field
    table.register(registration(0, 1, **base), 0.0)
    assert table.missing(0.0) == ["1,0,0", "1,0,1"]


@pytest.mark.parametrize("field", SHARED_FIELDS)
def test_d31_ranks_must_agree_with_the_configuration(field: str) -> None:
    values = {name: getattr(registration(), name) for name in SHARED_FIELDS}
    config = RankTableConfig("p0:8001", LAYOUT, values | {field: OTHER_VALUES[field]})
    with pytest.raises(RegistrationConflict, match="the configuration has") as caught:
        RankTable(config).register(registration(), 0.0)
    assert caught.value.field == field


def test_a_new_deployment_replaces_a_silent_one() -> None:
    """All processes died without a goodbye and come back with another model."""
    table = full_table()
    changes = {"fingerprint": "other", "incarnation": SECOND}
    with pytest.raises(RegistrationConflict):
        table.register(registration(0, 0, **changes), 14.9)
    table.register(registration(0, 0, **changes), 15.0)
    assert table.missing(15.0) == KEYS[1:]
    with pytest.raises(RegistrationConflict, match="rank 0,0,0 has 'other'"):
        table.register(registration(0, 1), 15.0)


def test_a_refused_registration_changes_nothing() -> None:
    table = full_table()
    table.register(registration(0, 0), 14.0)
    before = table.snapshot(15.0)
    assert before == {"0,0,0": "Registered"} | dict.fromkeys(KEYS[1:], "Stale")
    with pytest.raises(RegistrationConflict):
        table.register(registration(0, 1, kv_cache_dtype="int8"), 15.0)
    assert table.snapshot(15.0) == before


# --- D32 --------------------------------------------------------------------------------


def check_a_dead_rank_makes_not_ready(is_ready_at: Callable[[float], bool]) -> None:
    assert is_ready_at(1.0)
    assert not is_ready_at(1_000.0), "still ready 1,000 s after the last sign of life"


def test_d32_a_rank_that_falls_silent_is_stale() -> None:
    """D32: in the seed a dead rank stays for ever and ready never becomes false."""
    table = full_table()
    check_a_dead_rank_makes_not_ready(lambda now: not table.missing(now))
    seed = SeedTable()
    for dp, tp in itertools.product(range(2), range(2)):
        seed.register(registration(dp, tp))
    with pytest.raises(AssertionError, match="still ready"):
        check_a_dead_rank_makes_not_ready(lambda now: seed.is_ready())


def test_a_lease_is_renewed_by_registering_again() -> None:
    table = full_table()
    for now in range(0, 100, 10):
        for dp, tp in itertools.product(range(2), range(2)):
            table.register(registration(dp, tp), float(now))
    assert table.missing(100.0) == []
    table.register(registration(1, 1), 104.0)
    assert table.missing(105.0) == KEYS[:3]
    assert table.route(105.0) is None
    text = table.why_not_ready(105.0)
    assert text.startswith("3 of 4 ranks (dp,cp,tp) are missing: 0,0,0 (silent for 15 s)")
    for dp, tp in ((0, 0), (0, 1), (1, 0)):
        assert table.register(registration(dp, tp), 106.0), "back in the route: a new version"
    assert table.missing(106.0) == []


def test_stale_ranks_are_forgotten_in_the_end() -> None:
    table = full_table()
    assert set(table.snapshot(114.0).values()) == {"Stale"}
    assert set(table.snapshot(115.0).values()) == {"Absent"}
    assert "0,0,0 (not registered)" in table.why_not_ready(115.0)


def check_the_latest_life_wins(
    register: Callable[[RankRegistration], object], current: Callable[[], str]
) -> None:
    register(registration(incarnation=FIRST))
    register(registration(incarnation=SECOND))
    with contextlib.suppress(RegistrationConflict):
        register(registration(incarnation=FIRST))  # a packet delayed by a restart
    assert current() == SECOND, "a late packet brought a dead process back"


def test_d32_a_restarted_rank_replaces_and_the_former_never_comes_back() -> None:
    table = full_table()

    def current() -> str:
        return decoded(table, 0.0).ranks["0,0,0"].incarnation

    check_the_latest_life_wins(lambda r: table.register(r, 0.0), current)
    with pytest.raises(RegistrationConflict, match="a later process has registered as rank 0,0,0"):
        table.register(registration(incarnation=FIRST), 0.0)
    seed = SeedTable()
    with pytest.raises(AssertionError, match="dead process"):
        check_the_latest_life_wins(seed.register, lambda: seed.ranks[0, 0, 0].incarnation)


def test_a_goodbye_counts_for_its_own_life_only() -> None:
    table = full_table()
    assert not table.deregister("0,0,0", SECOND, 1.0)
    assert table.missing(1.0) == []
    assert table.deregister("0,0,0", FIRST, 1.0)
    assert table.missing(1.0) == ["0,0,0"]
    assert not table.deregister("0,0,0", FIRST, 1.0), "idempotent"
    with pytest.raises(InvalidRequest, match="rank: 9,9,9 is not one of 0,0,0"):
        table.deregister("9,9,9", FIRST, 1.0)


def check_a_dead_rank_is_not_served(table: RankTable) -> None:
    """Its leader saw the process end; nothing waits for a lease."""
    epoch = table.epoch
    table.lose("0,0,1", 1.0)
    assert table.missing(1.0) == ["0,0,1"]
    assert table.route(1.0) is None
    assert table.epoch > epoch


def test_d48_a_rank_whose_process_died_leaves_the_route_at_once() -> None:
    """D48, D32: the others stay, a late registration of the dead life does not bring it back,
    and its successor has a route with another epoch."""
    table = full_table()
    before = decoded(table, 0.5)
    check_a_dead_rank_is_not_served(table)
    assert not table.lose("0,0,1", 1.0), "told twice"
    with pytest.raises(RegistrationConflict):
        table.register(registration(0, 1), 1.1)
    assert table.register(registration(0, 1, incarnation=SECOND), 2.0)
    after = decoded(table, 2.0)
    assert after.epoch > before.epoch
    assert [key for key in KEYS if after.ranks[key] != before.ranks[key]] == ["0,0,1"]
    with pytest.raises(InvalidRequest, match="9,9,9"):
        table.lose("9,9,9", 1.0)


def test_d48_a_table_that_waits_for_the_lease_is_caught() -> None:
    class Mutant(RankTable):
        def lose(self, key: str, now: float) -> bool:
            return False

    table = Mutant(CONFIG)
    for dp, tp in itertools.product(range(2), range(2)):
        table.register(registration(dp, tp), 0.0)
    with pytest.raises(AssertionError):
        check_a_dead_rank_is_not_served(table)


def test_a_moved_endpoint_of_the_same_life_is_a_new_version() -> None:
    """R24: re-registration of the same key replaces the endpoint."""
    table = full_table()
    epoch = table.epoch
    assert table.register(registration(rank_port=40_000), 1.0)
    assert table.epoch == epoch + 1
    assert decoded(table, 1.0).ranks["0,0,0"].rank_port == 40_000


# --- rooms ------------------------------------------------------------------------------


def test_r27_the_worked_example() -> None:
    """R27: rooms 99 and 100 with 99 -> 3 gives {"99": 3, "100": -1}."""
    layout = ParallelLayout(world_size=4)
    rooms = RankTable(RankTableConfig("p0:8001", layout)).rooms
    rooms.register(99, 3, 0.0)
    assert rooms.query([99, 100], 0.0) == {"99": 3, "100": -1}


def check_rooms_are_forgotten(
    register: Callable[[int, float], object], size: Callable[[], int]
) -> None:
    for i in range(1_000):
        register(i + 1, float(i))
    assert size() <= 100, f"{size()} rooms kept"


def test_d22_rooms_expire_and_are_bounded() -> None:
    """D22: room_to_dp_rank was never cleaned."""
    rooms = RankTable(CONFIG).rooms
    check_rooms_are_forgotten(lambda room, now: rooms.register(room, 0, now), lambda: len(rooms))
    assert rooms.query([1, 1000], 999.0) == {"1": -1, "1000": 0}
    assert rooms.query([1000], 2_000.0) == {"1000": -1}
    assert len(rooms) == 0
    seed: dict[int, int] = {}
    with pytest.raises(AssertionError, match="1000 rooms kept"):
        check_rooms_are_forgotten(lambda room, now: seed.update({room: 0}), lambda: len(seed))


def test_past_the_bound_the_oldest_room_goes() -> None:
    rooms = RankTable(RankTableConfig("p0:8001", LAYOUT, max_rooms=3)).rooms
    for room in (1, 2, 3):
        rooms.register(room, 0, 0.0)
    rooms.register(1, 1, 0.0)  # newer now
    rooms.register(4, 0, 0.0)
    assert rooms.query([1, 2, 3, 4], 0.0) == {"1": 1, "2": -1, "3": 0, "4": 0}


@pytest.mark.parametrize(("room", "dp"), [(0, 0), (-1, 0), (MAX_ID + 1, 0), (1, 2), (1, -1)])
def test_rooms_out_of_range_are_refused(room: int, dp: int) -> None:
    with pytest.raises(InvalidRequest):
        RankTable(CONFIG).rooms.register(room, dp, 0.0)


def test_queries_are_bounded() -> None:
    rooms = RankTable(RankTableConfig("p0:8001", LAYOUT, max_rooms_per_query=2)).rooms
    with pytest.raises(InvalidRequest, match="bootstrap_rooms: at most 2 at once, got 3"):
        rooms.query([1, 2, 3], 0.0)
    with pytest.raises(InvalidRequest, match="a room is between"):
        rooms.query([0], 0.0)


# --- configuration, and the whole under random events -----------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RankTableConfig("x", LAYOUT, {"colour": 1}), "expected: ['colour'] are not among"),
        (lambda: RankTableConfig("x", LAYOUT, lease_s=0), "lease_s must be > 0, got 0"),
        (lambda: RankTableConfig("x", LAYOUT, max_rooms=0), "max_rooms must be > 0, got 0"),
    ],
)
def test_a_wrong_configuration_says_so(make: Callable[[], RankTableConfig], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)


events = st.tuples(
    st.sampled_from(["register", "goodbye", "wait"]),
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from([FIRST, SECOND, THIRD]),
    st.sampled_from(["print", "other"]),
    st.floats(0, 40),
)


@given(st.lists(events, max_size=40))
def test_whatever_comes_the_route_is_consistent(
    steps: list[tuple[str, int, int, str, str, float]],
) -> None:
    """Ready means all expected keys, one set of shared values, leases younger than lease_s;
    the epoch never goes back, and the route changes only with it."""
    table = RankTable(CONFIG)
    now, seen, renewed = 0.0, {}, {}
    last_epoch = 0
    for what, dp, tp, life, fingerprint, delay_s in steps:
        key = f"{dp},0,{tp}"
        if what == "wait":
            now += delay_s
        elif what == "goodbye":
            table.deregister(key, life, now)
        else:
            try:
                table.register(registration(dp, tp, incarnation=life, fingerprint=fingerprint), now)
                renewed[key] = now
            except RegistrationConflict:
                pass
        encoded = table.route(now)
        assert (encoded is None) == bool(table.missing(now))
        assert table.epoch >= last_epoch
        last_epoch = table.epoch
        if encoded is not None:
            assert seen.setdefault(table.epoch, encoded.body) == encoded.body
            route = msgspec.json.decode(encoded.body, type=Route)
            assert sorted(route.ranks) == KEYS
            assert all(now - renewed[k] < CONFIG.lease_s for k in KEYS)


def test_its_repr_reads_well() -> None:
    assert repr(full_table()) == "RankTable(4/4 registered, epoch=4)"
