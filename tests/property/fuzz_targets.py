"""What is fuzzed: each target takes bytes, must not raise, and says in the end whether the
honest requests that ran beside them finished right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import msgspec
import zmq

from pdcore.config import CoreLimits
from pdcore.control import codec
from pdcore.control import messages as m
from pdcore.control.link import LeaderLink, WorkerId, pack_identity, split_address
from pdcore.control.memory import MemoryChannel
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import HTTP_STATUS, CodecError, TransportError, failure
from pdcore.testing.world import World, make_world
from pdcore.transports import descriptor
from pdcore.transports.base import Transport
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.transports.shm import ShmTransport
from pdcore.transports.shm_wire import Hello, decode_address, pack_hello, unpack, unpack_hello
from pdcore.types import Incarnation, LeaseId, Nonce, RoomKey, SamplingParams
from tests.property.fuzz_mutations import damaged, has_good_header, mutated_frame, pick

STRANGERS = tuple(Incarnation(bytes([0x73 + i]) * 16) for i in range(4))


class Target(Protocol):
    """``is_good``: counted among those that passed magic and version."""

    name: str

    def draw(self, rng: random.Random) -> tuple[bytes, bool]: ...

    def feed(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """Raises AssertionError when an honest request did not finish right."""
        ...

    def close(self) -> None: ...


# --- decoders ----------------------------------------------------------------------------

KEY = RoomKey(5, 6)
LEASE = LeaseId(STRANGERS[0], 3)
NONCE = Nonce(STRANGERS[1], 4)
ENDPOINT = m.Endpoint(
    "loopback", b"\x01" * 40, "digest", "print", 1, 0, 64, ("k0", "v0"), (1, 1), (0, 64), (128, 128)
)
PEER_MESSAGES: tuple[m.PeerMessage, ...] = (
    m.Handshake(
        KEY,
        LEASE,
        codec.encode_endpoint(ENDPOINT),
        {"full": codec.pack_ids([3, 4, 5])},
        0,
        9,
        2**60,
        1,
        2e9,
        60.0,
    ),
    m.Claim(KEY, LEASE, NONCE),
    m.Grant(KEY, NONCE),
    m.Refuse(KEY, NONCE, "no"),
    m.Status(KEY, LEASE, m.StatusKind.QUEUED),
    m.Status(KEY, LEASE, m.StatusKind.FAILED, NONCE, failure("transfer_failed", "why")),
    m.Status(KEY, LEASE, m.StatusKind.DONE, NONCE, None, b"\x01" * 80),
    m.StatusAck(KEY, LEASE, m.StatusKind.DONE),
    m.Cancel(KEY, LEASE, (NONCE, NONCE)),
    m.CancelAck(KEY, LEASE, NONCE),
    m.Stale(KEY, STRANGERS[2]),
    m.Heartbeat(7),
    m.HeartbeatAck(7),
)
SAMPLING = m.SubmitSampling(4, 0, 0.0, 1.0, 0, None, (2,), False, False, 0)
LEADER_MESSAGES: tuple[m.LeaderMessage, ...] = (
    m.Submit(
        KEY,
        "r",
        codec.pack_ids([4, 5, 6]),
        SAMPLING,
        2e9,
        60.0,
        "bootstrap:1",
        "prefill",
        "decode",
        0,
        None,
    ),
    m.Abort(KEY, "gone", False),
    m.Stop(5.0),
)
WORKER_MESSAGES: tuple[m.WorkerMessage, ...] = (
    m.Accepted(KEY),
    m.Aborted(KEY, True),
    m.Tokens([KEY], [[4, 5]], [[-0.5, None]]),
    m.Finished(KEY, "stop", None, 3, 4, {"queue": 0.1}),
    m.Finished(KEY, "error", failure("peer_lost", "why"), 3, 0, {}),
    m.WorkerReady(0, 0, STRANGERS[0], "tcp://127.0.0.1:5", 2048, 8192, 50_000, 100, "shm"),
    m.WorkerHealth(0, ["slow"], {"steps": 1.0}),
)


def frame_of(message: m.PeerMessage, stranger: Incarnation = STRANGERS[0]) -> bytes:
    frame = m.Frame("stranger:1", 0, stranger, "tcp://stranger:1", Incarnation(b""), [message])
    return codec.encode_frame(frame)


class Corpus:
    """Valid inputs, and one that may be taken apart for every one that is damaged."""

    def __init__(
        self,
        inputs: Sequence[bytes],
        mutate: Callable[[random.Random, bytes, bytes], bytes],
        is_good: Callable[[bytes], bool],
    ) -> None:
        self.inputs = inputs
        self._mutate = mutate
        self._is_good = is_good

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        data = self._mutate(rng, pick(rng, self.inputs), pick(rng, self.inputs))
        return data, self._is_good(data)


class CodecTarget:
    """Any bytes give a value that can be sent on, or CodecError."""

    def __init__(self) -> None:
        self.name = "codec"
        self._corpus = Corpus(
            [
                *map(frame_of, PEER_MESSAGES),
                *map(codec.encode_link, LEADER_MESSAGES),
                *map(codec.encode_link, WORKER_MESSAGES),
            ],
            mutated_frame,
            has_good_header,
        )

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        return self._corpus.draw(rng)

    def feed(self, data: bytes) -> None:
        for decode in (
            codec.decode_frame,
            codec.decode_leader_message,
            codec.decode_worker_message,
        ):
            try:
                value = decode(data)
            except CodecError:
                continue
            is_frame = isinstance(value, m.Frame)
            again = codec.encode_frame(value) if is_frame else codec.encode_link(value)
            assert decode(again) == value
            for message in value.messages if is_frame else ():
                if isinstance(message, m.Handshake):
                    decode_blindly(codec.decode_endpoint, message.endpoint, CodecError)

    def finish(self) -> None:
        return None

    def close(self) -> None:
        return None


def decode_blindly(
    decode: Callable[[bytes], object], data: bytes, refusal: type[Exception]
) -> object:
    try:
        return decode(data)
    except refusal:
        return None


# --- cores -------------------------------------------------------------------------------


@attrs.frozen
class Honest:
    key: RoomKey
    prompt: list[int]
    num_tokens: int


class HonestLoad:
    """A few requests in flight in a world, each of which must end right."""

    def __init__(self, world: World, rng: random.Random, in_flight: int = 4) -> None:
        self.world = world
        self.num_right = 0
        self._rng = rng
        self._in_flight = in_flight
        self._live: list[Honest] = []

    def live(self) -> set[RoomKey]:
        return {one.key for one in self._live}

    def step(self, may_fail: bool = False) -> None:
        while len(self._live) < self._in_flight:
            prompt = [self._rng.randrange(3, 1000) for _ in range(self._rng.randint(1, 20))]
            num_tokens = self._rng.randint(1, 4)
            sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            key = self.world.submit(prompt, sampling=sampling, timeout_s=600.0)
            self._live.append(Honest(key, prompt, num_tokens))
        if not self.world.step():
            self.world.jump()
        self.check(may_fail)

    def check(self, may_fail: bool = False) -> None:
        """What has ended has ended right; with ``may_fail`` also with a reason instead."""
        decode = self.world.decode
        for one in [one for one in self._live if decode.result(one.key) is not None]:
            result = decode.result(one.key)
            assert result is not None
            wanted = simulated_tokens(self.world.model, one.prompt, one.num_tokens)
            got = decode.tokens(one.key)
            if may_fail and result.failure is not None:
                assert result.failure.code in HTTP_STATUS
                assert got == wanted[: len(got)], (got, wanted)
            else:
                assert result.failure is None, result
                assert got == wanted, (got, wanted)
                self.num_right += 1
            self._live.remove(one)
        for rank in self.world.ranks.values():
            # What was told is not needed any more, and looked through for every request.
            if len(rank.said) > 5_000:
                rank.said[:] = [x for x in rank.said if isinstance(x, m.Finished | m.Tokens)][-500:]

    def drain(self, may_fail: bool = False) -> None:
        """Until all have ended and no block is out of its pool."""

        def is_over() -> bool:
            self.check(may_fail)
            return not self._live

        self.world.run(is_over, max_steps=100_000)
        self.world.run(
            lambda: all(is_pool_whole(self.world, role) for role in self.world.ranks),
            max_steps=100_000,
        )


def is_pool_whole(world: World, role: str) -> bool:
    ledgers = world.ranks[role].worker.core.blocks.audit().values()
    return all(one.free == one.total for one in ledgers)


class RecordedChannel:
    """Remembers the latest frames of a channel, so that they can be imitated."""

    def __init__(self, channel: MemoryChannel, frames: list[tuple[str, bytes]]) -> None:
        self._channel = channel
        self._send = channel.send
        self._frames = frames
        self.damage: Callable[[bytes], bytes] | None = None

    def send(self, to: str, frame: bytes) -> bool:
        self._frames.append((to, bytes(frame)))
        del self._frames[:-256]
        return self._send(to, self.damage(bytes(frame)) if self.damage else frame)


def recorded(world: World) -> tuple[list[tuple[str, bytes]], list[RecordedChannel]]:
    frames: list[tuple[str, bytes]] = []
    channels = []
    for rank in world.ranks.values():
        channel = rank.worker.ports.channel._channel
        channels.append(RecordedChannel(channel, frames))
        channel.send = channels[-1].send
    return frames, channels


class StrangerTarget:
    """A stranger that imitates what it overhears: the live frames of both ranks under its own
    name, damaged. Honest requests go on as if it was not there."""

    def __init__(self, seed: int) -> None:
        self.name = "cores: strangers"
        self._rng = random.Random(f"stranger {seed}")
        limits = CoreLimits(parked_handshake_cap=64, parked_handshake_ttl_s=5.0)
        self._world = make_world(seed=seed, limits=limits)
        self._frames, _ = recorded(self._world)
        self._channel = self._world.network.channel("stranger")
        self._load = HonestLoad(self._world, self._rng)
        self._genuine = {r.worker.core.setup.me.incarnation for r in self._world.ranks.values()}
        self._num_fed = 0

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        if not self._frames:
            data = frame_of(pick(rng, PEER_MESSAGES))
        else:
            data = self._as_stranger(rng, pick(rng, self._frames)[1])
        other = frame_of(pick(rng, PEER_MESSAGES))
        data = mutated_frame(rng, data, other)
        if self._is_forged(data):
            # Whoever knows an incarnation is that peer: there is no other secret.
            data = frame_of(pick(rng, PEER_MESSAGES))
        return data, has_good_header(data)

    def _as_stranger(self, rng: random.Random, data: bytes) -> bytes:
        heard = codec.decode_frame(data)
        frame = msgspec.structs.replace(
            heard,
            instance="stranger:1",
            incarnation=pick(rng, STRANGERS),
            reply_to="tcp://stranger:1",
        )
        return codec.encode_frame(frame)

    def _is_forged(self, data: bytes) -> bool:
        try:
            return codec.decode_frame(data).incarnation in self._genuine
        except CodecError:
            return False

    def feed(self, data: bytes) -> None:
        self._num_fed += 1
        self._channel.send(f"mem://{pick(self._rng, ('prefill', 'decode'))}", data)
        if self._num_fed % 4 == 0:
            self._load.step()
            self._channel.receive()

    def finish(self) -> None:
        self._load.drain()
        assert self._load.num_right >= min(4, self._num_fed)
        for rank in self._world.ranks.values():
            core = rank.worker.core
            assert len(core.rooms.peers.peers) <= 64, "a stranger's lives are not remembered"

    def close(self) -> None:
        return None


class CorruptedTarget:
    """A link that damages one frame in ten, magic, version and length whole: requests end
    right or with a reason, never with a wrong token; once it is repaired, all is well."""

    def __init__(self, seed: int) -> None:
        self.name = "cores: corrupted link"
        self._rng = random.Random(f"corrupted {seed}")
        self._seed = seed
        self._num_fed = 0
        self._renew()

    def _renew(self) -> None:
        self._seed += 1
        self._world = make_world(seed=self._seed)
        self._frames, self._channels = recorded(self._world)
        self._load = HonestLoad(self._world, self._rng)
        self._next: list[bytes] = []
        for channel in self._channels:
            channel.damage = self._damage

    def _damage(self, data: bytes) -> bytes:
        return self._next.pop() if self._next and self._rng.random() < 0.3 else data

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        while not self._frames:
            self._load.step(may_fail=True)
        data = mutated_frame(rng, pick(rng, self._frames)[1], pick(rng, self._frames)[1])
        return data, has_good_header(data)

    def feed(self, data: bytes) -> None:
        self._next.append(data)
        for _ in range(100):
            if not self._next:
                break
            self._load.step(may_fail=True)
        self._num_fed += 1
        if self._num_fed % 100 == 0:
            self._repair()
            self._renew()

    def _repair(self) -> None:
        """Undamaged again: everything that hangs is resolved, blocks come back, and what is
        asked now is answered right."""
        for channel in self._channels:
            channel.damage = None
        self._load.drain(may_fail=True)
        right = self._load.num_right
        while self._load.num_right < right + 5:
            self._load.step()
        self._load.drain()

    def finish(self) -> None:
        self._repair()

    def close(self) -> None:
        return None


class LeaderMessageTarget:
    """What a leader might send its worker: odd requests end with a reason of their own."""

    def __init__(self, seed: int) -> None:
        self.name = "cores: leader messages"
        self._world = make_world(seed=seed)
        self._rng = random.Random(f"leader {seed}")
        self._load = HonestLoad(self._world, self._rng)
        self._corpus = Corpus(
            [codec.encode_link(one) for one in LEADER_MESSAGES[:2]], mutated_frame, has_good_header
        )
        self._num_fed = 0

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        return self._corpus.draw(rng)

    def feed(self, data: bytes) -> None:
        self._num_fed += 1
        try:
            message = codec.decode_leader_message(data)
        except CodecError:
            return
        # Its own leader may stop a worker, and cancel what it sent.
        if isinstance(message, m.Stop) or message.key in self._load.live():
            return
        self._world.ranks[pick(self._rng, ("prefill", "decode"))].port.put(message)
        if self._num_fed % 4 == 0:
            self._load.step()

    def finish(self) -> None:
        for rank in self._world.ranks.values():
            for key in rank.worker.core.live_keys():
                if key not in self._load.live():
                    rank.port.put(m.Abort(key, "the fuzzing is over", False))
        self._load.drain()

    def close(self) -> None:
        return None


# --- the leader link ---------------------------------------------------------------------


class LinkTarget:
    """A leader's socket, spoken to by one that has a worker's identity, one without, and an
    honest worker, whose every word arrives."""

    def __init__(self) -> None:
        self.name = "leader link"
        self._runner = asyncio.Runner()
        self._heard: asyncio.Queue[m.WorkerMessage] = asyncio.Queue()
        self._corpus = Corpus(
            [codec.encode_link(one) for one in WORKER_MESSAGES], mutated_frame, has_good_header
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._runner.run(self._start())
        self._num_fed = 0

    async def _start(self) -> None:
        self._link = LeaderLink(self._hear)
        await self._link.start()
        where, secret = split_address(self._link.address)
        names = (pack_identity(WorkerId(0, STRANGERS[0]), secret), b"Pnobody", STRANGERS[3])
        identities = (*names[:2], pack_identity(WorkerId(1, names[2]), secret))
        self._sockets = []
        for identity in identities:
            sock = self._context.socket(zmq.DEALER)
            sock.setsockopt(zmq.ROUTING_ID, identity)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDHWM, 0)
            sock.connect(where)
            self._sockets.append(sock)
        await self._honest(0)

    def _hear(self, rank: int, message: m.WorkerMessage) -> None:
        if rank == 1:
            self._heard.put_nowait(message)

    async def _honest(self, number: int) -> None:
        """A word of the honest worker arrives as it was said."""
        said = m.Tokens([RoomKey(number + 1, 1)], [[number]])
        self._sockets[2].send(codec.encode_link(said))
        async with asyncio.timeout(60.0):
            heard = await self._heard.get()
        assert heard == said, heard

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        return self._corpus.draw(rng)

    def feed(self, data: bytes) -> None:
        self._num_fed += 1
        self._sockets[self._num_fed % 8 == 0].send(data)
        if self._num_fed % 50 == 0:
            self._runner.run(self._honest(self._num_fed))

    def finish(self) -> None:
        self._runner.run(self._honest(self._num_fed))
        counters = self._link.counters
        assert counters.num_garbage or self._num_fed < 50

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._context.term()
        self._link.close()
        self._runner.close()


# --- descriptors -------------------------------------------------------------------------


class DescriptorTarget:
    """What a peer publishes of its memory: refused with TransportError, or connected to."""

    def __init__(self) -> None:
        self.name = "transport descriptors"
        fabric = LoopbackFabric()
        self._loopback = [LoopbackTransport(Incarnation(bytes([i]) * 16), fabric) for i in (1, 2)]
        self._shm = [
            ShmTransport(Incarnation(bytes([i]) * 16), connect_timeout_s=5.0) for i in (3, 4)
        ]
        self._pairs: list[tuple[Transport, Transport]] = [
            (self._loopback[0], self._loopback[1]),
            (self._shm[0], self._shm[1]),
        ]
        self._inputs = []
        for _, receiver in self._pairs:
            receiver.allocate(4096)
            self._inputs.append(receiver.descriptor())
        self._inputs.append(pack_hello(Hello(STRANGERS[0], STRANGERS[1], 77)))

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        data = pick(rng, self._inputs)
        if rng.randrange(4) == 0:
            return damaged(rng, data, pick(rng, self._inputs)), False
        # Behind magic, version and name.
        keep = rng.randrange(4, 24)
        out = data[:keep] + damaged(rng, data[keep:], pick(rng, self._inputs))
        return out, out[:4] == data[:4]

    def feed(self, data: bytes) -> None:
        decode_blindly(lambda one: unpack(one), data, TransportError)
        decode_blindly(unpack_hello, data, TransportError)
        decode_blindly(decode_address, data, TransportError)
        for sender, _ in self._pairs:
            decode_blindly(
                lambda one, s=sender: descriptor.decode(one, s.name), data, TransportError
            )
            try:
                session = sender.connect(data)
            except TransportError:
                continue
            sender.disconnect(session)
            for one in (*self._loopback, *self._shm):
                one.poll()

    def finish(self) -> None:
        for sender, receiver in self._pairs:
            session = sender.connect(receiver.descriptor())
            sender.disconnect(session)

    def close(self) -> None:
        for one in (*self._loopback, *self._shm):
            assert one.close() == []
