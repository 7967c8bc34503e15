"""Strangers at every door of real processes, and peers that are slow.

Each port and socket that a worker or leader listens on gets connections that say nothing,
noise, the beginning of something valid, and damaged frames, while honest requests go on as
if nobody was there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.chaos.parts import REQUEST_S, SILENT, Load, Parts, expect_only
from tests.property.fuzz_http import packed, requests_of, unpacked
from tests.property.fuzz_mutations import mutated_frame, mutated_json
from tests.property.fuzz_targets import PEER_MESSAGES, frame_of

pytestmark = pytest.mark.slow

OK = frozenset({"ok"})
#: What ZMTP, HTTP and pdcore's own protocols begin with.
BEGINNINGS = (
    b"",
    b"\x00",
    b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
    b"GET /health HTTP/1.1\r\n",
    b"POST /generate HTTP/1.1\r\ncontent-length: 100\r\n\r\n{",
    b"PD\x01\x01\xff\xff\xff\xff",
    b"PDCORE",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\xff" * 64,
)


def sockets_of(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def tcp_ports(pid: int) -> list[int]:
    """Where a process listens."""
    mine, ports = sockets_of(pid), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def unix_names(pid: int) -> list[str]:
    """Abstract AF_UNIX sockets that a process listens on."""
    mine, names = sockets_of(pid), set()
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        is_listening = int(fields[3], 16) & 0x10000
        if len(fields) == 8 and fields[6] in mine and is_listening:
            names.add(fields[7])
    return sorted(names)


@contextlib.contextmanager
def strangers(parts: Parts, part: str, rng: random.Random, count: int) -> Iterator[int]:
    """Connections at every door of a process; how many were made."""
    pid, made = parts.pid(part), []
    doors: list[tuple[socket.AddressFamily, socket.SocketKind, object]] = [
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)) for port in tcp_ports(pid)
    ]
    for name in unix_names(pid):
        kinds = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
        doors += [(socket.AF_UNIX, kind, "\0" + name[1:]) for kind in kinds]
    try:
        for _ in range(count):
            for family, kind, address in doors:
                sock = socket.socket(family, kind)
                made.append(sock)
                sock.settimeout(5.0)
                with contextlib.suppress(OSError):
                    sock.connect(address)
                    sock.send(rng.choice(BEGINNINGS) + rng.randbytes(rng.choice((0, 0, 3, 300))))
                if rng.random() < 0.3:
                    sock.close()
        yield len(made)
    finally:
        for sock in made:
            sock.close()


@pytest.mark.parametrize("part", ["prefill-0 worker", "decode-0 worker", "decode-1", "prefill-1"])
def test_strangers_at_every_door(parts: Parts, part: str) -> None:
    """D23, D40, D45: silent connections, noise and truncated frames cost nobody anything."""

    async def come(load: Load) -> None:
        rng = random.Random(31)
        with strangers(parts, part, rng, 12) as num_made:
            assert num_made >= 12, "it listens somewhere"
            await load.some_ok(40)
        await load.some_ok(20)

    outcomes = asyncio.run(Load(parts.router, seed=31).run(come))
    expect_only(outcomes, OK)
    parts.expect_whole()


@pytest.mark.parametrize("part", ["prefill-0 worker", "decode-1 worker"])
def test_damaged_frames_on_the_control_channel(parts: Parts, part: str) -> None:
    """D40, D45: two thousand mutations of valid frames, most with a good header, by real
    ZMTP connections: the worker counts them and every honest request finishes right."""
    rng = random.Random(32)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pid = parts.pid(part)

    async def send(load: Load) -> None:
        frames = [frame_of(one) for one in PEER_MESSAGES]
        for port in tcp_ports(pid):
            sock = context.socket(zmq.PUSH)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDTIMEO, 10_000)
            sock.connect(f"tcp://127.0.0.1:{port}")
            for i in range(2_000):
                sock.send(mutated_frame(rng, rng.choice(frames), rng.choice(frames)))
                if i % 200 == 0:
                    await load.some_ok(3)
            await load.some_ok(20)
            sock.close()

    try:
        outcomes = asyncio.run(Load(parts.router, seed=32).run(send))
    finally:
        context.term()
    expect_only(outcomes, OK)
    parts.expect_whole()
    assert parts.pid(part) == pid, "it lives"


def test_damaged_bodies(parts: Parts) -> None:
    """D40, D45, R93: bodies that nobody would send, at the router and at an instance: each is
    answered with a status below 500 or with 503, and honest requests beside them are right."""
    rng = random.Random(33)
    bodies = [packed(one) for one in requests_of({"timeout": 5.0})]

    async def ask(port: int, data: bytes) -> int:
        method, path, body = unpacked(data)
        body = mutated_json(rng, body, unpacked(rng.choice(bodies))[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(60.0):
            answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1])

    async def come(load: Load) -> None:
        for port in (parts.router.port, parts.at["decode-0"].port):
            for _ in range(25):
                asked = [ask(port, rng.choice(bodies)) for _ in range(8)]
                for status in await asyncio.gather(*asked):
                    assert status < 500 or status in (503, 504), status

    outcomes = asyncio.run(Load(parts.router, seed=33).run(come))
    expect_only(outcomes, OK)
    parts.expect_whole()


@pytest.mark.parametrize("victim", [f"{name} worker" for name in ("prefill-0", "decode-1")])
def test_a_peer_that_is_slow(parts: Parts, victim: str) -> None:
    """D23: stopped and continued twenty times: slow is neither dead nor lost."""

    async def slow(load: Load) -> None:
        pid = parts.pid(victim)
        for _ in range(20):
            os.kill(pid, signal.SIGSTOP)
            try:
                with contextlib.suppress(TimeoutError):
                    await load.some(lambda one: True, 1, timeout_s=0.2)
            finally:
                os.kill(pid, signal.SIGCONT)
            await load.some(lambda one: True, 2)
        assert parts.pid(victim) == pid

    outcomes = asyncio.run(Load(parts.router, seed=34).run(slow))
    expect_only(outcomes, OK)
    parts.expect_whole()


def test_silent_instances_do_not_hold_the_fleet(parts: Parts) -> None:
    """D48, D60: one worker of each role silent at once: what they had ends by its own time,
    the rest of the fleet serves, and no part says it is well while it is not."""

    async def silence(load: Load) -> None:
        pids = [parts.pid("prefill-1 worker"), parts.pid("decode-0 worker")]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await load.some(lambda one: one.kind == "deadline_exceeded")
            await load.some_ok(10)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    outcomes = asyncio.run(Load(parts.router, seed=35, timeout_s=REQUEST_S).run(silence))
    expect_only(outcomes, SILENT)
    parts.expect_whole()
