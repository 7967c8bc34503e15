"""Prefill and decode cores against an adversary: every frame and every byte by its choice.

Hypothesis decides which control frame is delivered, lost or doubled, which chunk of which
write moves, when a worker gets a turn, when time passes, who gives up. After every rule the
ledgers must add up and no block may be free while a write for it can still land; at the end,
with a fair network, every request has exactly one result and every block is back
(invariants 1, 3).
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdcore.config import CoreLimits
from pdcore.control.codec import unpack_block_ids
from pdcore.control.messages import Finished
from pdcore.engine.simulated import simulated_tokens
from pdcore.kv.blocks import FREE, HELD
from pdcore.testing.world import make_world
from pdcore.types import RoomKey, SamplingParams

MAX_REQUESTS = 6


class PdMachine(RuleBasedStateMachine):
    """SGLang PR38961: one prefill and one decode rank, room for about two requests on each side."""

    def __init__(self) -> None:
        super().__init__()
        limits = CoreLimits(
            prefill_chunk_tokens=8,
            num_reserved_decode_tokens=4,
            num_metadata_slots=2,
            drain_timeout_s=5.0,
            linger_s=5.0,
        )
        self.world = make_world(
            num_blocks=12, prefill_blocks=12, stepped=True, manual=True, limits=limits
        )
        self.prompts: dict[RoomKey, list[int]] = {}

    def sides(self):
        return self.world.ranks.values()

    @precondition(lambda self: len(self.prompts) < MAX_REQUESTS)
    @rule(
        length=st.integers(1, 14),
        legs=st.sampled_from([("prefill", "decode"), ("decode", "prefill")]),
        timeout_s=st.sampled_from([1.0, 30.0]),
    )
    def submit(self, length: int, legs: tuple[str, str], timeout_s: float) -> None:
        number = len(self.prompts) + 1
        prompt = [100 * number + i for i in range(length)]
        key = RoomKey(number, number)
        self.prompts[key] = prompt
        for leg in legs:
            self.world.submit(
                prompt,
                key=key,
                to=(leg,),
                sampling=SamplingParams(max_tokens=4),
                timeout_s=timeout_s,
            )

    @rule(side=st.sampled_from(["prefill", "decode"]), turns=st.integers(1, 3))
    def turn(self, side: str, turns: int) -> None:
        for _ in range(turns):
            self.world.ranks[side].worker.step(0.0)

    @rule(rounds=st.integers(1, 4))
    def fair_rounds(self, rounds: int) -> None:
        """Nothing is lost for a while; bytes still wait for ``chunk``."""
        for _ in range(rounds):
            for flight in self.world.network.pending():
                self.world.network.deliver(flight.sequence)
            for rank in self.sides():
                rank.worker.step(0.0)

    @precondition(lambda self: self.world.network.pending())
    @rule(choice=st.integers(0, 30), fate=st.sampled_from(["deliver"] * 4 + ["drop", "duplicate"]))
    def frame(self, choice: int, fate: str) -> None:
        flights = self.world.network.pending()
        flight = flights[choice % len(flights)]
        act = {
            "deliver": self.world.network.deliver,
            "drop": self.world.network.drop,
            "duplicate": self.world.network.duplicate,
        }
        act[fate](flight.sequence)

    @precondition(lambda self: self.world.fabric.pending())
    @rule(choice=st.integers(0, 10))
    def chunk(self, choice: int) -> None:
        self.world.fabric.step(choice)

    @rule(late=st.booleans())
    def writes_outlive_cancel(self, late: bool) -> None:
        incarnation = self.world.prefill.worker.core.setup.me.incarnation
        self.world.fabric.faults(incarnation).late_landing = late

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.5, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @precondition(lambda self: self.prompts)
    @rule(
        choice=st.integers(0, MAX_REQUESTS),
        side=st.sampled_from(["prefill", "decode"]),
        unless_received=st.booleans(),
    )
    def give_up(self, choice: int, side: str, unless_received: bool) -> None:
        keys = list(self.prompts)
        self.world.abort(keys[choice % len(keys)], at=side, unless_received=unless_received)

    @invariant()
    def ledgers_add_up(self) -> None:
        for rank in self.sides():
            rank.worker.core.blocks.audit()
        self.world.decode.worker.core.rooms.slots.audit()

    @invariant()
    def nobody_writes_into_a_foreign_block(self) -> None:
        """Every write that can still happen targets blocks that are leased or out."""
        core = self.world.decode.worker.core
        pool = core.blocks._by_key["full"].pool
        leases = {r.receiver.lease: r.receiver for r in core.rooms.records.values()}
        for _, job in _jobs(self.world.fabric):
            receiver = leases.get(job.lease)
            assert receiver is not None, "a write is alive and its lease is forgotten"
            for block in _published(receiver):
                assert pool.state_of(block) not in (FREE, HELD), (block, receiver)

    @invariant()
    def results_are_unique_and_tokens_are_right(self) -> None:
        for rank in self.sides():
            results = Counter(m.key for m in rank.said if isinstance(m, Finished))
            assert not results or max(results.values()) == 1, results
        for key, prompt in self.prompts.items():
            tokens = self.world.decode.tokens(key)
            assert tokens == simulated_tokens(self.world.model, prompt, 4)[: len(tokens)]

    def teardown(self) -> None:
        """A fair network from here on: everything ends and everything comes back."""
        self.world.is_manual = False

        def is_over() -> bool:
            while self.world.fabric.step() is not None:
                pass
            answered = all(rank.result(key) for rank in self.sides() for key in self.prompts)
            return answered and not any(r.worker.core.live_keys() for r in self.sides())

        self.world.run(is_over)
        for rank in self.sides():
            ledger = rank.worker.core.blocks.audit()["full"]
            assert ledger.free == ledger.total
            left = rank.worker.close()
            assert left == []


def _jobs(fabric):
    """(endpoint, job) of everything that may still move or land."""
    for link in fabric._links:
        for job in link.jobs:
            yield link, job
    for job in fabric._late:
        yield job.link, job


def _published(receiver) -> list[int]:
    """The blocks that the lease opened, whoever owns them now."""
    return unpack_block_ids(receiver.admission.handshake.blocks["full"])


PdMachine.TestCase.settings = settings(stateful_step_count=60)
TestPdMachine = PdMachine.TestCase


class FreeOnAbort(PdMachine):
    """The seed's rule (D3): a request that ended gives its blocks back at once."""

    def __init__(self) -> None:
        super().__init__()
        rooms = self.world.decode.worker.core.rooms
        rooms.quarantine = rooms.release


def test_d3_the_machine_finds_free_on_abort() -> None:
    """D3: the same machine with the seed's rule fails."""
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            FreeOnAbort,
            settings=settings(
                max_examples=400,
                stateful_step_count=60,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
            ),
        )
