"""step: what the scheduler costs per decode step, against a loop that only counts.

A real DecodeCore over paged KV, its batch full, more requests waiting, admission and
retraction on; the engine is a list of tokens. One step is what the worker loop does between
two forward passes: tick (admission looks at the budget), schedule (blocks for who needs
one), commit (tokens stored, EOS and length checked) and the effects. Apart from it, because
a loop that counts has none of them: building the runner's batch, checking what the engine
returned, and the message to the leader.

Peers, in the same run: a bare Python loop over objects (count + 1, length check,
block-boundary check), the same in numpy, and a loop that does all of the step's duties.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks._decode_rank import BLOCK_SIZE, EOS, FIRST_TOKEN, DecodeRank, needs
from benchmarks.common import RUNS, Result, check, interleave, result_of, row
from pdcore.control.codec import MAX_LINK_BYTES, encode_link
from pdcore.control.messages import Tokens
from pdcore.executor import to_leader
from pdcore.fsm.effects import ReportTokens
from pdcore.fsm.events import StepCompleted
from pdcore.scheduler.outputs import check_output
from pdcore.types import Batch, FinishReason, Phase, RoomKey, StepOutput, rows_of

NUM_RUNNING = 1_000
MANY_RUNNING = 10_000
NUM_WAITING = 100
#: Steps per run: multiples of the batcher's HISTORY_STEPS, so that each run has its share of
#: handing out tokens.
STEPS = 256
QUICK_STEPS = 64
VOCAB_SIZE = 65_536
#: No request ends within the runs unless the workload says so.
LONG = 8_000


def cpu_us() -> float:
    return time.process_time_ns() / 1000


def clock_us() -> float:
    """What reading the clock costs: a system call, and a step of ours has three of them
    where a loop of the peers has none."""
    start = cpu_us()
    for _ in range(1000):
        time.process_time_ns()
    return (cpu_us() - start) / 1000


# --- the same results as the plain rule? --------------------------------------------------


def token_at(seq_id: int, position: int) -> int:
    """The fake engine: what a sequence samples at a position. One in 150 is EOS."""
    value = (seq_id * 2654435761 + position * 40503) >> 4 & 0xFFFF
    return EOS if value % 150 == 0 else 3 + value % 50_000


def expected_output(seq_id: int, num_prompt_tokens: int, max_tokens: int) -> list[int]:
    """What a request must return, whatever was admitted, stalled or retracted meanwhile."""
    output = [FIRST_TOKEN]
    while output[-1] != EOS and len(output) < max_tokens:
        output.append(token_at(seq_id, num_prompt_tokens + len(output)))
    return output


def run_engine(batch: Batch) -> StepOutput:
    return StepOutput(
        [
            [token_at(batch.seq_ids[i], batch.num_computed_tokens[i] + end - start)]
            if batch.sample[i]
            else None
            for i, start, end in batch.spans()
        ]
    )


def check_results() -> int:
    """60 requests through 16 seats and a pool that is too small; returns how many were
    retracted. Every request: the tokens of the plain rule, its finish reason, and no block
    lost, shared or missing at any step."""
    rank = DecodeRank(max_running=16, num_blocks=70)
    rank.reports = []
    wanted: dict[RoomKey, list[int]] = {}
    for i in range(60):
        prompt, most = 10 + 7 * i % 90, 1 + 37 * i % 300
        key = rank.submit(prompt, most)
        seq_id = rank.core.rooms.records[key].seq.seq_id
        wanted[key] = expected_output(seq_id, prompt, most)
    num_retracted = 0
    for _ in range(5_000):
        rank.settle()
        batch = rank.core.schedule(rank.now)
        if batch is None:
            break
        num_retracted += batch.phase is Phase.PREFILL
        for computed, table in zip(batch.num_computed_tokens, batch.block_tables, strict=True):
            check(len(table["full"]) * BLOCK_SIZE > computed, "a query without a slot")
        rank.blocks.audit()
        output = check_output(batch, run_engine(batch), VOCAB_SIZE)
        rank.core.handle_event(StepCompleted(batch.batch_id, output), rank.now)
    rank.settle()
    spoken: dict[RoomKey, list[int]] = {key: [] for key in wanted}
    for effect in rank.reports:
        if isinstance(effect, ReportTokens):
            for key, ids in zip(effect.keys, effect.token_ids, strict=True):
                spoken[key] += ids
    check(spoken == wanted, "tokens differ from the plain rule")
    for result in rank.finished:
        ends_by = FinishReason.STOP if wanted[result.key][-1] == EOS else FinishReason.LENGTH
        check(result.reason is ends_by, f"{result.key} ended as {result.reason}")
        check(result.completion_tokens == len(wanted[result.key]), "wrong completion count")
    check(len(rank.finished) == len(wanted), "not every request ended")
    check(rank.blocks.audit()["full"].held == 0, "blocks were lost")
    return num_retracted


# --- ours -------------------------------------------------------------------------------


class Steps:
    """A full rank, stepped; CPU microseconds per step of its parts are summed up."""

    def __init__(
        self, num_running: int, num_waiting: int, max_tokens: Callable[[int], int]
    ) -> None:
        prompts = [64 + i * 7919 % 192 for i in range(num_running)]
        # 64 metadata slots fill up with KV that waits for a seat; then nobody is admitted.
        self.rank = DecodeRank(num_running, 2 * needs(prompts) + num_running * 160, num_slots=64)
        self.max_tokens = max_tokens
        self.num_submitted = 0
        self.target = num_running + 64 + num_waiting
        self.core_us = self.build_us = self.check_us = self.tokens_us = 0.0
        self.num_steps = self.num_ended = 0
        self._build = self.rank.core.running.batcher.build_batch
        self.rank.core.running.batcher.build_batch = self._timed_build
        self.top_up()
        check(len(self.rank.core.running) == num_running + 64, "the batch did not fill up")
        check(len(self.rank.core.prealloc.waiting) == num_waiting, "nobody waits")

    def top_up(self) -> None:
        """As many requests as at first; not timed."""
        ended = len(self.rank.finished)
        while self.num_submitted - ended < self.target:
            i = self.num_submitted
            self.rank.submit(64 + i * 7919 % 192, self.max_tokens(i))
            self.num_submitted += 1
        self.rank.settle()

    def _timed_build(self, batch_id: int) -> Batch:
        start = cpu_us()
        batch = self._build(batch_id)
        self.build_us += cpu_us() - start
        return batch

    def step(self) -> None:
        rank, core = self.rank, self.rank.core
        build_us = self.build_us
        start = cpu_us()
        if core.wants_tick:
            core.tick(rank.now)
        effects = core.poll_effects()
        batch = core.schedule(rank.now)
        self.core_us += cpu_us() - start
        check(not effects and batch is not None, "the rank does something else")
        n = len(batch)
        token = 3 + self.num_steps % 50_000
        output = StepOutput(rows_of([token + i for i in range(n)]))
        before = cpu_us()
        output = check_output(batch, output, VOCAB_SIZE)
        start = cpu_us()
        self.check_us += start - before
        core.handle_event(StepCompleted(batch.batch_id, output), rank.now)
        effects = core.poll_effects()
        middle = cpu_us()
        messages = [to_leader(effect) for effect in effects if isinstance(effect, ReportTokens)]
        frames = [encode_link(message, MAX_LINK_BYTES) for message in messages]
        self.tokens_us += cpu_us() - middle
        self.core_us += middle - start - (self.build_us - build_us)
        check(len(frames) == 1, "a step is one message")
        for effect in effects:
            rank.answer(effect)
        self.num_steps += 1

    def run(self, num_steps: int) -> float:
        """Microseconds per step of the core, batch building left out."""
        before = self.core_us
        for _ in range(num_steps):
            self.step()
        return (self.core_us - before) / num_steps - 3 * clock_us()

    def run_with_churn(self, num_steps: int) -> float:
        """Requests end and others take their place: everything that it causes in the core
        counts, with the benchmark's own answers for prefill."""
        before, ended = self.core_us, len(self.rank.finished)
        for _ in range(num_steps):
            self.step()
            if len(self.rank.finished) - ended + self.num_submitted:
                start = cpu_us()
                self.top_up()
                self.core_us += cpu_us() - start
        self.num_ended += len(self.rank.finished) - ended
        return (self.core_us - before) / num_steps

    def check_counts(self) -> None:
        """Who was there from the start has one token per step, and blocks for them."""
        self.rank.blocks.audit()
        batcher = self.rank.core.running.batcher
        for seq in batcher.sequences()[: self.target - 64 - NUM_WAITING]:
            check(seq.num_output_tokens == 1 + self.num_steps, "a sequence missed a step")


# --- peers ------------------------------------------------------------------------------


class Counted:
    __slots__ = ("blocks", "count", "key", "limit", "tokens")

    def __init__(self, i: int) -> None:
        self.count = 64 + i * 7919 % 192
        self.limit = self.count + 100_000
        self.key = (i, 1)
        self.tokens: list[int] = []
        self.blocks: list[int] = []


def bare_loop(num_running: int) -> Callable[[int], float]:
    """count + 1, length check, block-boundary check, per request."""
    requests = [Counted(i) for i in range(num_running)]

    def run(num_steps: int) -> float:
        start = cpu_us()
        for _ in range(num_steps):
            finished, at_boundary = [], []
            for r in requests:
                r.count += 1
                if r.count >= r.limit:
                    finished.append(r)
                if r.count % BLOCK_SIZE == 0:
                    at_boundary.append(r)
        return (cpu_us() - start) / num_steps

    return run


def full_loop(num_running: int) -> Callable[[int], float]:
    """The duties of a step, request by request: keep the token, test it against EOS, count,
    check length and boundary, take a block, report."""
    requests = [Counted(i) for i in range(num_running)]
    eos = frozenset({EOS})

    def run(num_steps: int) -> float:
        spent = 0.0
        for r in requests:
            r.tokens.clear()
            r.blocks.clear()
        free = list(range(num_running * (num_steps // BLOCK_SIZE + 1)))
        for step in range(num_steps):
            rows = [[3 + step + i] for i in range(num_running)]
            start = cpu_us()
            finished, keys = [], []
            for r, (token,) in zip(requests, rows, strict=True):
                r.tokens.append(token)
                r.count += 1
                if token in eos or r.count >= r.limit:
                    finished.append(r)
                if r.count % BLOCK_SIZE == 0:
                    r.blocks.append(free.pop())
                keys.append(r.key)
            spent += cpu_us() - start
        return spent / num_steps

    return run


def numpy_loop(num_running: int) -> Callable[[int], float]:
    counts = np.array([Counted(i).count for i in range(num_running)])
    limits = counts + 100_000

    def run(num_steps: int) -> float:
        start = cpu_us()
        for _ in range(num_steps):
            counts.__iadd__(1)
            np.flatnonzero(counts >= limits)
            np.flatnonzero(counts % BLOCK_SIZE == 0)
        return (cpu_us() - start) / num_steps

    return run


def build_by_request(steps: Steps) -> Callable[[int], float]:
    """The runner's batch from nothing, one ``add`` per sequence."""

    def run(num_steps: int) -> float:
        core = steps.rank.core
        members = core.running.batcher.sequences()[: core.setup.limits.max_running]
        last = [[seq.output_token_ids[-1]] for seq in members]
        start = cpu_us()
        for step in range(num_steps):
            batch = Batch(step, Phase.DECODE)
            for seq, ids in zip(members, last, strict=True):
                batch.add(
                    seq.seq_id,
                    ids,
                    seq.num_computed_tokens,
                    steps.rank.blocks.get_block_ids(seq.seq_id),
                    seq.request.sampling,
                )
        return (cpu_us() - start) / num_steps

    return run


def message_per_request(num_running: int) -> Callable[[int], float]:
    """One message per request and step, encoded; their sends would come on top."""
    keys = [RoomKey(1 << 60 | i, 1 << 61) for i in range(num_running)]

    def run(num_steps: int) -> float:
        start = cpu_us()
        for step in range(num_steps):
            for key in keys:
                encode_link(Tokens([key], [[step]]), MAX_LINK_BYTES)
        return (cpu_us() - start) / num_steps

    return run


# --- the benchmark ----------------------------------------------------------------------


def never_ends(i: int) -> int:
    return LONG


def measure(num_running: int, num_steps: int) -> tuple[list[Result], float]:
    steps = Steps(num_running, NUM_WAITING, never_ends)
    bare, full, vector = (f(num_running) for f in (bare_loop, full_loop, numpy_loop))
    parts: dict[str, list[float]] = {"build": [], "check": [], "tokens": []}

    def ours() -> float:
        build_us, check_us, tokens_us = steps.build_us, steps.check_us, steps.tokens_us
        value = steps.run(num_steps)
        parts["build"].append((steps.build_us - build_us) / num_steps)
        parts["check"].append((steps.check_us - check_us) / num_steps)
        parts["tokens"].append((steps.tokens_us - tokens_us) / num_steps)
        return value

    builder, one_by_one = build_by_request(steps), message_per_request(num_running)
    few = max(2, 8_000 // num_running)
    timed = interleave(
        {
            "ours": ours,
            "bare": lambda: bare(num_steps),
            "full": lambda: full(num_steps),
            "numpy": lambda: vector(num_steps),
            "build": lambda: builder(few),
            "messages": lambda: one_by_one(few),
        }
    )
    steps.check_counts()
    name, metric = f"step/{num_running}", "CPU time per step"
    limit = statistics.median(timed["numpy"])

    def against(
        what: str, values: Sequence[float], peer: str, peer_values: Sequence[float], target: str
    ) -> Result:
        return row(
            name,
            what,
            "us",
            values,
            peer,
            peer_values,
            better="lower",
            target=target,
            meets=(lambda ratio: ratio <= 1) if target else None,
            limit=limit,
        )

    at_most = "ratio <= 1"
    rows = [
        against(metric, timed["ours"], "bare loop (counts only)", timed["bare"], at_most),
        against(metric, timed["ours"], "loop with the same duties", timed["full"], ""),
        against(metric, timed["ours"], "numpy (counts only)", timed["numpy"], ""),
        against(
            "building the runner's batch",
            parts["build"][-RUNS:],
            "one add per sequence",
            timed["build"],
            at_most,
        ),
        against(
            "checking what the engine returned",
            parts["check"][-RUNS:],
            "bare loop (counts only)",
            timed["bare"],
            "",
        ),
        against(
            "tokens to the leader, encoded",
            parts["tokens"][-RUNS:],
            "one message per request",
            timed["messages"],
            at_most,
        ),
    ]
    return rows, statistics.median(timed["ours"])


def measure_waiting(num_steps: int) -> Result:
    """Who only waits must cost nothing."""
    few = Steps(NUM_RUNNING, NUM_WAITING, never_ends)
    many = Steps(NUM_RUNNING, 20 * NUM_WAITING, never_ends)
    timed = interleave({"many": lambda: many.run(num_steps), "few": lambda: few.run(num_steps)})
    return row(
        f"step/{NUM_RUNNING}",
        f"CPU time per step, {20 * NUM_WAITING} waiting",
        "us",
        timed["many"],
        f"the same with {NUM_WAITING} waiting",
        timed["few"],
        better="lower",
        target="ratio <= 1.1",
        meets=lambda ratio: ratio <= 1.1,
    )


def measure_churn(num_steps: int) -> Result:
    """What one request costs that ends and one that takes its place, all of decode's side."""
    quiet = Steps(NUM_RUNNING, NUM_WAITING, never_ends)
    # About one request in 500 steps of each sequence.
    churn = Steps(NUM_RUNNING, NUM_WAITING, lambda i: 2 + i * 7919 % 998)
    timed = interleave(
        {"quiet": lambda: quiet.run(num_steps), "churn": lambda: churn.run_with_churn(num_steps)}
    )
    per_step = churn.num_ended / churn.num_steps
    extra = statistics.median(timed["churn"]) - statistics.median(timed["quiet"])
    return row(
        f"step/{NUM_RUNNING}",
        "CPU time per request that ends and one that is admitted",
        "us",
        [extra / per_step] * RUNS,
        None,
        better="lower",
        target="",
        reason="no peer has a lifecycle; it shows what a change costs, apart from the step",
    )


def run(quick: bool) -> Result:
    num_retracted = check_results()
    check(num_retracted > 0, "the pool was never short: retraction is not covered")
    num_steps = QUICK_STEPS if quick else STEPS
    rows, small = measure(NUM_RUNNING, num_steps)
    more, large = measure(MANY_RUNNING, QUICK_STEPS)
    rows += more
    rows.append(
        row(
            "step",
            f"growth from {NUM_RUNNING} to {MANY_RUNNING} running",
            "times",
            [large / small] * RUNS,
            "number of sequences",
            [MANY_RUNNING / NUM_RUNNING] * RUNS,
            better="lower",
            target="ratio <= 1.5",
            meets=lambda ratio: ratio <= 1.5,
        )
    )
    rows += [measure_waiting(num_steps), measure_churn(num_steps)]
    return result_of("step", rows, num_waiting=NUM_WAITING, retracted_in_check=num_retracted)
