"""Ranks, nodes, compatibility and target rank mapping: R2-R6, R57-R60, D14, D21, D30, D35."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import ConfigError, IncompatibleError, InvalidRequest
from pdcore.topology import (
    InstanceProfile,
    ParallelLayout,
    RankCoordinates,
    TargetRankMapping,
    check_compatible,
    check_divisible,
    check_shapes,
    choose_dp_rank,
    leader_addresses,
    map_target_ranks,
    parse_route_key,
    place_node,
    stage_layers,
)

# --- nodes ------------------------------------------------------------------------------------


def test_the_example_of_the_seed() -> None:
    """R5: prefill W=32 on four nodes of 16, decode W=16 on two."""
    prefill, decode = ["p0", "p1", "p2", "p3"], ["d0", "d1"]
    assert leader_addresses(32, 16, prefill) == ["p0", "p2"]
    assert leader_addresses(16, 16, decode) == ["d0", "d1"]
    nodes = [place_node(32, 16, i, prefill) for i in range(4)]
    assert [n.rank_offset for n in nodes] == [0, 16, 0, 16]
    assert [n.is_leader for n in nodes] == [True, False, True, False]
    assert [n.leader_address for n in nodes] == ["p0", "p0", "p2", "p2"]
    assert [n.instance for n in nodes] == [0, 0, 1, 1]
    assert [n.rank_in_instance for n in nodes] == [0, 1, 0, 1]
    assert all(n.local_world_size == 16 for n in nodes)
    assert [place_node(16, 16, i, decode).rank_offset for i in range(2)] == [0, 0]


def test_more_vectors() -> None:
    """R6."""
    with pytest.raises(ConfigError, match="24 is not a multiple of devices_per_node 16"):
        place_node(24, 16, 0, ["a", "b"])
    four = ["a", "b", "c", "d"]
    assert leader_addresses(8, 8, four) == four
    assert place_node(8, 8, 3, four).instance == 3
    eight = [f"n{i}" for i in range(8)]
    assert leader_addresses(64, 16, eight) == ["n0", "n4"]
    assert ParallelLayout(8, tp_size=2, cp_size=2).dp_size == 2


def test_a_node_may_have_more_devices_than_the_instance_has_ranks() -> None:
    """R3: W < G."""
    node = place_node(4, 8, 1, ["a", "b"])
    assert (node.instance, node.local_world_size, node.is_leader) == (1, 4, True)


@pytest.mark.parametrize(
    ("world", "devices", "index", "message"),
    [
        (8, 8, 2, "node_index 2 is outside the list of 2"),
        (8, 8, -1, "node_index -1 is outside"),
        (0, 8, 0, "must be >= 1"),
        (8, 0, 0, "must be >= 1"),
        (24, 8, 0, "needs 3 nodes, but ips has only 2"),
    ],
)
def test_impossible_places_are_refused(world: int, devices: int, index: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_node(world, devices, index, ["a", "b"])


# --- ranks ------------------------------------------------------------------------------------


def test_rank_arithmetic() -> None:
    """R4: dp, cp, tp from the global rank."""
    layout = ParallelLayout(8, tp_size=2, cp_size=2)
    assert [layout.coordinates(g)[:3] for g in range(8)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1),
        (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert [g for g in range(8) if layout.is_dp_leader(g)] == [0, 4]
    assert list(layout.group_ranks(6)) == [4, 5, 6, 7]
    assert layout.route_key(layout.coordinates(5)) == "1,0,1"


def test_pipeline_stages_come_first_and_show_in_the_route_key() -> None:
    """R4: rank = pp * (dp * cp * tp) + the rest; key dp,cp,tp,pp."""
    layout = ParallelLayout(8, tp_size=2, pp_size=2)
    assert layout.coordinates(5) == RankCoordinates(dp=0, cp=0, tp=1, pp=1)
    assert layout.route_key(layout.coordinates(5)) == "0,0,1,1"
    assert parse_route_key("0,0,1,1") == layout.coordinates(5)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_coordinates_and_keys_are_one_to_one(tp: int, cp: int, dp: int, pp: int) -> None:
    """R6: exactly tp * cp * dp * pp = W keys make an instance ready."""
    layout = ParallelLayout(tp * cp * dp * pp, tp, cp, pp)
    assert layout.dp_size == dp
    assert len(layout.expected_route_keys()) == layout.world_size
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert layout.rank(at) == rank
        assert rank in layout.group_ranks(rank)
        parsed = parse_route_key(layout.route_key(at))
        assert parsed == at


def test_sizes_that_do_not_divide_are_refused() -> None:
    for sizes in ((8, 3, 1, 1), (8, 0, 1, 1), (0, 1, 1, 1), (8, 2, 2, 4)):
        with pytest.raises(ConfigError, match="positive multiple"):
            ParallelLayout(*sizes)
    with pytest.raises(ConfigError, match="rank 8 is outside"):
        ParallelLayout(8).coordinates(8)


@pytest.mark.parametrize("key", ["", "1,2", "a,b,c", "1,2,3,4,5", "-1,0,0", "1, 2,3", "1,,3"])
def test_other_route_keys_are_value_errors(key: str) -> None:
    with pytest.raises(ValueError, match="route key"):
        parse_route_key(key)


def test_layers_of_stages_are_even_and_the_first_take_the_rest() -> None:
    """R4."""
    assert [len(stage_layers(61, 4, s)) for s in range(4)] == [16, 15, 15, 15]
    covered = [layer for s in range(4) for layer in stage_layers(61, 4, s)]
    assert covered == list(range(61))
    for stage, layers in ((4, 61), (-1, 61), (0, 3)):
        with pytest.raises(ConfigError, match="cannot hold"):
            stage_layers(layers, 4, stage)


# --- compatibility ----------------------------------------------------------------------------

BASE = InstanceProfile(
    tp_size=2,
    block_sizes={"full": 16},
    kv_cache_dtype="bfloat16",
    max_prefill_tokens=8192,
    layout_digest="aaaa",
    fingerprint="ffff",
    transport="shm",
)


def test_equal_instances_are_compatible() -> None:
    check_compatible(BASE, BASE)


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("decode", {"block_sizes": {"win": 16}}, r"prefill has \{'full': 16\}, decode has"),
        ("decode", {"kv_cache_dtype": "int8"}, "prefill has bfloat16, decode has int8"),
        ("decode", {"layout_digest": "bbbb"}, "prefill has aaaa, decode has bbbb"),
        ("decode", {"fingerprint": "eeee"}, "prefill has ffff, decode has eeee"),
        ("decode", {"transport": "loopback"}, "prefill has shm, decode has loopback"),
        ("decode", {"max_prefill_tokens": 4096}, "prefill has 8192, decode has 4096"),
        ("decode", {"cp_size": 2}, "decode must have 1"),
        ("prefill", {"tp_size": 3}, "prefill has 3, decode has 2; one must be a multiple"),
        ("prefill", {"tp_size": 0}, "prefill has 0, decode has 2; must be >= 1"),
        ("prefill", {"cp_size": 0}, "must be >= 1"),
        ("prefill", {"protocol_min": 2, "protocol_max": 3}, r"2\.\.3, decode has 1\.\.1"),
    ],
)
def test_what_differs_is_named_with_both_values(
    side: str, change: dict[str, object], message: str
) -> None:
    """R57, D14, D35: a mismatch is one typed error that fails one prefill's requests."""
    other = attrs.evolve(BASE, **change)
    decode, prefill = (other, BASE) if side == "decode" else (BASE, other)
    with pytest.raises(IncompatibleError, match=message):
        check_compatible(decode, prefill)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": ""},
        {"layout_digest": ""},
        {"transport": ""},
        {"max_prefill_tokens": 0},
        {"max_prefill_tokens": 4096},
        {"cp_size": 4},
        {"block_sizes": {"full": 32}},
        {"tp_size": 8},
        {"protocol_max": 5},
    ],
)
def test_what_a_prefill_may_leave_out_or_have_different(change: dict[str, object]) -> None:
    """R57: 0 or empty means the peer predates the field; a smaller prefill cap is fine."""
    check_compatible(BASE, attrs.evolve(BASE, **change))


# --- target rank mapping ----------------------------------------------------------------------


def mapping(decode_tp: int, prefill_tp: int, tp: int, *, is_mla: bool = False) -> TargetRankMapping:
    return map_target_ranks(
        InstanceProfile(tp_size=decode_tp),
        InstanceProfile(tp_size=prefill_tp),
        RankCoordinates(0, 0, tp),
        is_mla=is_mla,
    )


def test_the_mapping_vectors() -> None:
    """R59."""
    wide = [mapping(4, 2, t) for t in range(4)]
    assert [m.target_tp_ranks for m in wide] == [(0,), (0,), (1,), (1,)]
    assert {(m.required_dst_info_num, m.required_prefill_response_num) for m in wide} == {(2, 1)}
    narrow = [mapping(2, 4, t) for t in range(2)]
    assert [m.target_tp_ranks for m in narrow] == [(0, 1), (2, 3)]
    assert {(m.required_dst_info_num, m.required_prefill_response_num) for m in narrow} == {(1, 2)}
    assert mapping(2, 4, 1, is_mla=True).required_prefill_response_num == 1
    one = mapping(1, 16, 0)
    assert one.target_tp_ranks == tuple(range(16))
    assert one.required_prefill_response_num == 16
    assert mapping(1, 16, 0, is_mla=True).required_prefill_response_num == 1
    many = [mapping(16, 1, t) for t in range(16)]
    assert {m.target_tp_ranks for m in many} == {(0,)}
    assert {m.required_dst_info_num for m in many} == {16}
    equal = mapping(4, 4, 3)
    assert (equal.target_tp_ranks, equal.required_dst_info_num) == ((3,), 1)


def test_mla_has_one_real_target_and_dummies() -> None:
    """R58, R45."""
    targets = mapping(2, 4, 1, is_mla=True).targets(dp_rank=3)
    assert targets == [
        (RankCoordinates(3, 0, 2, 0), False),
        (RankCoordinates(3, 0, 3, 0), True),
    ]
    assert mapping(4, 2, 0, is_mla=True).dummy_tp_ranks == ()


class SeedMapping:
    """The seed floors what does not divide (D30)."""

    def __call__(self, decode_tp: int, prefill_tp: int, tp: int) -> tuple[int, ...]:
        if decode_tp >= prefill_tp:
            return (tp // (decode_tp // prefill_tp),)
        span = prefill_tp // decode_tp
        return tuple(range(tp * span, tp * span + span))


def check_mapping_is_a_cover(targets: Callable[[int, int, int], tuple[int, ...]]) -> None:
    """Every named rank exists and every prefill rank is named, or the pair is refused."""
    for decode_tp in range(1, 9):
        for prefill_tp in range(1, 9):
            try:
                named = [r for t in range(decode_tp) for r in targets(decode_tp, prefill_tp, t)]
            except IncompatibleError:
                assert decode_tp % prefill_tp
                assert prefill_tp % decode_tp
                continue
            assert set(named) == set(range(prefill_tp)), (
                f"D{decode_tp}/P{prefill_tp} names ranks {sorted(set(named))}"
            )


def test_pairs_that_do_not_divide_are_refused_not_floored() -> None:
    """D30: D3/P2, D2/P3, D6/P4; the seed maps them to ranks that do not exist."""
    for decode_tp, prefill_tp in ((3, 2), (2, 3), (6, 4)):
        with pytest.raises(IncompatibleError, match=f"prefill has {prefill_tp}"):
            mapping(decode_tp, prefill_tp, 0)
    check_mapping_is_a_cover(lambda d, p, t: mapping(d, p, t).target_tp_ranks)
    with pytest.raises(AssertionError, match="names ranks"):
        check_mapping_is_a_cover(SeedMapping())
    check_divisible("tp_size", 4, 2)
    with pytest.raises(IncompatibleError):
        check_divisible("tp_size", 0, 2)


@given(st.sampled_from([(d, p) for d in (1, 2, 4, 8) for p in (1, 2, 4, 8)]), st.booleans())
def test_both_sides_count_the_same_legs(pair: tuple[int, int], is_mla: bool) -> None:
    """A prefill rank waits for as many handshakes as decode ranks name it."""
    decode_tp, prefill_tp = pair
    maps = [mapping(decode_tp, prefill_tp, t, is_mla=is_mla) for t in range(decode_tp)]
    for p in range(prefill_tp):
        naming = [m for m in maps if p in m.target_tp_ranks]
        assert {m.required_dst_info_num for m in naming} == {len(naming)}
    for m in maps:
        real = [c for c, is_dummy in m.targets(0) if not is_dummy]
        assert len(real) == m.required_prefill_response_num


def test_context_parallel_prefill() -> None:
    """R58: cp 0 only, or every cp rank with the responses multiplied."""
    decode, prefill = InstanceProfile(tp_size=1), InstanceProfile(tp_size=2, cp_size=4)
    at = RankCoordinates(0, 0, 0)
    assert map_target_ranks(decode, prefill, at).target_cp_ranks == (0,)
    every = map_target_ranks(decode, prefill, at, all_cp_ranks=True)
    assert every.target_cp_ranks == (0, 1, 2, 3)
    assert every.required_prefill_response_num == 8
    with pytest.raises(IncompatibleError, match="decode must have 1"):
        map_target_ranks(attrs.evolve(decode, cp_size=2), prefill, at)
    with pytest.raises(ConfigError, match="tp rank 1 is outside"):
        map_target_ranks(decode, prefill, RankCoordinates(0, 0, 1))


def test_pipeline_parallel_mapping() -> None:
    """R4: the prefill stages that own any layer this rank holds, times R58."""
    one, two = InstanceProfile(), InstanceProfile(pp_size=2)
    both = map_target_ranks(one, two, RankCoordinates(0, 0, 0), num_layers=5)
    assert both.target_pp_ranks == (0, 1)
    assert both.required_prefill_response_num == 2
    assert both.required_dst_info_num == 1
    second = map_target_ranks(two, one, RankCoordinates(0, 0, 0, 1), num_layers=5)
    assert second.target_pp_ranks == (0,)
    assert second.required_dst_info_num == 2
    with pytest.raises(ConfigError, match="num_layers is needed"):
        map_target_ranks(one, two, RankCoordinates(0, 0, 0))
    three = InstanceProfile(pp_size=3)
    with pytest.raises(IncompatibleError, match="pp_size"):
        map_target_ranks(two, three, RankCoordinates(0, 0, 0, 0), num_layers=6)
    with pytest.raises(ConfigError, match="pp rank 2 is outside"):
        map_target_ranks(two, one, RankCoordinates(0, 0, 0, 2), num_layers=6)


def test_more_ranks_than_there_are_are_refused_before_they_are_counted() -> None:
    """D58: a route may come from an address that a client named. Each axis may be that long,
    but not all of them: sixteen million targets took decode's loop seconds and gigabytes."""
    decode = InstanceProfile()
    with pytest.raises(IncompatibleError, match=r"ranks: prefill has 16777216, .* at most 65536"):
        map_target_ranks(
            decode,
            InstanceProfile(tp_size=4096, cp_size=4096),
            RankCoordinates(0, 0, 0),
            all_cp_ranks=True,
        )
    fits = InstanceProfile(tp_size=4096, cp_size=16)
    mapping = map_target_ranks(decode, fits, RankCoordinates(0, 0, 0), all_cp_ranks=True)
    assert len(mapping.targets(0)) == 65536


def test_stages_that_do_not_end_together_count_for_themselves() -> None:
    """R4: ten layers are 5, 5 on two stages and 3, 3, 2, 2 on four. The second of four
    gets from both, which wait for two and for three handshakes."""
    four, two = InstanceProfile(pp_size=4), InstanceProfile(pp_size=2)
    maps = [
        map_target_ranks(four, two, RankCoordinates(0, 0, 0, s), num_layers=10) for s in range(4)
    ]
    assert [m.target_pp_ranks for m in maps] == [(0,), (0, 1), (1,), (1,)]
    assert [m.dst_info_nums for m in maps] == [(2,), (2, 3), (3,), (3,)]
    assert maps[1].required_prefill_response_num == 2
    assert [maps[1].info_num(at) for at, _ in maps[1].targets(0)] == [2, 3]


@pytest.mark.parametrize(
    ("decode", "prefill", "message"),
    [
        ({"tp_size": 2}, {"tp_size": 3, "dp_size": 2}, "tp_size: prefill has 3, decode has 2"),
        ({"pp_size": 3}, {"pp_size": 2, "cp_size": 4}, "pp_size: prefill has 2, decode has 3"),
        ({"cp_size": 2}, {"cp_size": 2}, "decode must have 1"),
        ({"pp_size": 2}, {"pp_size": 8}, "the model has 7 layers"),
        ({"dp_size": 0}, {}, "dp_size: prefill has 1, decode has 0; must be >= 1"),
    ],
)
def test_shapes_that_do_not_pair_are_refused_with_both_of_them(
    decode: dict[str, int], prefill: dict[str, int], message: str
) -> None:
    """D30: every refusal about sizes says what both sides are, when the topology loads."""
    ours, theirs = InstanceProfile(**decode), InstanceProfile(**prefill)
    with pytest.raises(IncompatibleError, match=message) as caught:
        check_shapes(ours, theirs, num_layers=7)
    assert f"(prefill is {theirs.shape}, decode is {ours.shape})" in str(caught.value)
    assert InstanceProfile(2, 1, 3, 4).shape == "tp 2 x cp 1 x dp 3 x pp 4"


def check_unnamed_ranks_are_the_rooms(choose: Callable[[int, int, int | None], int]) -> None:
    for dp_size in range(1, 9):
        assert [choose(room, dp_size, None) for room in range(1, 30)] == [
            room % dp_size for room in range(1, 30)
        ]


def seeds_choice(room: int, dp_size: int, named: int | None) -> int:
    """Mutant: whoever is told nothing takes the first."""
    return named or 0


def test_dp_rank_choice() -> None:
    """R60, D21: a named rank wins and must exist, also the first; else it is the room's, which
    everybody who knows dp_size can tell without asking."""
    check_unnamed_ranks_are_the_rooms(choose_dp_rank)
    with pytest.raises(AssertionError):
        check_unnamed_ranks_are_the_rooms(seeds_choice)
    assert choose_dp_rank(7, 4, 2) == 2
    assert choose_dp_rank(7, 4, 0) == 0
    assert choose_dp_rank((1 << 63) - 1, 65536, None) == 65535
    for named in (4, -1):
        says = rf"disagg_prefill_dp_rank: {named} is outside 0\.\.3 of the prefill instance; leave"
        with pytest.raises(InvalidRequest, match=says):
            choose_dp_rank(7, 4, named)
