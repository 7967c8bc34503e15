"""Hypothesis strategies: every valid message, request, faulty network and simulated world.

What they draw is what pdcore's own property tests draw. All of it is valid, and small, so
that what fails is easy to read; damage the encoded bytes to test what must be refused. Needs
hypothesis (``pip install 'pdcore[testing]'``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the strategies of pdcore.testing need hypothesis: run `pip install 'pdcore[testing]'`",
        name=error.name,
    ) from None

from pdcore.control import messages as m
from pdcore.control.codec import pack_ids
from pdcore.control.memory import FaultPlan
from pdcore.errors import HTTP_STATUS
from pdcore.sim.plan import Plan, make_plan
from pdcore.types import (
    MAX_ID,
    Failure,
    GenerateRequest,
    Incarnation,
    LeaseId,
    Nonce,
    RoomKey,
    SamplingParams,
)

#: Seeds of simulated worlds, as many as a closing run takes.
MAX_WORLD_SEED: Final = 19_999
#: What :func:`generate_requests` have left, in seconds.
LIFE_S: Final = 60.0

_ids = st.integers(1, MAX_ID)
_counts = st.integers(0, 2**31 - 1)
_names = st.text(min_size=1, max_size=20)
_texts = st.text(max_size=40)
_finite = st.floats(-1e12, 1e12)
_packed = st.lists(_counts, max_size=5).map(pack_ids)


def incarnations() -> st.SearchStrategy[Incarnation]:
    """Of processes: 16 bytes."""
    return st.binary(min_size=16, max_size=16).map(Incarnation)


def room_keys() -> st.SearchStrategy[RoomKey]:
    """Room and attempt, each in 1..2**63-1."""
    return st.builds(RoomKey, _ids, _ids)


def leases() -> st.SearchStrategy[LeaseId]:
    return st.builds(LeaseId, incarnations(), st.integers(0, MAX_ID))


def nonces() -> st.SearchStrategy[Nonce]:
    return st.builds(Nonce, incarnations(), st.integers(0, MAX_ID))


def failures() -> st.SearchStrategy[Failure]:
    """Every code of :data:`pdcore.errors.HTTP_STATUS`, with its status."""
    return st.builds(
        lambda code, detail: Failure(code, detail, HTTP_STATUS[code]),
        st.sampled_from(sorted(HTTP_STATUS)),
        _texts,
    )


# --- messages ---------------------------------------------------------------------------


def peer_messages() -> st.SearchStrategy[m.PeerMessage]:
    """What ranks of prefill and decode send each other, each kind as often as any other."""
    keys, lease, nonce = room_keys(), leases(), nonces()
    return st.one_of(
        _handshakes(),
        st.builds(m.Claim, keys, lease, nonce),
        st.builds(m.Grant, keys, nonce),
        st.builds(m.Refuse, keys, nonce, _texts),
        _unfinished(),
        _done(),
        st.builds(m.StatusAck, keys, lease, st.sampled_from(m.StatusKind)),
        st.builds(m.Cancel, keys, lease, st.lists(nonce, max_size=3).map(tuple)),
        st.builds(m.CancelAck, keys, lease, st.none() | nonce),
        st.builds(m.Stale, keys, _maybe_unknown()),
        st.builds(m.Heartbeat, st.integers(0, MAX_ID)),
        st.builds(m.HeartbeatAck, st.integers(0, MAX_ID)),
    )


def frames() -> st.SearchStrategy[m.Frame]:
    """Of the control channel: up to three messages of one rank to another."""
    return st.builds(
        m.Frame,
        instance=_names,
        rank=_counts,
        incarnation=incarnations(),
        reply_to=_names,
        to_incarnation=_maybe_unknown(),
        messages=st.lists(peer_messages(), max_size=3),
    )


def leader_messages() -> st.SearchStrategy[m.LeaderMessage]:
    """What a leader sends its workers."""
    return st.one_of(
        _submits(),
        st.builds(m.Abort, room_keys(), _texts, st.booleans()),
        st.builds(m.Stop, _finite),
    )


def worker_messages() -> st.SearchStrategy[m.WorkerMessage]:
    """What a worker sends its leader."""
    return st.one_of(
        st.builds(m.Accepted, room_keys()),
        st.builds(m.Aborted, room_keys(), st.booleans()),
        st.integers(0, 3).flatmap(_tokens),
        st.builds(
            m.Finished,
            key=room_keys(),
            finish_reason=_texts,
            failure=st.none() | failures(),
            prompt_tokens=_counts,
            completion_tokens=_counts,
            timeline=_measured(),
        ),
        _ready(),
        st.builds(
            m.WorkerHealth,
            rank=_counts,
            problems=st.lists(_texts, max_size=2),
            counters=_measured(),
            ledger=st.dictionaries(_texts, st.dictionaries(_texts, _counts, max_size=2)),
            refused_peers=st.dictionaries(_texts, _texts, max_size=2),
        ),
    )


def _maybe_unknown() -> st.SearchStrategy[Incarnation]:
    return st.just(Incarnation(b"")) | incarnations()


def _measured() -> st.SearchStrategy[dict[str, float]]:
    return st.dictionaries(_texts, _finite, max_size=2)


def _handshakes() -> st.SearchStrategy[m.Handshake]:
    def of(tokens: Sequence[int]) -> st.SearchStrategy[m.Handshake]:
        return st.builds(
            m.Handshake,
            key=room_keys(),
            lease=leases(),
            endpoint=st.binary(max_size=20),
            blocks=st.dictionaries(_names, _packed, max_size=2),
            num_cached_tokens=st.just(min(tokens)),
            num_tokens=st.just(max(tokens)),
            ids_hash=st.integers(0, 2**64 - 1),
            num_required=st.integers(1, 64),
            expires_at_s=_finite,
            remaining_s=_finite,
            is_dummy=st.booleans(),
        )

    return st.tuples(_counts, _counts).flatmap(of)


def _unfinished() -> st.SearchStrategy[m.Status]:
    return st.builds(
        m.Status,
        key=room_keys(),
        lease=leases(),
        kind=st.sampled_from([kind for kind in m.StatusKind if kind is not m.StatusKind.DONE]),
        nonce=st.none() | nonces(),
        failure=st.none() | failures(),
    )


def _done() -> st.SearchStrategy[m.Status]:
    return st.builds(
        m.Status,
        key=room_keys(),
        lease=leases(),
        kind=st.just(m.StatusKind.DONE),
        nonce=nonces(),
        metadata=st.binary(max_size=99),
        timings=_measured().map(lambda timings: {name[:32]: s for name, s in timings.items()}),
    )


def _submits() -> st.SearchStrategy[m.Submit]:
    sampling = st.builds(
        m.SubmitSampling,
        max_tokens=st.none() | _counts,
        min_tokens=_counts,
        temperature=_finite,
        top_p=_finite,
        top_k=_counts,
        seed=st.none() | st.integers(-(2**63), 2**64 - 1),
        stop_token_ids=st.lists(_counts, max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.booleans(),
        top_logprobs=_counts,
    )
    return st.builds(
        m.Submit,
        key=room_keys(),
        request_id=_texts,
        prompt=_packed,
        sampling=sampling,
        expires_at_s=_finite,
        remaining_s=_finite,
        bootstrap=_texts,
        prefill=_texts,
        decode=_texts,
        prefill_dp_rank=st.none() | _counts,
        replaces=st.none() | _ids,
        is_local=st.booleans(),
    )


def _tokens(n: int) -> st.SearchStrategy[m.Tokens]:
    """One step's tokens of ``n`` requests."""
    row = st.none() | st.lists(st.none() | _finite, max_size=3)
    return st.builds(
        m.Tokens,
        keys=st.lists(room_keys(), min_size=n, max_size=n),
        token_ids=st.lists(st.lists(_counts, max_size=3), min_size=n, max_size=n),
        logprobs=st.none() | st.lists(row, min_size=n, max_size=n),
    )


def _ready() -> st.SearchStrategy[m.WorkerReady]:
    return st.builds(
        m.WorkerReady,
        rank=_counts,
        dp_rank=_counts,
        incarnation=incarnations(),
        control_address=_names,
        max_model_len=_counts,
        max_prefill_tokens=_counts,
        vocab_size=_counts,
        num_blocks=_counts,
        transport=_names,
    )


# --- requests ---------------------------------------------------------------------------


@st.composite
def sampling_params(
    draw: st.DrawFn, *, max_tokens: int = 8, vocab_size: int = 997
) -> SamplingParams:
    """Greedy, seeded and unrepeatable sampling of up to ``max_tokens``."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, expected at least 1")
    limit = draw(st.integers(1, max_tokens))
    return SamplingParams(
        max_tokens=limit,
        min_tokens=draw(st.integers(0, limit)),
        temperature=draw(st.just(0.0) | st.floats(0.1, 2.0)),
        top_p=draw(st.just(1.0) | st.floats(0.01, 1.0)),
        top_k=draw(st.integers(0, 50)),
        seed=draw(st.none() | st.integers(0, MAX_ID)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, vocab_size - 1), max_size=2))),
        ignore_eos=draw(st.booleans()),
    )


def generate_requests(
    *, unix_s: float = 0.0, max_prompt: int = 24, max_tokens: int = 8, vocab_size: int = 997
) -> st.SearchStrategy[GenerateRequest]:
    """What a core takes: prompts of 1..``max_prompt`` token ids, a minute to live from the Unix
    time ``unix_s`` on, and no peers named yet (``attrs.evolve`` names them)."""
    return st.builds(
        GenerateRequest,
        key=room_keys(),
        request_id=_names,
        prompt_token_ids=st.lists(
            st.integers(0, vocab_size - 1), min_size=1, max_size=max_prompt
        ).map(tuple),
        sampling=sampling_params(max_tokens=max_tokens, vocab_size=vocab_size),
        expires_at_s=st.just(unix_s + LIFE_S),
        remaining_s=st.just(LIFE_S),
    )


# --- worlds -----------------------------------------------------------------------------


@st.composite
def fault_plans(
    draw: st.DrawFn, *, max_chance: float = 0.3, max_delay_s: float = 0.05
) -> FaultPlan:
    """For a :class:`~pdcore.control.memory.MemoryNetwork`: it loses, repeats and reorders each
    frame with at most ``max_chance``, and delays none by more than ``max_delay_s``."""
    chances = st.floats(0.0, max_chance)
    first_s, last_s = sorted(draw(st.tuples(*[st.floats(0.0, max_delay_s)] * 2)))
    return FaultPlan(
        drop=draw(chances),
        duplicate=draw(chances),
        reorder=draw(chances),
        min_delay_s=first_s,
        max_delay_s=last_s,
    )


@st.composite
def plans(draw: st.DrawFn, *, max_requests: int = 8, max_faults: int = 4) -> Plan:
    """Simulated worlds for :func:`~pdcore.testing.run_world`: one of pdcore's seeds, cut down to
    1..``max_requests`` of its requests and at most ``max_faults`` of its faults, fewer of each
    where hypothesis shrinks."""
    plan = make_plan(draw(st.integers(0, MAX_WORLD_SEED)))
    requests = st.sampled_from([request.number for request in plan.requests])
    faults = st.sampled_from([fault.number for fault in plan.faults])
    return plan.only(
        faults=draw(st.sets(faults, max_size=max_faults)),
        requests=draw(st.sets(requests, min_size=1, max_size=max_requests)),
    )
