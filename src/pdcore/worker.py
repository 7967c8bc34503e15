"""The worker loop: one thread that feeds a core and carries out its effects.

Event-driven: it sleeps in one poller on the control channel, the leader link, the
transport's doorbell and a wake-up descriptor, until the core's next deadline (D46). It owns
every socket of the rank (D24). It has no per-role branch: the roles differ in the core
(R42). Nothing a request, a peer or the engine does ends the loop (D45).

Thread-safety: everything here belongs to the thread that calls :meth:`Worker.run` or
:meth:`Worker.step`; other threads may only call :meth:`Worker.stop` and use the leader
port's own thread-safe side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import msgspec

from pdcore.background import BackgroundCalls
from pdcore.clock import Clock
from pdcore.control.base import ControlChannel
from pdcore.control.codec import decode_frame, unpack_token_ids
from pdcore.control.messages import (
    Abort,
    Aborted,
    Finished,
    LeaderMessage,
    Stop,
    Submit,
    WorkerHealth,
    WorkerMessage,
)
from pdcore.engine.base import GroupLost, ModelRunner
from pdcore.errors import (
    CodecError,
    EngineError,
    GroupBroken,
    InvalidRequest,
    Overloaded,
    RoomInUse,
    failure,
)
from pdcore.executor import Executor
from pdcore.fsm.effects import Effect
from pdcore.fsm.events import Event, MessageReceived, RequestRefused, StepCompleted
from pdcore.guard import Raised, attempt
from pdcore.health import Watch
from pdcore.scheduler.ledger import Rooms
from pdcore.scheduler.outputs import check_output
from pdcore.scheduler.setup import CoreSetup
from pdcore.transports.base import Transport
from pdcore.types import (
    Batch,
    Failure,
    GenerateRequest,
    PeerRef,
    RoomKey,
    SamplingParams,
)

log = logging.getLogger(__name__)

#: Ticks one loop iteration may take before it looks at its inputs again.
MAX_TICKS = 8


class Core(Protocol):
    """What the loop needs of a core; PrefillCore and DecodeCore have it."""

    setup: CoreSetup

    @property
    def rooms(self) -> Rooms: ...

    def submit(self, request: GenerateRequest, now: float) -> None: ...

    def abort(
        self, key: RoomKey, reason: Failure, now: float, *, unless_received: bool = False
    ) -> bool: ...

    def handle_event(self, event: Event, now: float) -> None: ...

    def handle_timeout(self, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def schedule(self, now: float) -> Batch | None: ...

    def poll_effects(self) -> list[Effect]: ...

    def poll_deadline(self) -> float | None: ...

    def live_keys(self) -> list[RoomKey]: ...

    def snapshot(self) -> msgspec.Struct: ...

    @property
    def wants_tick(self) -> bool: ...


class LeaderPort(Protocol):
    """Where requests come from and results go: a ZMQ link, or a queue in this process."""

    def receive(self, limit: int = 256) -> list[LeaderMessage]: ...

    def send(self, message: WorkerMessage) -> None: ...


@attrs.define(eq=False)
class Ports:
    """Everything a worker talks to."""

    transport: Transport
    channel: ControlChannel
    leader: LeaderPort
    #: Blocks until an input is ready or the timeout (seconds, None: for ever) passes.
    wait: Callable[[float | None], object]


class Worker:
    """One rank. ``runner`` is called from this loop only."""

    def __init__(
        self,
        core: Core,
        runner: ModelRunner,
        ports: Ports,
        executor: Executor,
        background: BackgroundCalls,
        clock: Clock,
    ) -> None:
        self.core = core
        self.runner = runner
        self.ports = ports
        self.executor = executor
        self.background = background
        self.clock = clock
        self.watch = Watch()
        self.counters = self.watch.counters
        #: Reasons why this rank is not ready, asked for every health report.
        self.problems: Callable[[], list[str]] = list
        self._next_health_s = 0.0
        self._drain_until_s: float | None = None
        self._is_stopped = False

    # --- the loop -----------------------------------------------------------------------

    def run(self) -> None:
        """Until :meth:`stop`, which ends it at once, or a Stop message, which drains first."""
        while not self._is_stopped:
            self.step(None)

    def step(self, max_wait_s: float | None = 0.0) -> bool:
        """One iteration; True when a batch was run. Sleeps at most ``max_wait_s`` seconds
        (None: until something happens or is due)."""
        now = self.clock.monotonic()
        self._receive(now)
        deadline = self.core.poll_deadline()
        if deadline is not None and deadline <= now:
            self.core.handle_timeout(now)
        self._settle(now)
        self._report_health(now)
        # Before the batch: who decodes all the time would never see its drain end (D59).
        self._check_drained(now)
        batch = self.core.schedule(now)
        if batch is not None:
            self._run_batch(batch)
            return True
        # Scheduling may end requests without giving a batch: their results must not sleep.
        is_settled = self._settle(now)
        if not self._is_stopped:
            self.ports.wait(self._sleep_s(max_wait_s) if is_settled else 0.0)
        return False

    def stop(self) -> None:
        """End the loop after the current iteration. Callable from any thread."""
        self._is_stopped = True
        self.background.wake()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Release transport, channel, runner; returns what had to be left behind."""
        self.background.close()
        self.executor.summing.memory.clear()
        left = self.ports.transport.close(timeout_s)
        self.ports.channel.close()
        self.runner.shutdown()
        return left

    # --- in -----------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        # Takes the wake-ups, so it comes first: a message that is put while we look at the
        # other inputs has its own wake-up left and is not slept on (D46).
        for event in self.executor.answers():
            self.core.handle_event(event, now)
        for message in self.ports.leader.receive():
            self._handle_leader(message, now)
        for data in self.ports.channel.receive():
            self._handle_frame(data, now)
        for event in self.executor.poll():
            self.core.handle_event(event, now)

    def _handle_frame(self, data: bytes, now: float) -> None:
        """A frame that cannot be read is counted, nothing else (D40)."""
        self.counters.frames_received += 1
        try:
            frame = decode_frame(data)
        except CodecError as error:
            self.watch.garbage_frame(error, now)
            return
        sender = PeerRef(frame.instance, frame.rank, frame.incarnation, frame.reply_to)
        for message in frame.messages:
            self.core.handle_event(MessageReceived(sender, frame.to_incarnation, message), now)

    def _handle_leader(self, message: LeaderMessage, now: float) -> None:
        if isinstance(message, Submit):
            reason = self._submit(message, now)
            if reason is not None and message.key in self.core.live_keys():
                # A repeated Submit: the dispatch it repeats will have its own result.
                log.warning("ignored a repeated submit of %s", message.key)
            elif reason is not None:
                finished = Finished(message.key, "error", reason, 0, 0, {})
                self.ports.leader.send(finished)
                if reason.code != "room_in_use":
                    self.core.handle_event(RequestRefused(message.key, reason), now)
        elif isinstance(message, Abort):
            why = failure("cancelled", message.reason)
            applied = self.core.abort(
                message.key, why, now, unless_received=message.unless_received
            )
            self.ports.leader.send(Aborted(message.key, applied))
        elif isinstance(message, Stop):
            self._drain_until_s = now + message.drain_s

    def _submit(self, message: Submit, now: float) -> Failure | None:
        """Why the request was not taken, or None. Every caller's mistake has its answer."""
        skew_s = self.core.setup.limits.clock_skew_s
        if self._drain_until_s is not None:
            return failure("shutting_down", "this instance is draining; retry on another one")
        if self.clock.unix() > message.expires_at_s + skew_s:
            return failure("deadline_exceeded", "the request arrived after its deadline")
        try:
            request = read_submit(message, self.runner.vocab_size)
            self.core.submit(request, now)
        except RoomInUse as error:
            return failure("room_in_use", str(error))
        except Overloaded as error:
            return failure("overloaded", str(error))
        except (InvalidRequest, CodecError) as error:
            return failure("invalid_request", str(error))
        return None

    # --- out ----------------------------------------------------------------------------

    def _settle(self, now: float) -> bool:
        """Tick and carry out effects until nothing changes any more, bounded. False: the
        bound was met first, and the next iteration must follow at once."""
        core, executor = self.core, self.executor
        for _ in range(MAX_TICKS):
            if core.wants_tick:
                core.tick(now)
            effects = core.poll_effects()
            if not effects:
                return True
            for event in executor.execute(effects, now):
                core.handle_event(event, now)
        return False

    def _run_batch(self, batch: Batch) -> None:
        """Effects that the batch's scheduling caused go out first, results right after."""
        done = execute(self.runner, batch)
        now = self.clock.monotonic()
        self.watch.ran(batch)
        self.core.handle_event(done, now)
        self._settle(now)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("step=%d %r %s", self.counters.steps, batch, self.core)

    def health(self) -> WorkerHealth:
        """Counters, and why this rank is not ready (empty: it is)."""
        reasons = attempt(self.problems, "asking for problems failed")
        if isinstance(reasons, Raised):
            reasons = [f"asking for its problems raised {reasons}"]
        return self.watch.health(self.core, reasons, self.clock.monotonic())

    def _report_health(self, now: float) -> None:
        if now >= self._next_health_s:
            self._next_health_s = now + self.core.setup.limits.heartbeat_interval_s
            self.watch.audit_at_rest(self.core)
            self.ports.leader.send(self.health())

    def _check_drained(self, now: float) -> None:
        """While draining: stop when nothing is left, or abort what is when time is up."""
        if self._drain_until_s is None:
            return
        left = self.core.live_keys()
        if left and now >= self._drain_until_s:
            why = failure("shutting_down", "this instance stopped before the request ended")
            for key in left:
                self.core.abort(key, why, now)
            self._settle(now)
            left = []
        if not left:
            # Never the other way: another thread may have asked for the end meanwhile.
            self._is_stopped = True

    def _sleep_s(self, max_wait_s: float | None) -> float | None:
        due_s = self._next_health_s
        for moment_s in (self.core.poll_deadline(), self._drain_until_s):
            if moment_s is not None and moment_s < due_s:
                due_s = moment_s
        wait_s = 0.0 if self.core.wants_tick else max(0.0, due_s - self.clock.monotonic())
        return wait_s if max_wait_s is None else min(wait_s, max_wait_s)


def execute(runner: ModelRunner, batch: Batch) -> StepCompleted:
    """One step of the engine. A user's runner may raise anything; its batch fails, the loop
    goes on (D45). Raises GroupBroken where the runner has lost its group: it can never run
    again, and the process must end."""

    def run() -> StepCompleted:
        try:
            output = runner.execute_model(batch)
            checked = check_output(batch, output, runner.vocab_size)
        except GroupLost:
            raise
        except EngineError as error:
            blamed = error.seq_ids.intersection(batch.seq_ids)
            return StepCompleted(batch.batch_id, None, failure("internal", str(error)), blamed)
        return StepCompleted(batch.batch_id, checked)

    done = attempt(run, "the model runner failed on %r", batch)
    if isinstance(done, Raised):
        if isinstance(done.error, GroupLost):
            raise GroupBroken(str(done.error)) from done.error
        why = f"the model runner raised {type(done.error).__name__}"
        return StepCompleted(batch.batch_id, None, failure("internal", why))
    return done


def read_submit(message: Submit, vocab_size: int) -> GenerateRequest:
    """The request a leader sent. Raises InvalidRequest or CodecError naming the field, also
    where the sampling parameters are out of range."""
    prompt: Sequence[int] = unpack_token_ids(message.prompt)
    if prompt and max(prompt) >= vocab_size:
        raise InvalidRequest(
            "prompt", f"token id {max(prompt)} is not below the vocabulary size {vocab_size}"
        )
    s = message.sampling
    return GenerateRequest(
        key=message.key,
        request_id=message.request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            s.max_tokens,
            s.min_tokens,
            s.temperature,
            s.top_p,
            s.top_k,
            s.seed,
            s.stop_token_ids,
            s.ignore_eos,
            s.logprobs,
            s.top_logprobs,
        ),
        expires_at_s=message.expires_at_s,
        remaining_s=message.remaining_s,
        bootstrap=message.bootstrap,
        prefill=message.prefill,
        decode=message.decode,
        prefill_dp_rank=message.prefill_dp_rank,
        replaces=message.replaces,
        is_local=message.is_local,
    )
