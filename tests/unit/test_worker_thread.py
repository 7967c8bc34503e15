"""A worker's loop in a thread: begun warm, ended by word or by error, nothing left open."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence

import pytest

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.control.messages import Finished, LeaderMessage, WorkerMessage
from pdcore.control.zmq import ZmqChannel
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner
from pdcore.errors import EngineError
from pdcore.local import LocalPort, local_route
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import GenerateRequest, Incarnation, Role, RoomKey, SamplingParams
from pdcore.worker import Worker
from pdcore.worker_thread import WorkerThread

PATIENCE_S = 20.0


class NotedRunner(SimulatedRunner):
    """Notes which thread warmed it up; may refuse to."""

    def __init__(self, *, is_broken: bool = False) -> None:
        super().__init__(SimulatedConfig(block_size=4, max_model_len=256))
        self.warmed_in = ""
        self.is_broken = is_broken

    def warm_up(self) -> None:
        if self.is_broken:
            raise EngineError("no device")
        self.warmed_in = threading.current_thread().name


def make_worker(
    role: Role,
    port: LocalPort,
    fabric: LoopbackFabric,
    runner: NotedRunner,
    prefills: Sequence[Worker] = (),
) -> Worker:
    route = local_route([w.core.setup for w in prefills]) if prefills else None
    transport = LoopbackTransport(Incarnation(role.value[:1].encode() * 16), fabric)
    options = WorkerOptions(role, role.value, 64, fetch_route=route)
    return build_worker(runner, transport, ZmqChannel(), port, options)


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


def test_two_workers_in_two_threads_serve_a_request(fabric: LoopbackFabric) -> None:
    """The channel is made in this thread and used in the worker's; starting a thread hands
    it over."""
    news: queue.Queue[WorkerMessage] = queue.Queue()
    ports = LocalPort(), LocalPort(news.put)
    runner = NotedRunner()
    prefill = make_worker(Role.PREFILL, ports[0], fabric, NotedRunner())
    decode = make_worker(Role.DECODE, ports[1], fabric, runner, [prefill])
    key = RoomKey(1, 1)
    request = GenerateRequest(key, "r", (5, 6, 7), SamplingParams(max_tokens=6), 4e9, 60.0, "here")
    with WorkerThread(prefill) as first, WorkerThread(decode) as second:
        assert runner.warmed_in == "worker-decode-0"
        for port in ports:
            port.submit(request)
        message = news.get(timeout=PATIENCE_S)
        while not isinstance(message, Finished):
            message = news.get(timeout=PATIENCE_S)
        assert (message.finish_reason, message.completion_tokens) == ("length", 6)
    assert first.stop() == second.stop() == []
    assert threading.active_count() == 1 or not any(
        thread.name.startswith("worker-") for thread in threading.enumerate()
    )


def test_a_port_drains_and_ends_the_loop(fabric: LoopbackFabric) -> None:
    """D59: nothing left, so the loop ends by itself, long before the drain time."""
    ends: list[bool] = []
    port = LocalPort()
    thread = WorkerThread(make_worker(Role.PREFILL, port, fabric, NotedRunner()), ends.append)
    thread.start()
    assert not thread.join(0.0)
    port.stop(drain_s=1000.0)
    assert thread.join(PATIENCE_S)
    assert thread.stop() == []
    assert ends == [True]


def test_a_runner_that_cannot_warm_up_is_the_starters_error(
    fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))
    ends: list[bool] = []
    worker = make_worker(Role.PREFILL, LocalPort(), fabric, NotedRunner(is_broken=True))
    thread = WorkerThread(worker, ends.append)
    with pytest.raises(EngineError, match="could not warm up"):
        thread.start()
    assert thread.stop() == []
    assert (ends, shown) == ([False], [EngineError])


def test_a_loop_that_fails_says_so(fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    ends: list[bool] = []

    class Broken(LocalPort):
        def receive(self, limit: int = 256) -> list[LeaderMessage]:
            raise RuntimeError("the host's own mistake")

    thread = WorkerThread(make_worker(Role.PREFILL, Broken(), fabric, NotedRunner()), ends.append)
    thread.start()
    assert thread.join(PATIENCE_S)
    assert thread.stop() == []
    assert ends == [False]


def test_d45_a_listener_that_fails_costs_its_message_not_the_loop(fabric: LoopbackFabric) -> None:
    """D45: the callback is the host's, the loop serves everybody."""
    heard = threading.Event()
    calls = itertools.count()

    def listen(message: WorkerMessage) -> None:
        if next(calls):
            heard.set()
        raise RuntimeError("the host's own mistake")

    thread = WorkerThread(make_worker(Role.PREFILL, LocalPort(listen), fabric, NotedRunner()))
    thread.start()
    try:
        assert heard.wait(PATIENCE_S), "the loop ended with its first message"
    finally:
        assert thread.stop(PATIENCE_S) == []


def test_one_that_never_started_is_closed_too(fabric: LoopbackFabric) -> None:
    worker = make_worker(Role.PREFILL, LocalPort(), fabric, NotedRunner())
    thread = WorkerThread(worker)
    assert thread.stop() == []
    assert worker.ports.transport.fileno() is None


def test_a_runner_that_hangs_is_given_up(fabric: LoopbackFabric) -> None:
    """``stop`` returns, releases nothing that the loop still uses, and may be tried again."""
    held, go_on = threading.Event(), threading.Event()

    def listen(message: WorkerMessage) -> None:
        held.set()
        go_on.wait(PATIENCE_S)

    worker = make_worker(Role.PREFILL, LocalPort(listen), fabric, NotedRunner())
    thread = WorkerThread(worker)
    thread.start()
    assert held.wait(PATIENCE_S)
    assert thread.stop(0.01) == ["worker-prefill-0 has not ended within 0.01 s"]
    assert worker.ports.transport.fileno() is not None
    go_on.set()
    assert thread.stop(PATIENCE_S) == []
    assert worker.ports.transport.fileno() is None
