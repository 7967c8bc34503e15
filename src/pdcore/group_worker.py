"""The worker loop of one rank of a group: the same loop, played in rounds.

All ranks of a TP x CP group must move the same requests in the same tick (architecture,
section 9). So everything that they decide together happens in a *round*, with the same inputs
in the same order on every rank (:mod:`pdcore.scheduler.lockstep`): the reduced votes, the
outcome of the last engine step, deadlines by the group's clock (the hub's), what the leader
sent, the next batch. What only one rank hears of (frames of peers, its transport, its own
timers) changes sticky facts of that rank at any time, and the next vote tells the others.

Nothing here blocks in an open round: a rank that waits for the others answers heartbeats and
reports its health, and says for whom it waits.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import Final, Protocol

import attrs
import msgspec

from pdcore.background import BackgroundCalls
from pdcore.clock import Clock
from pdcore.control.ballots import (
    Ballot,
    GroupMessage,
    StepDone,
    decode_group,
    encode_group,
)
from pdcore.control.messages import (
    LeaderMessage,
    Submit,
    WorkerHealth,
    WorkerMessage,
    WorkerReady,
)
from pdcore.engine.base import ModelRunner
from pdcore.errors import CodecError, GroupBroken, failure
from pdcore.executor import Executor
from pdcore.fsm.events import StepCompleted
from pdcore.scheduler.lockstep import HUB, Lockstep, Outgoing, Voting, merge_steps
from pdcore.worker import Core, LeaderPort, Ports, Worker, execute

log = logging.getLogger(__name__)

#: A round that is open for longer is a reason why this rank is not ready.
SLOW_ROUND_S: Final = 2.0
#: Nothing that a rank does between two rounds takes so long: something was lost, and the group
#: must not stay unready for ever while all of its processes look alive.
MAX_ROUND_S: Final = 120.0

#: Of the leader's messages, what one ballot brings along; the rest comes with the next. A round
#: holds those of all ranks and is one message itself (MAX_GROUP_BYTES): a greater one would
#: never arrive.
MAX_NEWS_BYTES: Final = 16 << 20


class GroupPort(Protocol):
    """Ordered, lossless links within a group while both ends live: the hub (rank 0) to every
    other rank. Ranks count within the group. Owned by the worker loop's thread."""

    def send(self, rank: int, data: bytes) -> None:
        """Never blocks. Raises GroupBroken when that rank cannot be reached any more."""
        ...

    def receive(self) -> list[tuple[int, bytes]]: ...

    def close(self) -> None: ...


@attrs.frozen(eq=False)
class Group:
    """A rank's part in its group. ``voting`` is the consensus its executor was given."""

    port: GroupPort
    lockstep: Lockstep
    voting: Voting


class FollowerPort:
    """The leader port of a rank that is not the hub: the hub speaks for the group, this rank
    only of itself."""

    def __init__(self, port: LeaderPort) -> None:
        self._port = port

    def receive(self, limit: int = 256) -> list[LeaderMessage]:
        return self._port.receive(limit)

    def send(self, message: WorkerMessage) -> None:
        if isinstance(message, WorkerHealth | WorkerReady):
            self._port.send(message)


class GroupClock:
    """The hub's clocks, as the last round told them: what has expired must be the same question
    on every rank. Until the first round: our own.

    A round is heard of after it was cast, so another rank is at most that much behind the hub,
    never ahead of it: the least of these delays is nearest to the truth. The hub's own is never
    set back, or each round would cost the group the time for which it was open."""

    def __init__(self, clock: Clock, *, is_hub: bool) -> None:
        self._clock = clock
        self._ahead_s: float | None = 0.0 if is_hub else None
        self._unix_s: float | None = None

    def set(self, now_s: float, unix_s: float) -> None:
        ahead_s = self._clock.monotonic() - now_s
        self._ahead_s = ahead_s if self._ahead_s is None else min(self._ahead_s, ahead_s)
        self._unix_s = unix_s

    def monotonic(self) -> float:
        return self._clock.monotonic() - (self._ahead_s or 0.0)

    def unix(self) -> float:
        """When the last round was cast."""
        return self._clock.unix() if self._unix_s is None else self._unix_s

    def local(self) -> float:
        """This rank's own: it goes on evenly, whatever rounds do."""
        return self._clock.monotonic()

    def local_unix(self) -> float:
        return self._clock.unix()


class GroupWorker(Worker):
    """One rank of a group. ``run`` raises GroupBroken when the ranks are out of step: the
    process ends, and with it its group, which its leader starts again."""

    def __init__(
        self,
        core: Core,
        runner: ModelRunner,
        ports: Ports,
        executor: Executor,
        background: BackgroundCalls,
        clock: Clock,
        group: Group,
    ) -> None:
        shared = GroupClock(clock, is_hub=group.lockstep.rank == HUB)
        super().__init__(core, runner, ports, executor, background, shared)
        self.group = group
        self._time = shared
        self._round = _Round()

    def step(self, max_wait_s: float | None = 0.0) -> bool:
        """One iteration; True when a batch was run (see :meth:`Worker.step`)."""
        lockstep = self.group.lockstep
        now = self.clock.monotonic()
        self._receive(now)
        self._flush(now)
        self._report_health(self._time.local())
        for sender, data in self.group.port.receive():
            self._send(lockstep.receive(sender, _read(data)))
        self._cast_if_wanted(now)
        ballots = lockstep.take_round()
        if ballots is None and lockstep.has_cast:
            self._expect_end_of_round()
        if ballots is not None:
            has_run = self._play(ballots)
            if has_run or self._is_stopped:
                return has_run
        self.ports.wait(self._wait_s(max_wait_s))
        return False

    def close(self, timeout_s: float = 5.0) -> list[str]:
        self.group.port.close()
        return super().close(timeout_s)

    def health(self) -> WorkerHealth:
        health = super().health()
        missing, since_s = self.group.lockstep.missing, self._round.cast_s
        waited_s = self._time.local() - since_s
        if missing and waited_s > SLOW_ROUND_S:
            ranks = ", ".join(map(str, missing))
            health.problems.append(f"waits for rank {ranks} of its group for {waited_s:.0f} s")
        return health

    def _expect_end_of_round(self) -> None:
        open_s = self._time.local() - self._round.cast_s
        if open_s > MAX_ROUND_S:
            missing = ", ".join(map(str, self.group.lockstep.missing))
            raise GroupBroken(f"rank {missing} did not join a round within {MAX_ROUND_S:g} s")

    # --- a round --------------------------------------------------------------------------

    def _cast_if_wanted(self, now: float) -> None:
        """Vote when there is news, or when the others vote; once per round."""
        lockstep = self.group.lockstep
        if lockstep.has_cast or not (lockstep.is_asked or self._has_news(now)):
            return
        self.core.tick(now)
        self._flush(now)
        vector, state = self.group.voting.vector, self._round
        count = how_many(state.messages, MAX_NEWS_BYTES)
        ballot = Ballot(
            round=lockstep.round,
            rank=lockstep.rank,
            ids_hash=vector.ids_hash if vector is not None else -1,
            votes=bytes(vector.votes) if vector is not None else b"",
            failures=list(vector.failures) if vector is not None else [],
            tokens=list(vector.tokens) if vector is not None else [],
            now_s=now,
            unix_s=self._time.local_unix(),
            messages=state.messages[:count],
            step=None if state.step is None else _outcome(state.step),
            is_drained=self._is_drained,
        )
        del state.messages[:count]
        state.cast_s = self._time.local()
        state.was_drained = ballot.is_drained
        self._send(lockstep.cast(ballot))

    def _has_news(self, now: float) -> bool:
        core, state = self.core, self._round
        moments = (core.poll_deadline(), self._drain_until_s)
        return (
            core.wants_tick
            or bool(state.messages)
            or state.step is not None
            or state.was_drained != self._is_drained
            or any(moment is not None and moment <= now for moment in moments)
        )

    def _play(self, ballots: list[Ballot]) -> bool:
        """The same on every rank, from the same inputs; True when a batch was run."""
        core, state = self.core, self._round
        now = ballots[HUB].now_s
        self._time.set(now, ballots[HUB].unix_s)
        own, state.step = state.step, None
        done = merge_steps(own.output if own is not None else None, [b.step for b in ballots])
        reduced = self.group.voting.outcome(ballots)
        if reduced is not None:
            core.handle_event(reduced, now)
            if reduced.diverged:
                raise GroupBroken("the ranks of this group held different requests")
        if done is not None:
            core.handle_event(done, now)
        deadline = core.poll_deadline()
        if deadline is not None and deadline <= now:
            core.handle_timeout(now)
        for ballot in ballots:
            for message in ballot.messages:
                self._handle_leader(message, now)
        self._end_drain(now)
        self._flush(now)
        if all(ballot.is_drained for ballot in ballots):
            self._is_stopped = True
            return False
        batch = core.schedule(now)
        if batch is None:
            self._flush(now)
            return False
        state.step = execute(self.runner, batch)
        self.watch.ran(batch)
        return True

    # --- what differs from a rank alone ------------------------------------------------------

    def _receive(self, now: float) -> None:
        """As the base, but what the leader sent arrives with a round, on all ranks."""
        for event in self.executor.answers():
            self.core.handle_event(event, now)
        self._round.messages.extend(self.ports.leader.receive())
        for data in self.ports.channel.receive():
            self._handle_frame(data, now)
        for event in self.executor.poll():
            self.core.handle_event(event, now)

    def _flush(self, now: float) -> None:
        """Carry out effects until there are none; votes are kept for the ballot."""
        while effects := self.core.poll_effects():
            for event in self.executor.execute(effects, now):
                self.core.handle_event(event, now)

    def _end_drain(self, now: float) -> None:
        """Time is up: what is left fails (D59), on all ranks in this round."""
        if self._drain_until_s is None or now < self._drain_until_s:
            return
        why = failure("shutting_down", "this instance stopped before the request ended")
        for key in self.core.live_keys():
            self.core.abort(key, why, now)
        self._round.has_given_up = True
        self._drain_until_s = float("inf")

    @property
    def _is_drained(self) -> bool:
        if self._drain_until_s is None:
            return False
        return self._round.has_given_up or not self.core.live_keys()

    def _wait_s(self, max_wait_s: float | None) -> float | None:
        """Until something is due here; in an open round only until our next health report."""
        now = self.clock.monotonic()
        wait_s = max(0.0, self._next_health_s - self._time.local())
        if not self.group.lockstep.has_cast:
            if self._has_news(now) or self.group.lockstep.is_asked:
                wait_s = 0.0
            moments = (self.core.poll_deadline(), self._drain_until_s)
            wait_s = min([wait_s, *(max(0.0, m - now) for m in moments if m is not None)])
        return wait_s if max_wait_s is None else min(wait_s, max_wait_s)

    def _send(self, messages: Outgoing) -> None:
        for rank, message in messages:
            self.group.port.send(rank, encode_group(message))


@attrs.define(eq=False)
class _Round:
    """What this rank brings into the next round, and what it must remember of the last one."""

    messages: list[LeaderMessage] = attrs.field(factory=list)
    step: StepCompleted | None = None
    cast_s: float = 0.0
    was_drained: bool = False
    has_given_up: bool = False


def how_many(messages: Sequence[LeaderMessage], max_bytes: int) -> int:
    """Of these, in their order, that fit; one at least. Only prompts are large."""
    num_bytes = 0
    for count, message in enumerate(messages):
        num_bytes += len(message.prompt) if isinstance(message, Submit) else 0
        if num_bytes > max_bytes:
            return max(1, count)
    return len(messages)


def _outcome(done: StepCompleted) -> StepDone:
    """The digest is of what was sampled: the same on all ranks, or the step is worth nothing."""
    tokens = [] if done.output is None else [list(t or ()) for t in done.output.token_ids]
    digest = zlib.crc32(msgspec.msgpack.encode(tokens))
    return StepDone(done.batch_id, digest, done.failure, sorted(done.blamed))


def _read(data: bytes) -> GroupMessage:
    try:
        return decode_group(data)
    except CodecError as error:
        raise GroupBroken(str(error)) from None
