"""Which heads a rank holds, and who may write them: R80, D30, D36."""

from __future__ import annotations

import attrs
import pytest

from pdcore.errors import IncompatibleError
from pdcore.kv.slices import check_kept_per_rank, check_reshard, is_even, slice_token
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec

ENTRY = KVCacheEntry("k.0", "full", "bfloat16", 16, 6, 6, 64)


def test_heads_are_even_when_one_size_is_a_multiple_of_the_other() -> None:
    """D30: 6 heads on 1, 2, 3, 6, 12 ranks; never on 4 or 9."""
    assert [n for n in range(1, 13) if is_even(6, n)] == [1, 2, 3, 6, 12]


@pytest.mark.parametrize(("prefill", "decode"), [(4, 2), (2, 4), (9, 3), (1, 4)])
def test_heads_that_do_not_divide_are_refused_with_both_sizes(prefill: int, decode: int) -> None:
    """D30: at topology load, from the entries alone."""
    with pytest.raises(
        IncompatibleError,
        match=f"k.0: prefill has tp_size {prefill}, decode has {decode}; its 6 heads",
    ):
        check_reshard(KVCacheSpec((ENTRY,)), prefill, decode)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (6, 3), (12, 6), (3, 6), (12, 1)])
def test_heads_that_divide_are_accepted(prefill: int, decode: int) -> None:
    check_reshard(KVCacheSpec((ENTRY,)), prefill, decode)


def test_rows_that_every_rank_has_whole_fit_any_size() -> None:
    """MLA has one head and any number of ranks."""
    entry = attrs.evolve(ENTRY, num_heads=1, total_num_heads=1, is_mla=True)
    check_reshard(KVCacheSpec((entry,)), 16, 3)


def test_what_is_kept_once_per_rank_fits_equal_sizes_only() -> None:
    """D36: one scale per token and rank is no other rank's scale."""
    entry = attrs.evolve(ENTRY, name="k.scale", num_heads=1, is_per_rank=True, head_dim=1)
    check_reshard(KVCacheSpec((entry,)), 4, 4)
    check_kept_per_rank(entry, 2, 2)
    with pytest.raises(IncompatibleError, match=r"k\.scale: prefill has tp_size 4, decode has 2"):
        check_reshard(KVCacheSpec((entry,)), 4, 2)


def test_rows_that_do_not_divide_are_refused() -> None:
    """R80: 768 bytes into 512, or fewer bytes on fewer ranks."""
    for src, dst, prefill, decode in ((768, 512, 2, 4), (256, 512, 1, 2), (512, 256, 2, 1)):
        with pytest.raises(IncompatibleError, match=f"prefill has {src} at tp {prefill}"):
            slice_token(src, dst, prefill, decode, 0, 0)
