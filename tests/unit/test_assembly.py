"""Putting a worker together in the one right order, and what it sleeps on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import pytest

from pdcore.assembly import LOOK_S, WorkerOptions, build_worker, make_wait, take_memory
from pdcore.clock import ManualClock
from pdcore.config import CoreLimits
from pdcore.control.codec import decode_endpoint
from pdcore.control.memory import MemoryNetwork
from pdcore.control.messages import Stop, WorkerHealth, WorkerMessage
from pdcore.control.zmq import ZmqChannel
from pdcore.engine.base import Allocate
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner
from pdcore.errors import ConfigError, TransportError
from pdcore.kv.checksums import ByteArray
from pdcore.kv.spec import KVPlacement
from pdcore.local import LocalPort
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.prefill import PrefillCore
from pdcore.testing.world import InlineBackground
from pdcore.transports.base import Region, Revocation
from pdcore.transports.descriptor import decode
from pdcore.transports.loopback import QUARANTINE_S, LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import Incarnation, Role

LIFE = Incarnation(b"L" * 16)
PATIENCE_S = 20.0


class Ordered(LoopbackTransport):
    """Writes down what is asked of it."""

    def __init__(self, log: list[str], fabric: LoopbackFabric, **options: object) -> None:
        super().__init__(LIFE, fabric, **options)
        self.log = log

    def allocate(self, size_bytes: int) -> Region:
        self.log.append("allocate")
        return super().allocate(size_bytes)

    def descriptor(self) -> bytes:
        self.log.append("descriptor")
        return super().descriptor()


@attrs.define(eq=False)
class Parts:
    log: list[str]
    transport: Ordered
    network: MemoryNetwork
    said: list[WorkerMessage]
    port: LocalPort
    runner: SimulatedRunner


@pytest.fixture
def make_parts() -> Iterator[Callable[..., Parts]]:
    made: list[Ordered] = []

    def build(**options: object) -> Parts:
        log: list[str] = []
        transport = Ordered(log, LoopbackFabric(), **options)
        made.append(transport)
        said: list[WorkerMessage] = []

        def hear(message: WorkerMessage) -> None:
            log.append(type(message).__name__)
            said.append(message)

        clock = ManualClock(5.0)
        runner = SimulatedRunner(SimulatedConfig(block_size=4, max_model_len=64))
        return Parts(log, transport, MemoryNetwork(clock), said, LocalPort(hear), runner)

    yield build
    for transport in made:
        transport.close()


def options(role: Role = Role.DECODE, **changes: object) -> WorkerOptions:
    base = WorkerOptions(
        role=role,
        instance="host:1",
        num_blocks=9,
        rank=3,
        limits=CoreLimits(max_running=2),
        clock=ManualClock(5.0),
        wait=lambda timeout_s: None,
    )
    return attrs.evolve(base, **changes)


def check_memory_comes_first(parts: Parts) -> None:
    """D34: memory is registered before anything of this rank can be published."""
    channel = parts.network.channel("me")
    worker = build_worker(
        parts.runner, parts.transport, channel, parts.port, options(), background=InlineBackground()
    )
    assert parts.log == ["allocate", "descriptor"]
    assert parts.network.counters.num_sent == 0
    worker.step(0.0)
    assert parts.log == ["allocate", "descriptor", "WorkerHealth"]
    setup = worker.core.setup
    described = decode(setup.transport_descriptor, "loopback")
    assert set(setup.placement.regions) <= described.regions.keys()


def test_d34_memory_is_registered_before_anything_is_published(make_parts) -> None:
    check_memory_comes_first(make_parts())


def test_d34_mutant_that_describes_itself_first_is_caught(make_parts) -> None:
    """The seed registered with the bootstrap server before its buffers existed."""
    parts = make_parts()
    early = parts.transport.descriptor()
    parts.transport.descriptor = lambda: early
    with pytest.raises(AssertionError):
        check_memory_comes_first(parts)


def test_the_core_learns_who_it_is_and_where_its_memory_lies(make_parts) -> None:
    parts = make_parts()
    channel = parts.network.channel("me")
    setup = take_memory(parts.runner, parts.transport, channel, options())
    assert setup.me == ("host:1", 3, LIFE, "mem://me")
    assert (setup.max_model_len, setup.transport, setup.fingerprint) == (
        64,
        "loopback",
        "simulated",
    )
    assert setup.limits.max_running == 2
    assert setup.placement.num_blocks == 9
    assert setup.eos_token_ids == {2}
    assert setup.spec == parts.runner.kv_cache_spec


def test_r77_memory_is_registered_in_the_order_of_the_entries(make_parts) -> None:
    """R77: of each entry a name, a region, an offset and a stride, layers ascending, the same
    from every start; of each manager key a block size. All of it lies in what is registered."""
    tables = []
    for role in (Role.PREFILL, Role.DECODE):
        parts = make_parts()
        channel = parts.network.channel("me")
        setup = take_memory(parts.runner, parts.transport, channel, options(role))
        endpoint = decode_endpoint(setup.endpoint())
        assert list(endpoint.entry_names) == [
            f"layers.{layer}.{part}" for layer in range(2) for part in "kv"
        ]
        columns = (endpoint.entry_names, endpoint.regions, endpoint.offsets, endpoint.block_strides)
        assert [len(column) for column in columns] == [4] * 4
        assert endpoint.block_sizes == {"full": 4}
        sizes = decode(setup.transport_descriptor, "loopback").regions
        for entry, region, offset, stride in zip(setup.spec.entries, *columns[1:], strict=True):
            last = offset + (endpoint.num_blocks - 1) * stride
            assert last + entry.item_len <= sizes[region]
        tables.append((columns, sizes))
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("revocation", "quarantine_s"),
    [
        (Revocation.SENDER_ACK, 0.0),
        (Revocation.RECEIVER_ENFORCED, 0.0),
        (Revocation.QUARANTINE, QUARANTINE_S),
    ],
)
def test_what_the_transport_declares_reaches_the_core(
    make_parts, revocation: Revocation, quarantine_s: float
) -> None:
    parts = make_parts(revocation=revocation)
    channel = parts.network.channel("me")
    setup = take_memory(parts.runner, parts.transport, channel, options())
    assert setup.quarantine_s == quarantine_s


@pytest.mark.parametrize(("role", "core"), [(Role.PREFILL, PrefillCore), (Role.DECODE, DecodeCore)])
def test_the_role_is_the_core(make_parts, role: Role, core: type) -> None:
    """R42: nothing else in the worker knows it."""
    parts = make_parts()
    channel = parts.network.channel("me")
    worker = build_worker(
        parts.runner,
        parts.transport,
        channel,
        parts.port,
        options(role),
        background=InlineBackground(),
    )
    assert type(worker.core) is core
    assert worker.close() == []


def test_too_little_memory_is_the_transport_s_error(make_parts) -> None:
    parts = make_parts()
    with pytest.raises(TransportError, match="memory"):
        take_memory(
            parts.runner, parts.transport, parts.network.channel("me"), options(num_blocks=1 << 50)
        )


def test_without_a_way_to_ask_for_routes_the_answer_says_so(make_parts) -> None:
    parts = make_parts()
    worker = build_worker(
        parts.runner,
        parts.transport,
        parts.network.channel("me"),
        parts.port,
        options(),
        background=InlineBackground(),
    )
    answer = worker.executor.fetch_route("b:1")
    assert answer.failure is not None
    assert "set fetch_route" in answer.failure.detail


# --- sleeping ---------------------------------------------------------------------------


def returns_within(wait: Callable[[float | None], object], timeout_s: float | None) -> bool:
    """In a thread, so that a wait for ever fails the test instead of hanging it."""
    thread = threading.Thread(target=wait, args=(timeout_s,), daemon=True)
    thread.start()
    thread.join(PATIENCE_S if timeout_s is None else PATIENCE_S + timeout_s)
    return not thread.is_alive()


@pytest.fixture
def pipes() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(3)]
    yield made
    for one, other in made:
        one.close()
        other.close()


def test_d46_a_sleep_ends_with_any_descriptor(pipes) -> None:
    """D46: channel, transport and background are one poller."""
    wait = make_wait((), [reader.fileno() for reader, _ in pipes])
    assert wait(0.0) == []
    for reader, writer in pipes:
        writer.send(b"x")
        assert returns_within(wait, None)
        reader.recv(1)
    assert wait(0.001) == []


def test_a_sleep_is_rounded_up_so_that_nobody_spins_before_a_deadline(pipes) -> None:
    start = time.monotonic()
    make_wait((), [pipes[0][0].fileno()])(0.0101)
    assert time.monotonic() - start >= 0.0101


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_part_without_a_descriptor_is_looked_at_every_millisecond(pipes, missing: int) -> None:
    fds = [None if i == missing else pipe[0].fileno() for i, pipe in enumerate(pipes)]
    assert returns_within(make_wait((), fds), None)
    assert returns_within(make_wait((), fds), 3600.0)
    assert LOOK_S == 0.001


@pytest.fixture
def channel() -> Iterator[ZmqChannel]:
    made = ZmqChannel("127.0.0.1", "127.0.0.1")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("has_transport", "has_background"), [(False, True), (True, False), (False, False)]
)
def test_d46_also_beside_zmq_sources(
    channel: ZmqChannel, pipes, has_transport: bool, has_background: bool
) -> None:
    """A transport without a doorbell was slept on beside ZMQ sockets."""
    fds = [
        channel.fileno(),
        pipes[0][0].fileno() if has_transport else None,
        pipes[1][0].fileno() if has_background else None,
    ]
    assert returns_within(make_wait((channel,), fds), None)


def test_zmq_sources_and_plain_descriptors_are_one_sleep(channel: ZmqChannel, pipes) -> None:
    fds = [channel.fileno(), pipes[0][0].fileno(), pipes[1][0].fileno()]
    wait = make_wait((channel,), fds)
    assert wait(0.0) is False
    for reader, writer in pipes[:2]:
        writer.send(b"x")
        assert returns_within(wait, None)
        reader.recv(1)
    assert wait(0.0) is False
    assert channel.send(channel.address, b"to myself")
    assert returns_within(wait, None)
    assert channel.receive() == [b"to myself"]


def test_a_port_in_this_process_wakes_a_worker_that_sleeps(make_parts, channel) -> None:
    """The whole assembly with real descriptors: Stop from another thread ends a loop that has
    nothing else to wait for."""
    parts = make_parts()
    quiet = CoreLimits(heartbeat_interval_s=3600.0)
    worker = build_worker(
        parts.runner,
        parts.transport,
        channel,
        parts.port,
        options(limits=quiet, wait=None),
    )
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    parts.port.put(Stop(5.0))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert any(isinstance(m, WorkerHealth) for m in parts.said)
    assert worker.close() == []


class DeviceRunner(SimulatedRunner):
    """Keeps its KV where this process has no view of it."""

    def initialize_cache(self, num_blocks: int, allocate: Allocate) -> KVPlacement:
        place = super().initialize_cache(num_blocks, allocate)
        return attrs.evolve(place, regions=tuple(region + 7 for region in place.regions))


def test_checksums_need_memory_that_can_be_read(make_parts) -> None:
    """Issue 4.7: refused when the worker is put together, not at the first request."""
    parts = make_parts()
    memory: dict[int, ByteArray] = {}
    channel = parts.network.channel("me")
    setup = take_memory(parts.runner, parts.transport, channel, options(integrity="crc32"), memory)
    assert (setup.integrity, setup.is_host_memory) == ("crc32", True)
    assert set(setup.placement.regions) == memory.keys()
    device = DeviceRunner(SimulatedConfig(block_size=4, max_model_len=64))
    assert not take_memory(device, parts.transport, channel, options()).is_host_memory
    with pytest.raises(ConfigError, match="integrity: crc32 needs a KV cache in memory that"):
        take_memory(device, parts.transport, channel, options(integrity="crc32"))
    with pytest.raises(ConfigError, match="integrity: 'md5'; use one of none, crc32"):
        take_memory(parts.runner, parts.transport, channel, options(integrity="md5"))
