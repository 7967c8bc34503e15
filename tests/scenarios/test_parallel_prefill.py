"""Context parallel ranks and pipeline stages fill decode: both cores, groups that vote, real bytes.

No server starts such instances yet (``cp_size`` and ``pp_size`` other than 1 are refused at the
start), because the engines here compute neither; what is shown is that everything below them is
there, and which arrangements it does not serve.
"""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from pdcore.config import CoreLimits
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.kv.layout import staged
from pdcore.kv.spec import KVCacheSpec
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.prefill import PrefillCore
from pdcore.scheduler.setup import CoreSetup
from pdcore.topology import ParallelLayout
from pdcore.types import CRC32, NO_CHECKSUMS, Role, SamplingParams
from tests.scenarios.grouped import GroupedWorld, MakeSpec, as_computed, make_grouped_world

PROMPT = list(range(10, 47))
ONE, TEN = SamplingParams(max_tokens=1), SamplingParams(max_tokens=10)
CHUNKED = CoreLimits(prefill_chunk_tokens=8)


def serve(world: GroupedWorld, sampling: SamplingParams) -> list[int]:
    """Every group of either instance hears of the request, as from its own leader."""
    to = [name for name, rank in world.ranks.items() if is_first(rank.worker.core.setup)]
    key = world.submit(PROMPT, sampling=sampling, to=to)
    world.run(lambda: world.decode.result(key) is not None)
    result = world.decode.result(key)
    assert result is not None
    assert result.failure is None, result
    world.settle()
    return world.decode.tokens(key)


def is_first(setup: CoreSetup) -> bool:
    """Of its group."""
    return setup.layout.is_dp_leader(setup.me.rank)


def check_bytes(world: GroupedWorld) -> None:
    """Each byte of the prompt's blocks, on every decode rank, was written by one prefill rank,
    once, and is what that rank has; no other byte was written."""
    senders = world.instance(Role.PREFILL)
    for name in world.instance(Role.DECODE):
        rank = world.ranks[name]
        setup = rank.worker.core.setup
        (memory,) = rank.memory.values()
        life = setup.me.incarnation
        times = np.sum([world.transports[s].times_written(life, len(memory)) for s in senders], 0)
        num_blocks = math.ceil(len(PROMPT) / world.model.block_size)
        assert times.max() == 1, "a byte was written twice"
        assert times.sum() == num_blocks * setup.spec.block_bytes["full"]
        for one in senders:
            source = world.ranks[one].memory
            for batch in world.transports[one].written.get(life, ()):
                for local, remote, size in batch.pieces():
                    own = source[batch.local_region][local : local + size]
                    assert own == memory[remote : remote + size], f"{one} to {name}"


def check_filled(
    prefill: ParallelLayout,
    decode: ParallelLayout,
    limits: CoreLimits | None = None,
    *,
    model: SimulatedConfig | None = None,
    make_spec: MakeSpec = as_computed,
    integrity: str = NO_CHECKSUMS,
) -> GroupedWorld:
    """One token, after which nothing has changed at decode, and all bytes are compared; then
    ten, and decode's engine verifies every position that it builds on."""
    world = make_grouped_world(
        prefill, decode, model=model, make_spec=make_spec, limits=limits, integrity=integrity
    )
    assert serve(world, ONE) == simulated_tokens(world.model, PROMPT, 1)
    check_bytes(world)
    assert serve(world, TEN) == simulated_tokens(world.model, PROMPT, 10)
    check_all_free(world)
    return world


def check_all_free(world: GroupedWorld) -> None:
    for rank in world.ranks.values():
        core = rank.worker.core
        assert isinstance(core, PrefillCore | DecodeCore)
        for ledger in core.blocks.audit().values():
            assert ledger.free == ledger.total


def context_parallel(cp: int, tp: int = 1, *, every: bool = True) -> ParallelLayout:
    return ParallelLayout(cp * tp, tp_size=tp, cp_size=cp, all_cp_ranks=every)


@pytest.mark.parametrize("integrity", [NO_CHECKSUMS, CRC32])
@pytest.mark.parametrize("limits", [None, CHUNKED], ids=["whole", "chunks"])
@pytest.mark.parametrize(("cp", "tp", "decode_tp"), [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_all_cp_ranks_send_each_its_share(
    cp: int, tp: int, decode_tp: int, limits: CoreLimits | None, integrity: str
) -> None:
    """R21, R58: the ranks of the group compute the whole prompt, each sends its blocks of it."""
    decode = ParallelLayout(decode_tp, tp_size=decode_tp)
    world = check_filled(context_parallel(cp, tp), decode, limits, integrity=integrity)
    assert all(world.transports[name].written for name in world.instance(Role.PREFILL))


@pytest.mark.parametrize("share", [(0, 1), (0, 2)], ids=["everything", "the first half"])
def test_ranks_that_do_not_share_are_noticed(
    monkeypatch: pytest.MonkeyPatch, share: tuple[int, int]
) -> None:
    """The mutants: every CP rank sends everything, or all of them the same part."""
    monkeypatch.setattr("pdcore.scheduler.posting._share", lambda setup: share)
    with pytest.raises(AssertionError):
        check_filled(context_parallel(2), ParallelLayout(1))


# --- ranks that write nothing ------------------------------------------------------------------


@pytest.mark.parametrize("integrity", [NO_CHECKSUMS, CRC32])
@pytest.mark.parametrize("limits", [None, CHUNKED], ids=["whole", "chunks"])
@pytest.mark.parametrize(("cp", "tp", "decode_tp"), [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_one_cp_rank_sends(
    cp: int, tp: int, decode_tp: int, limits: CoreLimits | None, integrity: str
) -> None:
    """R21, R45, R58: all are asked, because the group votes as one; the first writes."""
    decode = ParallelLayout(decode_tp, tp_size=decode_tp)
    world = check_filled(context_parallel(cp, tp, every=False), decode, limits, integrity=integrity)
    for name in world.instance(Role.PREFILL):
        setup = world.ranks[name].worker.core.setup
        is_first = setup.layout.coordinates(setup.me.rank).cp == 0
        batches = [b for written in world.transports[name].written.values() for b in written]
        assert bool(batches) is is_first


ONE_HEAD = SimulatedConfig(block_size=4, max_model_len=512, verify_all=True, num_kv_heads=1)


def mla(spec: KVCacheSpec, layout: ParallelLayout, rank: int) -> KVCacheSpec:
    return attrs.evolve(spec, entries=tuple(attrs.evolve(e, is_mla=True) for e in spec.entries))


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(1, 2), (2, 2), (2, 4), (2, 1), (4, 2), (4, 1)]
)
def test_mla_of_any_two_sizes(prefill_tp: int, decode_tp: int) -> None:
    """R45, R58: every rank of decode gets the same rows, once; every rank of prefill is asked."""
    prefill = ParallelLayout(prefill_tp, tp_size=prefill_tp)
    decode = ParallelLayout(decode_tp, tp_size=decode_tp)
    check_filled(prefill, decode, model=ONE_HEAD, make_spec=mla)


def test_copies_of_a_head_where_prefill_has_more_ranks() -> None:
    """R80: unlike MLA, every rank is asked; the first that holds a head writes it."""
    check_filled(ParallelLayout(4, tp_size=4), ParallelLayout(1))


# --- stages ------------------------------------------------------------------------------------

FOUR_LAYERS = SimulatedConfig(num_layers=4, block_size=4, max_model_len=512, verify_all=True)


def of_stage(spec: KVCacheSpec, layout: ParallelLayout, rank: int) -> KVCacheSpec:
    if layout.pp_size == 1:
        return spec
    return staged(spec, layout.pp_size, layout.coordinates(rank).pp)


@pytest.mark.parametrize("limits", [None, CHUNKED], ids=["whole", "chunks"])
@pytest.mark.parametrize(("prefill_pp", "decode_pp"), [(2, 1), (4, 1), (2, 2), (1, 2), (4, 2)])
def test_every_stage_fills_the_layers_that_it_shares(
    prefill_pp: int, decode_pp: int, limits: CoreLimits | None
) -> None:
    """R4, R58: a leg for every two stages that have a layer in common."""
    prefill = ParallelLayout(prefill_pp, pp_size=prefill_pp)
    decode = ParallelLayout(decode_pp, pp_size=decode_pp)
    check_filled(prefill, decode, limits, model=FOUR_LAYERS, make_spec=of_stage)


def test_stages_of_context_parallel_ranks() -> None:
    """R4, R58: CP inside each stage."""
    prefill = ParallelLayout(4, cp_size=2, pp_size=2, all_cp_ranks=True)
    check_filled(prefill, ParallelLayout(1), model=FOUR_LAYERS, make_spec=of_stage)
