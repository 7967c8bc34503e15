"""A leader port inside one process: what other threads may call, and what the worker sees."""

from __future__ import annotations

import threading

import attrs
import pytest

from pdcore.control.codec import unpack_token_ids
from pdcore.control.messages import Abort, Accepted, LeaderMessage, Stop, Submit, WorkerMessage
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import CodecError
from pdcore.local import LocalPort, local_route, submit_message
from pdcore.testing.world import World, make_world
from pdcore.types import GenerateRequest, RoomKey, SamplingParams
from pdcore.worker import read_submit
from tests.unit.scheduler.kit import PREFILL, make_setup

KEY = RoomKey(3, 4)


def request(prompt: tuple[int, ...] = (5, 6)) -> GenerateRequest:
    sampling = SamplingParams(9, 1, 0.5, 0.9, 7, 11, (2, 3), True, True, 0)
    return GenerateRequest(KEY, "r", prompt, sampling, 99.0, 9.0, "b:1", "p:1", "d:1", 2, 8)


@pytest.mark.parametrize("dp_rank", [None, 0, 2])
def test_a_worker_reads_back_the_request_that_was_submitted(dp_rank: int | None) -> None:
    """R60: a dp rank that nobody named is not 0 on the way."""
    sent = attrs.evolve(request(), prefill_dp_rank=dp_rank)
    found = read_submit(submit_message(sent), vocab_size=10)
    names = [name for name in GenerateRequest.__slots__ if name != "__weakref__"]
    assert [getattr(found, n) for n in names] == [getattr(sent, n) for n in names]


def test_a_token_id_that_does_not_fit_is_the_callers_error() -> None:
    port = LocalPort()
    with pytest.raises(CodecError, match="token id"):
        port.submit(request((1, 1 << 31)))
    assert port.receive() == []


def test_messages_come_in_order_and_each_wakes_the_loop() -> None:
    port, wakes = LocalPort(), []
    port.wake = lambda: wakes.append(1)
    port.submit(request())
    port.abort(KEY, "gone", unless_received=True)
    port.stop(1.5)
    assert len(wakes) == 3
    submit, abort, stop = port.receive()
    assert isinstance(submit, Submit)
    assert unpack_token_ids(submit.prompt) == [5, 6]
    assert (abort, stop) == (Abort(KEY, "gone", True), Stop(1.5))


def test_what_is_left_behind_a_limit_wakes_the_loop_again() -> None:
    """D46: the wake-ups of what was not taken may be spent already."""
    port, wakes = LocalPort(), []
    for _ in range(3):
        port.stop()
    port.wake = lambda: wakes.append(1)
    assert len(port.receive(2)) == 2
    assert wakes == [1]
    assert len(port.receive(2)) == 1
    assert wakes == [1]


def test_a_port_without_a_listener_drops_what_the_worker_says() -> None:
    port = LocalPort()
    port.send(Accepted(KEY))
    heard: list[WorkerMessage] = []
    port.on_message = heard.append
    port.send(Accepted(KEY))
    assert heard == [Accepted(KEY)]


def test_messages_of_many_threads_are_all_taken() -> None:
    port = LocalPort()
    threads = [threading.Thread(target=lambda: [port.stop() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken: list[LeaderMessage] = []
    while len(taken) < 2000:
        taken += port.receive()
    for thread in threads:
        thread.join()
    assert port.receive() == []


def test_a_local_route_answers_for_every_bootstrap_address() -> None:
    setup = make_setup(PREFILL)
    found = local_route([setup])("anywhere:1")
    assert found.bootstrap == "anywhere:1"
    assert found.route is not None
    assert found.route.ranks["0,0,0"].incarnation == PREFILL.incarnation.hex()


def check_a_callback_costs_one_message(world: World) -> None:
    """The host's callback fails for one request's messages; another one is served beside it."""
    bad = world.submit([5, 6, 7], sampling=SamplingParams(max_tokens=3))

    def on_message(message: WorkerMessage) -> None:
        if getattr(message, "key", None) == bad:
            raise RuntimeError("the host's queue is closed")
        world.decode.said.append(message)

    world.decode.port.on_message = on_message
    assert world.run_request([8, 9], SamplingParams(max_tokens=3)) == simulated_tokens(
        world.model, [8, 9], 3
    )
    assert world.decode.port.num_lost > 0


def test_d45_a_callback_that_raises_costs_its_message_and_not_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D45."""
    check_a_callback_costs_one_message(make_world())
    monkeypatch.setattr(LocalPort, "send", lambda self, message: self.on_message(message))
    with pytest.raises(RuntimeError, match="queue is closed"):
        check_a_callback_costs_one_message(make_world())
