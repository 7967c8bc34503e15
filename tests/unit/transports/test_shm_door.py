from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pdcore.errors import TransportError
from pdcore.transports import shm_door
from pdcore.transports.process_proof import this_process
from pdcore.transports.shm_door import Door
from pdcore.transports.shm_wire import (
    Hello,
    Kind,
    Offer,
    SharedRegion,
    dial,
    pack,
    pack_hello,
    receive_offer,
)
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is Linux")
US, THEM = Incarnation(b"u" * 16), Incarnation(b"t" * 16)


class Rig:
    def __init__(self) -> None:
        self.fd = os.memfd_create("shared")
        self.rung = threading.Semaphore(0)
        self.door = Door(US, self.share, self.rung.release)

    def share(self, hand_over: Callable[[Offer], None]) -> None:
        hand_over(Offer([(SharedRegion(1, 4096, 0, True), self.fd)]))

    def call(self) -> socket.socket:
        return dial(self.door.address.name, 2.0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.door.close(10)
    for arrival in made.door.arrivals():
        arrival.sock.close()
        os.close(arrival.pidfd)
    os.close(made.fd)


def hello(target: Incarnation = US, ticks: int | None = None) -> bytes:
    return pack_hello(Hello(THEM, target, ticks or this_process().start_ticks))


def answer(sock: socket.socket) -> list[SharedRegion]:
    got = receive_offer(sock, time.monotonic() + 10).shared
    for _, fd in got:
        os.close(fd)
    return [region for region, _ in got]


def test_a_caller_gets_the_regions_and_is_announced(rig: Rig) -> None:
    with rig.call() as sock:
        sock.sendall(hello())
        assert answer(sock) == [SharedRegion(1, 4096, 0, True)]
        assert rig.rung.acquire(timeout=10)
        (arrival,) = rig.door.arrivals()
        assert (arrival.incarnation, arrival.process) == (THEM, this_process())
        arrival.sock.close()
        os.close(arrival.pidfd)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (hello(target=THEM), "stale descriptor"),
        (hello(ticks=1), "another process"),
        (b"GET / HTTP/1.1", "another protocol"),
        (pack(Kind.BYE), "HELLO"),
        (b"", "truncated"),
    ],
    # Frames hold this process's start time: as names they would differ between workers.
    ids=["stale descriptor", "another process", "another protocol", "no hello", "truncated"],
)
def test_others_are_refused_with_the_reason(rig: Rig, frame: bytes, reason: str) -> None:
    with rig.call() as sock:
        sock.send(frame)
        with pytest.raises(TransportError, match=reason):
            answer(sock)
    assert rig.door.arrivals() == []
    with rig.call() as sock:
        sock.sendall(hello())
        assert len(answer(sock)) == 1


def test_another_uid_is_refused(rig: Rig) -> None:
    """Only our own uid may map our memory (SO_PEERCRED)."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    program = f"""
import os, socket
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect({rig.door.address.name!r})
sock.send({hello()!r})
print(sock.recv(65536))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, timeout=60, check=True
    )
    assert b"uid 65534 may not map memory of uid 0" in done.stdout


def test_a_silent_caller_is_dropped_and_keeps_nobody_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_door, "HELLO_TIMEOUT_S", 0.05)
    with rig.call() as silent:
        with rig.call() as sock:
            sock.sendall(hello())
            assert len(answer(sock)) == 1
        assert select.select([silent], [], [], 10)[0]
        assert silent.recv(10) == b""


def test_too_many_callers_are_hung_up_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_door, "MAX_CALLERS", 2)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(rig.call()) for _ in range(4)]
        ended = select.select(socks, [], [], 10)[0]
        assert ended
        assert all(sock.recv(10) == b"" for sock in ended)


def test_without_descriptors_callers_are_turned_away(rig: Rig) -> None:
    """fd exhaustion: a caller is hung up on at once, and served again when there are
    descriptors again."""
    import resource

    with rig.call() as sock, rig.call() as other:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Both have been accepted when both are answered, so nothing is under way.
        for one in (sock, other):
            one.send(b"nonsense")
            with pytest.raises(TransportError):
                answer(one)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
            resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
            try:
                late.connect(rig.door.address.name)
                # A poll object needs no descriptor of its own.
                late.settimeout(10)
                assert late.recv(10) == b""
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with rig.call() as sock:
        sock.sendall(hello())
        assert len(answer(sock)) == 1


def check_the_door_survives(rig: Rig, monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    """Callers meet a process without descriptors in which another thread takes the spare
    one just when the door lets go of it; later they are served again."""
    import resource

    opened, lost, stolen = os.open, threading.Semaphore(0), list[int]()

    def taken(path: str, flags: int, mode: int = 0o777) -> int:
        if path != os.devnull or threading.current_thread() is not rig.door._thread:
            return opened(path, flags, mode)
        if not stolen:
            stolen.append(opened(path, flags, mode))
        lost.release()
        raise OSError(errno.EMFILE, "Too many open files")

    with rig.call() as sock:
        sock.send(b"nonsense")
        with pytest.raises(TransportError):
            answer(sock)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What earlier tests left to be collected must not give descriptors back in the middle.
    gc.collect()
    gc.disable()
    with contextlib.ExitStack() as stack:
        stack.callback(gc.enable)
        first, second = (
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            for _ in range(2)
        )
        stack.callback(lambda: [*map(os.close, stolen)])
        stack.enter_context(monkeypatch.context()).setattr(os, "open", taken)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (second.fileno() + 1, hard))
        # The first is hung up on with the spare descriptor, which is then lost; for the
        # second there is none.
        for one in (first, second):
            one.connect(rig.door.address.name)
            assert lost.acquire(timeout=wait_s), "the door's thread is gone"
    with rig.call() as sock:
        sock.sendall(hello())
        assert len(answer(sock)) == 1


def test_a_spare_descriptor_that_is_lost_ends_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door's thread died of EMFILE, and no peer could connect any more."""
    check_the_door_survives(rig, monkeypatch, wait_s=10)


def test_reopening_it_unguarded_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the thread ends with the error."""
    rig = Rig()
    with monkeypatch.context() as patch:
        patch.setattr(shm_door, "_open_spare", lambda: os.open(os.devnull, os.O_RDONLY))
        # Reporting how a thread ended needs descriptors, of which there are none.
        patch.setattr(threading, "excepthook", lambda args: None)
        with pytest.raises(AssertionError, match="the door's thread is gone"):
            check_the_door_survives(rig, monkeypatch, wait_s=0.5)
    rig.door._spare = None  # closed, and its number is somebody else's by now
    assert rig.door.close(10)
    os.close(rig.fd)


def test_it_closes_with_callers_inside() -> None:
    rig = Rig()
    with rig.call() as sock:
        assert rig.door.close(10)
        assert select.select([sock], [], [], 10)[0]
    os.close(rig.fd)
