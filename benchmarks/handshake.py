"""handshake: from block allocation on decode to the sender's WaitingForInput on prefill.

Two processes, each a real worker that owns its sockets (PrefillCore and DecodeCore, codec,
ZMQ channel, poller, shared memory); the engine is simulated. Decode admits requests one by
one, then 64 that its loop finds in one look at its inputs. Time is CLOCK_MONOTONIC, which all
processes of a host share: it starts with the event that allocates the blocks and ends when
prefill's core hands out its claim, which it does on entering WaitingForInput.

The peer is what nobody can beat: one hop of raw pyzmq over ipc, a frame of the same size,
both sides blocked in the same poller.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import attrs
import zmq

import pdcore.assembly
from benchmarks.common import RUNS, Result, check, interleave, result_of, row
from pdcore.background import Background
from pdcore.config import CoreLimits
from pdcore.control.codec import pack_token_ids
from pdcore.control.messages import (
    Accepted,
    Claim,
    Finished,
    Handshake,
    LeaderMessage,
    Route,
    RouteRank,
    Stop,
    Submit,
    SubmitSampling,
    WorkerMessage,
)
from pdcore.control.zmq import ZmqChannel
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner
from pdcore.fsm.effects import Effect, SendMessage
from pdcore.fsm.events import Event, TopologyFetched
from pdcore.local import LocalPort
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.prefill import PrefillCore
from pdcore.system_clock import SystemClock
from pdcore.transports import registry
from pdcore.types import Incarnation, Role, RoomKey, SamplingParams

NUM_REQUESTS = 1000
QUICK_REQUESTS = 150
BURST = 64
PROMPT_TOKENS = 512
INSTANCES = {Role.PREFILL: "127.0.0.1:1", Role.DECODE: "127.0.0.1:2"}
LIMITS = CoreLimits(max_running=BURST, num_metadata_slots=2 * BURST)
WAIT_S = 60.0

#: room -> nanoseconds, of the process this runs in
TIMES: dict[int, int] = {}


class TimedDecode(DecodeCore):
    """Notes when the event began that allocated a room's blocks: with the outcome of the vote
    the same call takes them and writes the handshake."""

    def handle_event(self, event: Event, now: float) -> None:
        began_ns = time.monotonic_ns()
        super().handle_event(event, now)
        note(self.rooms.out, Handshake, began_ns)


class TimedPrefill(PrefillCore):
    """Notes when a sender's claim comes out: its state is WaitingForInput then."""

    def poll_effects(self) -> list[Effect]:
        effects = super().poll_effects()
        note(effects, Claim, time.monotonic_ns())
        return effects


class BurstPort(LocalPort):
    """Several messages of the leader at once, as a worker that was busy finds them."""

    def put_all(self, messages: Sequence[LeaderMessage]) -> None:
        self._inbox.extend(messages)
        self.wake()


def note(effects: list[Effect], kind: type[Handshake | Claim], when_ns: int) -> None:
    for effect in effects:
        if isinstance(effect, SendMessage) and isinstance(effect.message, kind):
            TIMES.setdefault(effect.message.key.room, when_ns)


def serve(role: Role, pipe: Connection) -> None:
    """One worker process: leader messages come through the pipe, results go back."""
    pdcore.assembly.DecodeCore = TimedDecode  # type: ignore[misc]
    pdcore.assembly.PrefillCore = TimedPrefill  # type: ignore[misc]
    lock = threading.Lock()

    def answer(message: object) -> None:
        with lock:
            pipe.send(message)

    def on_message(message: WorkerMessage) -> None:
        if isinstance(message, Accepted | Finished):
            answer((type(message).__name__, message.key.room, getattr(message, "failure", None)))

    routes: list[Route] = []
    background = Background()
    channel = ZmqChannel(thread_id=threading.get_ident)
    port = BurstPort(on_message)
    port.wake = background.wake
    options = pdcore.assembly.WorkerOptions(
        role=role,
        instance=INSTANCES[role],
        num_blocks=2 * BURST * (PROMPT_TOKENS // 16 + 2),
        limits=LIMITS,
        sources=(channel,),
        fetch_route=lambda bootstrap: TopologyFetched(bootstrap, routes[0]),
    )
    worker = pdcore.assembly.build_worker(
        SimulatedRunner(SimulatedConfig(num_layers=1, num_kv_heads=1, max_model_len=1024)),
        registry.create("shm", Incarnation(os.urandom(16))),
        channel,
        port,
        options,
        background=background,
    )
    setup = worker.core.setup
    profile = setup.profile()
    host, _, number = channel.address.removeprefix("tcp://").rpartition(":")
    answer(
        Route(
            attn_tp_size=1,
            attn_cp_size=1,
            dp_size=1,
            block_sizes=dict(profile.block_sizes),
            kv_cache_dtype=profile.kv_cache_dtype,
            max_prefill_tokens=profile.max_prefill_tokens,
            ranks={"0,0,0": RouteRank(host, int(number), setup.me.incarnation.hex())},
            instance=INSTANCES[role],
            layout_digest=profile.layout_digest,
            fingerprint=profile.fingerprint,
            transport=profile.transport,
        )
    )

    def listen() -> None:
        while True:
            message = pipe.recv()
            if isinstance(message, Route):
                routes.append(message)
            elif message == "times":
                answer(dict(TIMES))
            else:
                port.put_all(message)
                if isinstance(message[-1], Stop):
                    return

    threading.Thread(target=listen, daemon=True).start()
    worker.run()
    worker.close()


class Pair:
    """Both worker processes, driven from here."""

    def __init__(self, pipes: dict[Role, Connection]) -> None:
        self._pipes = pipes
        self._next_room = 1
        route = self._receive(Role.PREFILL)
        self._receive(Role.DECODE)
        pipes[Role.DECODE].send(route)

    def admit(self, count: int) -> list[int]:
        """``count`` requests at once: prefill has accepted all before decode hears of any.
        Returns their rooms when decode has answered all."""
        rooms = list(range(self._next_room, self._next_room + count))
        self._next_room += count
        requests: list[LeaderMessage] = [request_of(room) for room in rooms]
        self._pipes[Role.PREFILL].send(requests)
        self._await(Role.PREFILL, "Accepted", count)
        self._pipes[Role.DECODE].send(requests)
        self._await(Role.DECODE, "Finished", count)
        return rooms

    def latencies_us(self, rooms: list[int]) -> list[float]:
        """Per room, from allocation to WaitingForInput."""
        began, ended = self._times()
        return [(ended[room] - began[room]) / 1000 for room in rooms]

    def burst_us(self, rooms: list[int]) -> float:
        """From the first allocation to the last WaitingForInput, per request."""
        began, ended = self._times()
        span = max(ended[room] for room in rooms) - min(began[room] for room in rooms)
        return span / 1000 / len(rooms)

    def _times(self) -> tuple[dict[int, int], dict[int, int]]:
        found: list[dict[int, int]] = []
        for role in (Role.DECODE, Role.PREFILL):
            self._pipes[role].send("times")
            answer = self._receive(role)
            while not isinstance(answer, dict):  # prefill's own results, not waited for
                answer = self._receive(role)
            found.append(answer)
        return found[0], found[1]

    def _await(self, role: Role, kind: str, count: int) -> None:
        while count:
            name, room, failure = self._receive(role)  # type: ignore[misc]
            check(failure is None, f"room {room} failed on {role.value}: {failure}")
            count -= name == kind

    def _receive(self, role: Role) -> object:
        check(self._pipes[role].poll(WAIT_S), f"the {role.value} worker is silent")
        return self._pipes[role].recv()


def request_of(room: int) -> Submit:
    return Submit(
        key=RoomKey(room, room),
        request_id=str(room),
        prompt=pack_token_ids([(room + i) % 997 + 3 for i in range(PROMPT_TOKENS)]),
        sampling=SubmitSampling(**attrs.asdict(SamplingParams(max_tokens=1))),
        expires_at_s=SystemClock().unix() + 600.0,
        remaining_s=600.0,
        bootstrap="127.0.0.1:3",
        prefill=INSTANCES[Role.PREFILL],
        decode=INSTANCES[Role.DECODE],
        prefill_dp_rank=0,
        replaces=None,
    )


@contextmanager
def pair() -> Iterator[Pair]:
    context = mp.get_context("spawn")
    pipes: dict[Role, Connection] = {}
    processes = []
    for role in INSTANCES:
        pipes[role], theirs = context.Pipe()
        process = context.Process(target=serve, args=(role, theirs), daemon=True)
        process.start()
        processes.append(process)
    try:
        yield Pair(pipes)
        for pipe in pipes.values():
            pipe.send([Stop(0.0)])
        for process in processes:
            process.join(WAIT_S)
    finally:
        for process in processes:
            process.kill()


# --- the peer: one raw hop --------------------------------------------------------------


def sink(address: str, pipe: Connection) -> None:
    """Answers every frame with the time at which it was read."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.bind(address)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    pipe.send("ready")
    while True:
        poller.poll()
        frame = socket.recv(zmq.DONTWAIT)
        now_ns = time.monotonic_ns()
        if not frame:
            break
        pipe.send(now_ns)
    context.destroy(linger=0)


@contextmanager
def raw_hop(frame_bytes: int) -> Iterator[Callable[[int], list[float]]]:
    """Yields a function: ``count`` frames, one at a time -> microseconds of each."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/hop"
        process = context.Process(target=sink, args=(address, theirs), daemon=True)
        process.start()
        zmq_context = zmq.Context()
        socket = zmq_context.socket(zmq.PUSH)
        check(ours.poll(WAIT_S), "the raw sink did not start")
        ours.recv()
        socket.connect(address)
        frame = b"x" * frame_bytes

        def hops(count: int) -> list[float]:
            found = []
            for _ in range(count):
                began_ns = time.monotonic_ns()
                socket.send(frame)
                check(ours.poll(WAIT_S), "the raw sink is silent")
                found.append((ours.recv() - began_ns) / 1000)
            return found

        try:
            yield hops
            socket.send(b"")
            process.join(WAIT_S)
        finally:
            process.kill()
            zmq_context.destroy(linger=0)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run(quick: bool) -> Result:
    count = (QUICK_REQUESTS if quick else NUM_REQUESTS) // RUNS
    ours: list[list[float]] = []
    raw: list[list[float]] = []
    with pair() as workers, raw_hop(1024) as hops:
        workers.admit(1)

        def one_by_one() -> float:
            rooms = [room for _ in range(count) for room in workers.admit(1)]
            ours.append(workers.latencies_us(rooms))
            return statistics.median(ours[-1])

        def hop() -> float:
            raw.append(hops(count))
            return statistics.median(raw[-1])

        measured = interleave({"ours": one_by_one, "raw": hop})
        ours, raw = ours[1:], raw[1:]  # without the warm-up
        bursts = [workers.burst_us(workers.admit(BURST)) for _ in range(RUNS + 1)]
    peer = "raw pyzmq ipc hop"
    rows = [
        row(
            "handshake p50",
            "allocation to WaitingForInput",
            "us",
            measured["ours"],
            peer,
            measured["raw"],
            better="lower",
            target="<= 1.5x raw hop",
            meets=lambda ratio: ratio <= 1.5,
            limit=statistics.median(measured["raw"]),
        ),
        row(
            "handshake p99",
            "allocation to WaitingForInput",
            "us",
            [percentile(values, 0.99) for values in ours],
            peer,
            [percentile(values, 0.99) for values in raw],
            better="lower",
            target="reported",
        ),
        row(
            f"handshake burst of {BURST}",
            "first allocation to last, per request",
            "us",
            bursts[1:],
            None,
            better="lower",
            target="<= 10 us a request",
            reason="an absolute target of our own",
        ),
    ]
    rows[2]["meets"] = statistics.median(bursts[1:]) <= 10.0
    return result_of("handshake", rows, requests=count * RUNS, prompt_tokens=PROMPT_TOKENS)
