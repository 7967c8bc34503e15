"""Slow calls off the tick: every one is answered, and the loop is woken."""

from __future__ import annotations

import select
import threading

import pytest

from pdcore.background import MAX_COMPUTING, MAX_THREADS, Background
from pdcore.control.messages import Stop
from pdcore.errors import failure
from pdcore.fsm.events import Event, TopologyFetched
from pdcore.local import LocalPort

PATIENCE_S = 20.0


def answer(name: str) -> TopologyFetched:
    return TopologyFetched(name, None, failure("unreachable", name))


def failed(error: BaseException) -> Event:
    return answer(f"failed: {type(error).__name__}")


def is_readable(background: Background, timeout_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(background.fileno(), select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def next_events(
    background: Background, count: int = 1, patience_s: float = PATIENCE_S
) -> list[Event]:
    """Sleeps on the descriptor as the loop does."""
    events: list[Event] = []
    while len(events) < count:
        assert is_readable(background, patience_s)
        events += background.poll()
    return events


@pytest.fixture
def background():
    made = Background()
    yield made
    made.close()


def test_a_call_runs_in_a_thread_and_its_event_wakes_the_loop(background: Background) -> None:
    ran_in: list[int] = []

    def call() -> Event:
        ran_in.append(threading.get_ident())
        return answer("a")

    assert not is_readable(background)
    background.run(call, failed)
    assert next_events(background) == [answer("a")]
    assert ran_in != [threading.get_ident()]
    assert background.poll() == []
    assert not is_readable(background), "the wake-up was taken with its event"


def check_every_call_is_answered(background: Background, patience_s: float = PATIENCE_S) -> None:
    """D45: a lost answer is waited for for ever."""

    def broken() -> Event:
        raise KeyError("a bug in a fetcher")

    def refused() -> Event:
        raise ConnectionRefusedError

    def leaves() -> Event:
        raise SystemExit(3)

    for call in (broken, refused, leaves):
        background.run(call, failed)
        (event,) = next_events(background, patience_s=patience_s)
        assert isinstance(event, TopologyFetched)
        assert event.bootstrap.startswith("failed: ")
    background.run(lambda: answer("still alive"), failed)
    assert next_events(background) == [answer("still alive")]


def test_a_call_that_raises_anything_is_answered_all_the_same(background: Background) -> None:
    check_every_call_is_answered(background)


def test_mutant_that_answers_only_what_it_expected_is_caught() -> None:
    class Silent(Background):
        def _finish(self, done, failed) -> None:
            if done.exception() is None:
                super()._finish(done, failed)

    silent = Silent()
    with pytest.raises(AssertionError):
        check_every_call_is_answered(silent, patience_s=0.05)
    silent.close()


def test_a_slow_call_does_not_hold_up_another(background: Background) -> None:
    go_on = threading.Event()

    def slow() -> Event:
        assert go_on.wait(PATIENCE_S)
        return answer("slow")

    background.run(slow, failed)
    background.run(lambda: answer("fast"), failed)
    assert next_events(background) == [answer("fast")]
    go_on.set()
    assert next_events(background) == [answer("slow")]


def test_waking_from_another_thread_and_far_too_often(background: Background) -> None:
    """A full pipe is a wake-up already pending: nobody blocks, and one poll takes them all."""

    def wake_often() -> None:
        for _ in range(100_000):
            background.wake()

    thread = threading.Thread(target=wake_often)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert is_readable(background)
    assert background.poll() == []
    assert not is_readable(background)


def test_closing_is_idempotent_and_leaves_no_thread() -> None:
    background = Background(num_threads=3)
    names = set()

    def name() -> Event:
        names.add(threading.current_thread())
        return answer("x")

    for _ in range(6):
        background.run(name, failed)
    next_events(background, 6)
    background.close()
    background.close()
    for thread in names:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    background.wake()
    background.run(name, failed)
    assert background.poll() == []


def test_closing_drops_what_never_started_without_an_answer() -> None:
    background = Background(num_threads=1)
    started, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def holds() -> Event:
        started.set()
        assert go_on.wait(PATIENCE_S)
        return answer("late")

    def never() -> Event:
        ran.append("never")
        return answer("never")

    background.run(holds, failed)
    background.run(never, failed)
    assert started.wait(PATIENCE_S)
    background.close()
    go_on.set()
    assert ran == []


def test_d46_a_message_is_never_left_behind_its_wake_up(background: Background) -> None:
    """D46: the loop takes the wake-ups first and the inputs afterwards, and a port that hands
    out a part of its messages wakes for the rest."""
    port = LocalPort()
    port.wake = background.wake
    for _ in range(300):
        port.put(Stop(0.0))
    taken = 0
    while is_readable(background):
        background.poll()
        taken += len(port.receive())
    assert taken == 300


def check_hung_calls_hold_up_nobody(background: Background, patience_s: float) -> None:
    gate = threading.Event()

    def hang() -> Event:
        gate.wait(PATIENCE_S)
        return answer("hung")

    try:
        for _ in range(8):
            background.run(hang, failed)
        background.run(lambda: answer("quick"), lambda error: answer("failed"))
        assert next_events(background, patience_s=patience_s) == [answer("quick")]
    finally:
        gate.set()
        background.close()


def test_servers_that_never_answer_do_not_hold_up_the_others() -> None:
    """vllm-ascend layerwise connector: a pool whose threads all wait for a server that
    accepted and says nothing; here every address may do that."""
    check_hung_calls_hold_up_nobody(Background(), PATIENCE_S)


def test_the_mutant_with_two_threads_is_caught() -> None:
    with pytest.raises(AssertionError):
        # However long one waits: its threads are all held.
        check_hung_calls_hold_up_nobody(Background(num_threads=2), 0.05)


def check_work_and_waiting_do_not_meet(background: Background, patience_s: float) -> None:
    """As many hung calls as there are threads for them, and still what only works is answered;
    then hundreds of long calculations, and a route is fetched all the same."""
    gate = threading.Event()

    def hang() -> Event:
        gate.wait(PATIENCE_S)
        return answer("hung")

    try:
        for _ in range(MAX_THREADS):
            background.run(hang, failed)
        background.compute(lambda: answer("summed"), failed)
        assert next_events(background, patience_s=patience_s) == [answer("summed")]
        gate.set()
        next_events(background, MAX_THREADS)
        gate.clear()
        for _ in range(200):
            background.compute(hang, failed)
        background.run(lambda: answer("fetched"), failed)
        assert next_events(background, patience_s=patience_s) == [answer("fetched")]
        names = [t.name for t in threading.enumerate() if t.name.startswith("pdcore-computing")]
        assert len(names) <= MAX_COMPUTING
    finally:
        gate.set()
        background.close()


def test_calculations_have_few_threads_of_their_own() -> None:
    """Prompts that arrive together would take a core each, or wait behind silent servers."""
    check_work_and_waiting_do_not_meet(Background(), PATIENCE_S)


def test_the_mutant_with_threads_for_both_is_caught() -> None:
    background = Background()
    vars(background)["compute"] = background.run
    with pytest.raises(AssertionError):
        check_work_and_waiting_do_not_meet(background, 0.05)
