"""What a core says of itself, and what it believes of a decode rank's endpoint."""

from __future__ import annotations

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.control.codec import PROTOCOL_MAX, PROTOCOL_MIN, decode_endpoint, encode_endpoint
from pdcore.errors import CodecError, IncompatibleError
from pdcore.kv.spec import KVCacheSpec
from pdcore.scheduler.setup import CoreSetup, read_endpoint
from pdcore.topology import ParallelLayout, check_compatible
from tests.unit.scheduler.kit import PREFILL, make_setup, make_spec


def changed(setup: CoreSetup, **changes: object) -> bytes:
    endpoint = decode_endpoint(setup.endpoint())
    return encode_endpoint(msgspec.structs.replace(endpoint, **changes))


def test_an_endpoint_comes_back_as_it_was() -> None:
    decode = make_setup()
    destination = read_endpoint(make_setup(PREFILL, num_blocks=8), decode.endpoint())
    assert destination.spec == decode.spec
    assert destination.placement == decode.placement
    assert destination.transport_descriptor == b"here"


def test_entries_are_matched_by_name_in_the_order_of_decode() -> None:
    """D35: never by list position."""
    decode = make_setup()
    data = changed(decode, entry_names=("layer0.v", "layer0.k"))
    destination = read_endpoint(make_setup(PREFILL), data)
    assert [e.name for e in destination.spec.entries] == ["layer0.v", "layer0.k"]
    assert destination.placement.offsets == decode.placement.offsets


def test_the_heads_of_a_rank_of_a_larger_group_are_its_share() -> None:
    prefill = make_setup(PREFILL, spec=make_spec(total_num_heads=8, num_heads=8))
    for tp_size, heads in ((1, 8), (2, 4), (8, 1), (16, 1)):
        data = changed(prefill, tp_size=tp_size, tp_rank=tp_size - 1)
        spec = read_endpoint(prefill, data).spec
        assert {e.num_heads for e in spec.entries} == {heads}
        assert (spec.tp_size, spec.tp_rank) == (tp_size, tp_size - 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"transport": "other"}, "transport: prefill has loopback, decode has other"),
        ({"layout_digest": "other"}, "layout_digest"),
        ({"fingerprint": "llama"}, "fingerprint: prefill has model, decode has llama"),
        ({"entry_names": ("layer0.k", "layer9.v")}, "entry names"),
        (
            {"entry_names": ("layer0.k",), "regions": (1,), "offsets": (0,), "block_strides": (1,)},
            "entry names",
        ),
    ],
)
def test_d14_what_does_not_fit_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    """D14: both values are in the message."""
    setup = make_setup(PREFILL)
    with pytest.raises(IncompatibleError, match=named):
        read_endpoint(setup, changed(setup, **changes))


@pytest.mark.parametrize(
    "changes", [{"regions": (1,)}, {"entry_names": ("layer0.k", "layer0.k")}, {"tp_rank": 1}]
)
def test_an_impossible_table_is_refused_with_the_bytes(changes: dict[str, object]) -> None:
    setup = make_setup(PREFILL)
    with pytest.raises(CodecError):
        read_endpoint(setup, changed(setup, **changes))


@given(st.binary(max_size=200), st.integers(0, 400))
def test_d58_garbage_is_refused_and_nothing_else(noise: bytes, cut: int) -> None:
    """D58: whatever a peer sends gives one of the two errors, or a destination whose table is
    whole."""
    setup = make_setup(PREFILL)
    good = setup.endpoint()
    for data in (noise, good[:cut], good[:cut] + noise, noise + good):
        if data == good:
            continue
        try:
            destination = read_endpoint(setup, data)
        except (CodecError, IncompatibleError):
            continue
        assert len(destination.placement.offsets) == len(destination.spec.entries) == 2


def test_a_profile_says_what_pairing_compares() -> None:
    setup = make_setup(layout=ParallelLayout(2, tp_size=2))
    profile = setup.profile()
    assert (profile.tp_size, profile.cp_size, profile.dp_size, profile.pp_size) == (2, 1, 1, 1)
    assert (profile.protocol_min, profile.protocol_max) == (PROTOCOL_MIN, PROTOCOL_MAX)
    check_compatible(profile, make_setup(PREFILL).profile())
    other = attrs.evolve(make_setup(PREFILL), fingerprint="other")
    with pytest.raises(IncompatibleError, match="fingerprint"):
        check_compatible(profile, other.profile())


def test_d35_the_cache_dtype_is_that_of_the_entries() -> None:
    """D35: a quantised cache is told apart from a bfloat16 one of the same model."""
    key, value = make_spec().entries
    spec = KVCacheSpec((attrs.evolve(key, dtype="int8"), value))
    assert make_setup(spec=spec).kv_cache_dtype == "int8,uint8"


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        ("none", "none", ""),
        ("none", "crc32", ""),
        ("crc32", "crc32", ""),
        ("crc32", "none", "integrity: prefill has crc32, decode has none; set both alike"),
        ("none", "md5", "integrity: decode asks for md5, prefill has only crc32; upgrade prefill"),
    ],
)
def test_checksums_are_what_decode_asks_for(prefill: str, decode: str, named: str) -> None:
    """Issue 4.7: prefill answers; where it is configured itself, it insists."""
    setup = make_setup(PREFILL, integrity=prefill)
    data = make_setup(integrity=decode).endpoint()
    if named:
        with pytest.raises(IncompatibleError, match=named):
            read_endpoint(setup, data)
    else:
        assert read_endpoint(setup, data).is_summed == (decode == "crc32")


def test_prefill_that_cannot_read_its_kv_says_so() -> None:
    setup = make_setup(PREFILL, is_host_memory=False)
    assert not read_endpoint(setup, make_setup().endpoint()).is_summed
    with pytest.raises(IncompatibleError, match="prefill's KV is in device memory"):
        read_endpoint(setup, make_setup(integrity="crc32").endpoint())
