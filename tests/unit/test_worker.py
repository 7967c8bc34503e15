"""The worker loop: callers' mistakes, engines that raise, draining, sleeping."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.codec import encode_frames, pack_token_ids
from pdcore.control.messages import (
    Abort,
    Aborted,
    Finished,
    Frame,
    HeartbeatAck,
    LeaderMessage,
    Stop,
    Submit,
    WorkerHealth,
)
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import CodecError, InvalidRequest
from pdcore.fsm.effects import Effect, SendMessage
from pdcore.fsm.events import Event, TopologyFetched
from pdcore.scheduler.decode import DecodeCore, DecodeSnapshot
from pdcore.testing.world import Rank, World, make_world
from pdcore.types import Batch, RoomKey, SamplingParams, StepOutput
from pdcore.worker import MAX_TICKS, Worker, read_submit
from tests.unit.scheduler.kit import DECODE

PROMPT = list(range(10, 30))
FIVE = SamplingParams(max_tokens=5)
PATIENCE_S = 20.0


def submit_of(world: World, **changes: object) -> Submit:
    """The message that ``World.submit`` would put, changed."""
    kept: list[LeaderMessage] = []
    port = world.decode.port
    put, port.put = port.put, kept.append
    world.submit(PROMPT, to=("decode",), sampling=FIVE)
    port.put = put
    (message,) = kept
    return msgspec.structs.replace(message, **changes)


def code(rank: Rank, key: RoomKey) -> str | None:
    result = rank.result(key)
    assert result is not None
    return None if result.failure is None else result.failure.code


# --- requests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda now: {"expires_at_s": now - 5.1}, "deadline_exceeded"),
        (lambda now: {"expires_at_s": now - 4.9}, None),
        (lambda now: {"remaining_s": 0.0}, "deadline_exceeded"),
        (lambda now: {"remaining_s": -7.0}, "deadline_exceeded"),
        (lambda now: {"prompt": b""}, "invalid_request"),
        (lambda now: {"prompt": b"abc"}, "invalid_request"),
        (lambda now: {"prompt": pack_token_ids([5, 1000])}, "invalid_request"),
        (lambda now: {"prompt": b"\xff\xff\xff\xff"}, "invalid_request"),
        (lambda now: {"prompt": pack_token_ids([5] * 512)}, "prompt_too_long"),
        (lambda now: {"bootstrap": ""}, "invalid_request"),
    ],
)
def test_every_mistake_of_a_caller_has_its_answer(
    change: Callable[[float], dict[str, object]], expected: str | None
) -> None:
    """D45, rule 8: clock skew is 5 s. Nothing of it stays, and the next request is served."""
    world = make_world()
    message = submit_of(world, **change(world.clock.unix()))
    world.decode.port.put(message)
    if expected is None:
        world.step()
        assert world.decode.result(message.key) is None
        assert world.decode.worker.core.live_keys() == [message.key]
        return
    world.step()
    assert code(world.decode, message.key) == expected
    assert world.decode.worker.core.live_keys() == []
    assert world.run_request(PROMPT, FIVE) == simulated_tokens(world.model, PROMPT, 5)


def test_read_submit_names_the_field() -> None:
    world = make_world()
    message = submit_of(world, prompt=pack_token_ids([3, 1000]))
    with pytest.raises(InvalidRequest, match="prompt: token id 1000 is not below"):
        read_submit(message, 1000)
    assert read_submit(message, 1001).prompt_token_ids == (3, 1000)
    with pytest.raises(CodecError):
        read_submit(msgspec.structs.replace(message, prompt=b"a"), 1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", math.nan), ("temperature", -1.0), ("top_p", 0.0), ("seed", -5)],
)
def test_sampling_out_of_range_is_the_requests_error(field: str, value: float) -> None:
    """The link's types are wider than what a request may ask for."""
    world = make_world()
    message = submit_of(world, prompt=pack_token_ids(PROMPT))
    sampling = msgspec.structs.replace(message.sampling, **{field: value})
    world.decode.port.put(msgspec.structs.replace(message, sampling=sampling))
    world.step()
    assert code(world.decode, message.key) == "invalid_request"
    assert world.run_request(PROMPT, FIVE) == simulated_tokens(world.model, PROMPT, 5)


def test_an_abort_is_always_answered() -> None:
    world = make_world()
    key = world.submit(PROMPT, sampling=FIVE)
    world.decode.port.put(Abort(key, "gone", False))
    world.decode.port.put(Abort(key, "gone", False))
    world.decode.port.put(Abort(RoomKey(9, 9), "gone", False))
    world.step()
    answers = [m for m in world.decode.said if isinstance(m, Aborted)]
    assert answers == [Aborted(key, True), Aborted(key, False), Aborted(RoomKey(9, 9), False)]
    assert code(world.decode, key) == "cancelled"


# --- frames -----------------------------------------------------------------------------


def test_d40_garbage_on_the_wire_is_counted_and_nothing_else() -> None:
    """D40."""
    world = make_world()
    inbox = world.decode.worker.ports.channel._channel.inbox
    frame = Frame("x", 0, DECODE.incarnation, "tcp://x:1", b"", [HeartbeatAck(1)])
    (good,) = encode_frames(frame)
    inbox.extend([b"", b"\x80\x04garbage", good[:-1], good, bytes(5000)])
    world.step()
    counters = world.decode.worker.counters
    assert (counters.frames_received, counters.frames_garbage) == (5, 4)
    assert world.run_request(PROMPT, FIVE) == simulated_tokens(world.model, PROMPT, 5)


# --- engines ----------------------------------------------------------------------------


class Bomb(BaseException):
    """Not an Exception: the loop must not swallow it."""


def break_once(rank: Rank, error: BaseException) -> list[Batch]:
    """The next step of this rank's engine raises."""
    runner = rank.worker.runner
    run, broken = runner.execute_model, []

    def execute(batch: Batch) -> StepOutput:
        if not broken:
            broken.append(batch)
            raise error
        return run(batch)

    runner.execute_model = execute
    return broken


def check_engine_error_is_isolated(world: World, side: str, error: BaseException) -> None:
    """D45: its batch fails, and the same loop serves the next request."""
    rank = world.ranks[side]
    broken = break_once(rank, error)
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    assert len(broken) == 1
    result = world.decode.result(key)
    assert result is not None
    assert result.failure is not None
    assert result.failure.http_status in (500, 502)
    assert world.run_request(PROMPT, FIVE) == simulated_tokens(world.model, PROMPT, 5)
    world.settle()
    for other in world.ranks.values():
        ledger = other.worker.core.blocks.audit()["full"]
        assert ledger.free == ledger.total


ERRORS = [ValueError("shape"), KeyError(3), MemoryError(), AssertionError(), RecursionError()]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_d45_whatever_an_engine_raises_fails_only_its_batch(side: str, error: Exception) -> None:
    """D45."""
    check_engine_error_is_isolated(make_world(), side, error)


ANSWERS = [
    None,
    7,
    StepOutput([]),
    StepOutput([None]),
    StepOutput([["7"]]),
    StepOutput([[-1]]),
    StepOutput([[1000]]),
    StepOutput([[7], [7]]),
    StepOutput([[7]], [[0.1, 0.2]]),
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_d45_whatever_an_engine_returns_fails_only_its_batch(side: str, answer: object) -> None:
    """D45: an answer that does not fit is as good as none."""
    world = make_world()
    rank = world.ranks[side]
    runner = rank.worker.runner
    run, answered = runner.execute_model, []

    def execute(batch: Batch) -> object:
        if answered:
            return run(batch)
        answered.append(batch)
        return answer

    runner.execute_model = execute
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    assert code(world.decode, key) in ("internal", "prefill_failed")
    assert world.run_request(PROMPT, FIVE) == simulated_tokens(world.model, PROMPT, 5)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_d45_mutant_that_lets_it_end_the_loop_is_caught(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed: any exception in the main loop ends that rank's loop; here the rank falls
    silent, and the check does not find its answer."""
    step = Worker.step
    dead: set[Worker] = set()

    def fragile(self: Worker, max_wait_s: float | None = 0.0) -> bool:
        return False if self in dead else step(self, max_wait_s)

    def unguarded(self: Worker, batch: Batch) -> None:
        try:
            output = self.runner.execute_model(batch)
        except ValueError:
            dead.add(self)
            return
        run_batch(self, batch, output)

    run_batch_of_product = Worker._run_batch

    def run_batch(self: Worker, batch: Batch, output: StepOutput) -> None:
        execute = self.runner.execute_model
        self.runner.execute_model = lambda b: output
        run_batch_of_product(self, batch)
        self.runner.execute_model = execute

    monkeypatch.setattr(Worker, "step", fragile)
    monkeypatch.setattr(Worker, "_run_batch", unguarded)
    with pytest.raises(AssertionError):
        check_engine_error_is_isolated(make_world(), side, ValueError("shape"))


def test_an_end_of_the_process_is_not_swallowed() -> None:
    world = make_world()
    break_once(world.prefill, Bomb())
    world.submit(PROMPT, sampling=FIVE)
    with pytest.raises(Bomb):
        world.run(lambda: False)


# --- draining ---------------------------------------------------------------------------


def drive(world: World, until: Callable[[], bool], *, max_steps: int = 4000) -> None:
    """Steps the ranks that have not stopped, as their processes would."""
    for _ in range(max_steps):
        worked = [r.worker.step(0.0) for r in world.ranks.values() if not r.worker._is_stopped]
        while world.fabric.step() is not None:
            pass
        if until():
            return
        if not any(worked):
            world.jump()
    raise AssertionError({n: r.worker.core.snapshot() for n, r in world.ranks.items()})


def check_stop_drains(world: World) -> None:
    """D59: what runs, transfers included, is finished; new requests are refused."""
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: any(a.kind == "move" for a in world.fabric.pending()))
    for rank in world.ranks.values():
        rank.port.put(Stop(30.0))
    late = world.submit(PROMPT, sampling=FIVE)
    drive(world, lambda: all(r.worker._is_stopped for r in world.ranks.values()))
    for rank in world.ranks.values():
        assert code(rank, late) == "shutting_down"
        assert code(rank, key) is None
        assert rank.worker.core.live_keys() == []
        assert rank.worker.close() == []
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)


def test_d59_stop_finishes_what_runs_and_ends_the_loop() -> None:
    """D59."""
    check_stop_drains(make_world(stepped=True))


def test_d59_mutant_that_ends_with_the_message_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed's shutdown waits for nothing that is queued."""

    def at_once(self: Worker, now: float) -> None:
        self._is_stopped = self._drain_until_s is not None

    monkeypatch.setattr(Worker, "_check_drained", at_once)
    with pytest.raises(AssertionError):
        check_stop_drains(make_world(stepped=True))


def check_drain_deadline_holds(world: World) -> None:
    """D59: also for a decode that has a batch in every iteration."""
    long = SamplingParams(max_tokens=400)
    key = world.submit(PROMPT, sampling=long)
    world.run(lambda: len(world.decode.tokens(key)) > 3)
    world.decode.port.put(Stop(5.0))
    for _ in range(10):
        world.step()
        world.clock.advance(1.0)
    assert world.decode.worker._is_stopped
    assert code(world.decode, key) == "shutting_down"
    spoken = world.decode.tokens(key)
    assert 3 < len(spoken) < 20
    assert world.decode.worker.core.live_keys() == []


def test_d59_the_drain_deadline_aborts_the_rest() -> None:
    """D59."""
    check_drain_deadline_holds(make_world())


def test_d59_mutant_that_looks_only_when_idle_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    check_drained = Worker._check_drained

    def when_idle(self: Worker, now: float) -> None:
        if not isinstance(self.core, DecodeCore) or not len(self.core.running):
            check_drained(self, now)

    monkeypatch.setattr(Worker, "_check_drained", when_idle)
    with pytest.raises(AssertionError):
        check_drain_deadline_holds(make_world())


def test_an_idle_worker_stops_at_once() -> None:
    world = make_world()
    world.prefill.port.put(Stop(1000.0))
    world.step()
    assert world.prefill.worker._is_stopped
    world.prefill.worker.run()


def test_a_stop_from_another_thread_is_not_undone_by_draining() -> None:
    """It may come while the loop decides that it has to go on draining."""
    world = make_world()
    world.submit(PROMPT, sampling=SamplingParams(max_tokens=100))
    for _ in range(3):
        world.step()
    worker = world.decode.worker
    world.decode.port.put(Stop(100.0))
    live = worker.core.live_keys

    def stopped_meanwhile() -> list[RoomKey]:
        worker.stop()
        return live()

    worker.core.live_keys = stopped_meanwhile
    worker.step(0.0)
    assert worker._is_stopped


def test_stop_wakes_a_loop_that_sleeps() -> None:
    world = make_world()
    worker = world.decode.worker
    sleeping, woken = threading.Event(), threading.Event()

    def sleep(timeout_s: float | None) -> None:
        sleeping.set()
        assert woken.wait(PATIENCE_S)

    worker.ports.wait = sleep
    worker.background.wake = woken.set
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    assert sleeping.wait(PATIENCE_S)
    worker.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


# --- health -----------------------------------------------------------------------------


def test_health_is_told_at_intervals_with_problems_and_counters() -> None:
    world = make_world(limits=CoreLimits(heartbeat_interval_s=2.0))
    worker = world.decode.worker
    worker.problems = lambda: ["no bootstrap server"]
    for _ in range(9):
        worker.step(0.0)
        world.clock.advance(0.5)
    reports = [m for m in world.decode.said if isinstance(m, WorkerHealth)]
    assert len(reports) == 3
    assert {r.rank for r in reports} == {0}
    assert {tuple(r.problems) for r in reports} == {("no bootstrap server",)}
    counters = reports[-1].counters
    assert counters["frames_received"] == 0.0
    assert {"pending", "prealloc", "transfer", "running", "steps"} <= counters.keys()
    assert "kv_usage" not in counters, "numbers only"


def test_d17_a_divergence_makes_the_rank_not_ready() -> None:
    """Section 9: the instance is Unhealthy and the group must be restarted."""
    world = make_world()
    world.decode.worker.core.rooms.is_diverged = True
    world.decode.worker.step(0.0)
    (report,) = [m for m in world.decode.said if isinstance(m, WorkerHealth)]
    assert any("restart" in problem for problem in report.problems)


# --- sleeping ---------------------------------------------------------------------------


def slept(world: World, max_wait_s: float | None = None) -> float | None:
    """How long decode's loop wants to sleep after one more iteration."""
    asked: list[float | None] = []
    world.decode.worker.ports.wait = asked.append
    assert not world.decode.worker.step(max_wait_s)
    (timeout_s,) = asked
    return timeout_s


def test_d46_the_loop_sleeps_until_the_next_thing_is_due() -> None:
    """D46: health, timers of the core, the end of the drain; never a fixed poll."""
    world = make_world(limits=CoreLimits(heartbeat_interval_s=50.0, topology_ttl_s=200.0))
    assert slept(world) == 50.0
    world.clock.advance(20.0)
    assert slept(world) == 30.0
    assert slept(world, 0.25) == 0.25
    world.decode.worker.executor.fetch_route = lambda b: route_later(world, b)
    world.submit(PROMPT, to=("decode",), sampling=FIVE, timeout_s=7.0)
    slept(world)
    world.decode.worker.step(0.0)
    assert slept(world) == 0.5, "the route is asked again"
    world.decode.port.put(Stop(0.2))
    assert slept(world) == pytest.approx(0.2)


def route_later(world: World, bootstrap: str) -> TopologyFetched:
    return TopologyFetched(bootstrap, None)


class Restless:
    """A core whose every event causes the next effect."""

    def __init__(self, world: World, rounds: int) -> None:
        self._core = world.decode.worker.core
        self.setup = self._core.setup
        self.rooms = self._core.rooms
        self.left = rounds
        self.out: list[Effect] = []

    def poll_deadline(self) -> float | None:
        return None

    def schedule(self, now: float) -> Batch | None:
        return None

    def live_keys(self) -> list[RoomKey]:
        return []

    def snapshot(self) -> DecodeSnapshot:
        return self._core.snapshot()

    @property
    def wants_tick(self) -> bool:
        return False

    def poll_effects(self) -> list[Effect]:
        if not self.left:
            return []
        self.left -= 1
        return [SendMessage(DECODE, HeartbeatAck(1))]

    def handle_event(self, event: Event, now: float) -> None:
        return None


@pytest.mark.parametrize(("rounds", "timeout_s"), [(MAX_TICKS - 1, 1.0), (MAX_TICKS * 3, 0.0)])
def test_d46_a_loop_that_did_not_come_to_rest_does_not_sleep(rounds: int, timeout_s: float) -> None:
    world = make_world()
    world.decode.worker.core = Restless(world, rounds)
    assert slept(world) == timeout_s


def test_d46_results_of_scheduling_are_sent_before_the_sleep() -> None:
    """The last running request outgrew the pool: nothing runs, and its client is told now."""
    world = make_world(num_blocks=5, limits=CoreLimits(num_reserved_decode_tokens=0))
    key = world.submit([5] * 9, sampling=SamplingParams(max_tokens=50))
    world.run(lambda: len(world.decode.tokens(key)) == 7)
    told_before_sleep: list[bool] = []
    world.decode.worker.ports.wait = lambda timeout_s: told_before_sleep.append(
        world.decode.result(key) is not None
    )
    for _ in range(5):
        world.decode.worker.step(0.0)
        if told_before_sleep:
            break
    assert told_before_sleep == [True]
    assert code(world.decode, key) == "out_of_memory"


def test_d46_a_wake_up_is_never_taken_before_its_message() -> None:
    """D46: a message put right after the loop looked at the port has its wake-up left."""
    world = make_world()
    worker, port = world.decode.worker, world.decode.port
    receive, order = port.receive, []

    class Wakes:
        pending = 0

    def wake() -> None:
        Wakes.pending += 1

    poll = worker.background.poll

    def take_wakes() -> list[Event]:
        order.append("wakes")
        Wakes.pending = 0
        return poll()

    def receive_then_put(limit: int = 256) -> list[LeaderMessage]:
        order.append("port")
        taken = receive(limit)
        port.put(Stop(1.0))
        return taken

    port.wake = wake
    worker.background.poll = take_wakes
    port.receive = receive_then_put
    worker.step(0.0)
    assert order == ["wakes", "port"]
    assert Wakes.pending == 1, "the descriptor stays readable: the loop does not sleep"


def test_close_releases_everything_once() -> None:
    world = make_world()
    world.run_request(PROMPT, FIVE)
    for rank in world.ranks.values():
        assert rank.worker.close() == []
        assert rank.worker.close() == []
        assert rank.worker.runner._cache is None
    assert world.network._channels == {}


def test_finished_is_the_last_word_of_a_request() -> None:
    world = make_world()
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    world.settle()
    kinds = [type(m).__name__ for m in world.decode.said if "key" in dir(m) or "keys" in dir(m)]
    assert kinds[0] == "Accepted"
    assert kinds[-1] == "Finished"
    assert kinds.count("Finished") == 1
    assert isinstance(world.decode.result(key), Finished)
