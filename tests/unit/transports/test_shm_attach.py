from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import Int64Array
from pdcore.testing.transport_harness import Pair, RegistryHarness, make_batch
from pdcore.testing.transport_watch import pump, same
from pdcore.transports import shm_attach
from pdcore.transports.base import HandleStatus
from pdcore.transports.check import expand_rows
from pdcore.transports.copy import CHUNK_BYTES, ByteArray, copy_pieces
from pdcore.transports.process_proof import ProcessKey, open_pidfd, start_ticks, this_process
from pdcore.transports.shm_attach import (
    MAX_ROWS,
    Attachable,
    AttachedMemory,
    Iovecs,
    PeerSpace,
    why_unavailable,
)
from pdcore.transports.shm_wire import KEY_PAGES, AttachedRegion, SpaceKey

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or why_unavailable() is not None,
    reason="process_vm_writev does not work here",
)
PAGE = mmap.PAGESIZE
MIB = 1 << 20
NOTHING: Iovecs = np.zeros((0, 2), np.uint64)


def iovec(address: int, size: int) -> Iovecs:
    return np.array([[address, size]], np.uint64)


def address_of(memory: bytes | bytearray | mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class Here:
    """One region of this process, and the way into it that another process would have."""

    def __init__(self, size: int, kind: type[PeerSpace] = PeerSpace) -> None:
        self.memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.array: ByteArray = np.frombuffer(self.memory, np.uint8)
        self.attachable = Attachable()
        self.attachable.add(1, self.array.ctypes.data, size)
        (self.region,) = self.attachable.regions()
        assert self.attachable.key is not None
        pidfd = os.pidfd_open(os.getpid())
        self.space = kind(this_process(), pidfd, self.attachable.key)
        os.close(pidfd)
        self.remote = AttachedMemory(self.region, self.space)


@pytest.fixture
def here() -> Iterator[Callable[..., Here]]:
    made: list[Here] = []

    def make(size: int, kind: type[PeerSpace] = PeerSpace) -> Here:
        made.append(Here(size, kind))
        return made[-1]

    yield make
    while made:
        made.pop().attachable.close()


def protect(address: int, size: int, protection: int) -> None:
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection) == 0


# --- bytes ---------------------------------------------------------------------------------


@st.composite
def pieces(draw: st.DrawFn) -> Int64Array:
    """Disjoint pieces in 64 KiB on either side, some with rows and strides."""
    rows = []
    for slot in draw(st.lists(st.integers(0, 63), min_size=1, max_size=20, unique=True)):
        width = draw(st.integers(1, 256))
        count = draw(st.integers(1, 1024 // width))
        stride = draw(st.integers(width, 1024 // count))
        rows.append([draw(st.integers(0, 63)) * 1024, slot * 1024, width, count, width, stride])
    return np.array(rows, np.int64)


@given(pieces())
def test_what_arrives_is_what_a_plain_copy_would_write(rows: Int64Array) -> None:
    one = Here(1 << 16)
    try:
        source = np.random.default_rng(1).integers(0, 256, 1 << 16, np.uint8)
        wanted = np.zeros(1 << 16, np.uint8)
        copied = list(copy_pieces(rows, source, wanted))
        assert sum(one.remote.write(rows, source)) == sum(copied)
        assert np.array_equal(one.array, wanted)
    finally:
        one.attachable.close()


def test_more_rows_than_a_call_takes(here: Callable[..., Here]) -> None:
    """1,024 pieces on either side are the kernel's limit; the key takes its share."""
    count = 3 * MAX_ROWS + 1
    one = here(count * 16)
    source = np.random.default_rng(2).integers(0, 256, count * 8, np.uint8)
    rows = np.array([[0, 0, 8, count, 8, 16]], np.int64)
    assert list(one.remote.write(rows, source)) == [8 * MAX_ROWS] * 3 + [8]
    got = one.array.reshape(count, 16)
    assert np.array_equal(got[:, :8], source.reshape(count, 8))
    assert not got[:, 8:].any()


def check_rows_at_once(one: Here, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """What is expanded before the first byte moves: the first step is the owner's own."""
    expanded: list[int] = []

    def counted(part: Int64Array) -> Int64Array:
        rows = expand_rows(part)
        expanded.append(len(rows))
        return rows

    monkeypatch.setattr(shm_attach, "expand_rows", counted)
    count = len(one.array) // 16
    source = np.random.default_rng(3).integers(0, 256, count * 8, np.uint8)
    half = count // 2
    rows = np.array([[0, 0, 8, half, 8, 16], [half * 8, half * 16, 8, half, 8, 16]], np.int64)
    steps = one.remote.write(rows, source)
    assert next(steps) > 0
    assert sum(expanded) <= most
    assert sum(steps) > 0
    assert max(expanded) <= most
    assert np.array_equal(one.array.reshape(count, 16)[:, :8], source.reshape(count, 8))


def test_d23_rows_of_a_long_prompt_are_expanded_some_at_a_time(
    here: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D23: between TP sizes it has millions, which kept the owner's loop for seconds."""
    check_rows_at_once(here(16 * 60_000), monkeypatch, 8 * MAX_ROWS)


def test_d23_rows_all_at_once_are_noticed(
    here: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: one part with all of them."""
    monkeypatch.setattr(shm_attach, "few_rows", lambda pieces, _: iter((pieces,)))
    with pytest.raises(AssertionError):
        check_rows_at_once(here(16 * 60_000), monkeypatch, 8 * MAX_ROWS)


def test_a_step_is_about_a_chunk(here: Callable[..., Here]) -> None:
    """SENDER_ACK: between two calls the sender looks at its stop mark."""
    one = here(9 * MIB)
    source = np.full(9 * MIB, 7, np.uint8)
    whole = np.array([[0, 0, 9 * MIB, 1, 0, 0]], np.int64)
    assert list(one.remote.write(whole, source)) == [CHUNK_BYTES] * 9
    odd = np.array([[0, i * 700_000, 700_000, 1, 0, 0] for i in range(10)], np.int64)
    steps = list(one.remote.write(odd, source))
    assert (sum(steps), max(steps) < 2 * CHUNK_BYTES) == (7_000_000, True)


def test_memory_that_may_only_be_read_is_a_source(here: Callable[..., Here]) -> None:
    one = here(PAGE)
    source = np.frombuffer(b"read only", np.uint8)
    assert list(one.remote.write(np.array([[0, 5, 9, 1, 0, 0]], np.int64), source)) == [9]
    assert bytes(one.array[5:14]) == b"read only"


# --- short counts ----------------------------------------------------------------------------


class Trusting(PeerSpace):
    """Takes a call that did not fail for one that wrote everything."""

    def write(self, latch: int, local: Iovecs, remote: Iovecs) -> None:
        with contextlib.suppress(TransportError):
            super().write(latch, local, remote)


def tells_a_short_write(one: Here) -> None:
    """Trap: at a page that it may not write the kernel stops, and returns what it did so far."""
    source = np.full(4 * PAGE, 9, np.uint8)
    hole = one.array.ctypes.data + 2 * PAGE
    protect(hole, PAGE, 0)
    told = ""
    try:
        list(one.remote.write(np.array([[0, 0, 4 * PAGE, 1, 0, 0]], np.int64), source))
    except TransportError as error:
        told = str(error)
    finally:
        protect(hole, PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
    assert f"only {2 * PAGE} of {4 * PAGE} bytes" in told
    assert one.array[: 2 * PAGE].all()
    assert not one.array[2 * PAGE :].any()


def test_a_page_that_is_not_writable_is_no_success(here: Callable[..., Here]) -> None:
    """A count that is too small is a failure; the mutant that trusts the call reports success."""
    tells_a_short_write(here(4 * PAGE))
    with pytest.raises(AssertionError):
        tells_a_short_write(here(4 * PAGE, Trusting))


def test_a_hole_fails_that_transfer_only() -> None:
    """G4: the handle ends FAILED with the reason, once, and the session goes on."""
    with Pair(RegistryHarness("shm", shared=False), 4 * PAGE) as pair:
        hole = np.frombuffer(pair.target.buffer, np.uint8).ctypes.data + PAGE
        lease = pair.lease()
        protect(hole, PAGE, mmap.PROT_READ)
        bad = pair.submit(lease, pair.batch((0, 0, 4 * PAGE)), notify=b"never")
        record = pair.sender.record
        pump(pair.sender, pair.receiver, until=lambda: bad in record.quiesced)
        protect(hole, PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
        assert record.ended[bad] is HandleStatus.FAILED
        good = pair.submit(lease, pair.batch((0, 0, 4 * PAGE)), notify=b"good")
        pump(pair.sender, pair.receiver, until=lambda: bool(pair.receiver.record.notes))
        assert record.ended[good] is HandleStatus.DONE
        assert pair.receiver.record.payloads == [b"good"]
        assert same(pair.target.buffer, pair.source.buffer)


# --- which process -----------------------------------------------------------------------------

TARGET = """
import json, mmap, os, sys
import numpy as np
from pdcore.transports.shm_attach import Attachable
memory = mmap.mmap(-1, 65536, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
array = np.frombuffer(memory, np.uint8)
array[:] = 1
own = Attachable()
own.add(1, array.ctypes.data, 65536)
(region,) = own.regions()
print(json.dumps({"region": [region.region_id, region.size_bytes, region.address, region.latch],
    "nonce": own.key.nonce.hex(), "pages": own.key.pages}), flush=True)
# Children end with this process, and leave its standard input to it.
end_of_life, life = os.pipe()
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if child == 0:
            os.close(life)
            os.read(end_of_life, 1)
            os._exit(0)
        print(child, flush=True)
    elif line == "exec\\n":
        program = "import sys; print('another', flush=True); sys.stdin.read()"
        os.execv(sys.executable, [sys.executable, "-S", "-c", program])
    elif line == "deregister\\n":
        own.remove(1)
        print("done", flush=True)
    elif line == "close\\n":
        own.close()
        print("done", flush=True)
"""


class TargetProcess:
    """A process with 64 KiB of ones that may be written, and what a peer of it knows."""

    def __init__(self) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}\n{TARGET}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        told = json.loads(self.read_line())
        self.region = AttachedRegion(*told["region"])
        self.key = SpaceKey(bytes.fromhex(told["nonce"]), tuple(told["pages"]))

    def read_line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, command: str) -> bytes:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        return self.read_line().strip()

    def space(self, pid: int = 0, kind: type[PeerSpace] = PeerSpace) -> PeerSpace:
        """The way in, or what is taken for it when ``pid`` is somebody else's."""
        process = ProcessKey(pid or self.process.pid, start_ticks(pid or self.process.pid))
        pidfd = open_pidfd(process)
        try:
            return kind(process, pidfd, self.key)
        finally:
            os.close(pidfd)

    def write(self, space: PeerSpace) -> None:
        source = b"\2" * 65536
        local = iovec(address_of(source), len(source))
        space.write(self.region.latch, local, iovec(self.region.address, len(source)))

    def peek(self, pid: int = 0) -> set[int]:
        """The values that its region holds, or the place of it in another process."""
        with open(f"/proc/{pid or self.process.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(self.region.address)
            return set(memory.read(65536))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(20)


@pytest.fixture
def target() -> Iterator[TargetProcess]:
    made = TargetProcess()
    yield made
    made.close()


def test_another_process_is_written(target: TargetProcess) -> None:
    target.write(target.space())
    assert target.peek() == {2}


class Keyless(PeerSpace):
    """Only a pid, as a plain use of process_vm_writev has it: whoever bears it is written."""

    def __init__(self, process: ProcessKey, pidfd: int, key: SpaceKey) -> None:
        super().__init__(process, pidfd, key)
        self._pid_only = process.pid

    def write(self, latch: int, local: Iovecs, remote: Iovecs) -> None:
        shm_attach._write(self._pid_only, local, remote)


def spares_who_has_the_pid_now(target: TargetProcess, kind: type[PeerSpace]) -> None:
    """Whoever bears the pid now is left alone: here a process with the very layout of the
    target, in which the same addresses are mapped and writable."""
    other = int(target.ask("fork"))
    space = target.space(other, kind)
    with contextlib.suppress(PeerGone):
        target.write(space)
    assert target.peek(other) == {1}, "another process was written"
    with pytest.raises(PeerGone, match="nothing was written"):
        target.write(space)


def test_a_reused_pid_is_not_written(target: TargetProcess) -> None:
    """Rule 2, "dead and fenced": the look at the pidfd cannot close the gap before the call,
    the key in the call does. The mutant writes to a pid."""
    spares_who_has_the_pid_now(target, PeerSpace)
    with pytest.raises(AssertionError, match="another process was written"):
        spares_who_has_the_pid_now(target, Keyless)


def test_a_child_of_the_target_changes_nothing(target: TargetProcess) -> None:
    """After a fork pages are shared until somebody writes: the target gets the bytes, its child
    keeps what it had."""
    child = int(target.ask("fork"))
    target.write(target.space())
    assert (target.peek(), target.peek(child)) == ({2}, {1})


def test_another_program_in_the_same_process_is_not_written(target: TargetProcess) -> None:
    """exec keeps pid, start time and pidfd."""
    space = target.space()
    started = start_ticks(target.process.pid)
    assert target.ask("exec") == b"another"
    assert start_ticks(target.process.pid) == started
    with pytest.raises(PeerGone, match="another program"):
        target.write(space)


def test_the_dead_are_not_written(target: TargetProcess) -> None:
    """As a zombie, and when nothing of it is left: seen before the call, and by the call."""
    space = target.space()
    target.process.kill()
    os.waitid(os.P_PID, target.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(PeerGone, match="dead"):
        target.write(space)
    target.process.wait(20)
    with pytest.raises(PeerGone, match="dead"):
        target.write(space)
    alive = os.pidfd_open(os.getpid())
    unaware = PeerSpace(ProcessKey(target.process.pid, 0), alive, target.key)
    os.close(alive)
    with pytest.raises(PeerGone, match="gone"):
        target.write(unaware)


def test_a_stopped_target_is_written(target: TargetProcess) -> None:
    space = target.space()
    target.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, target.process.pid, os.WSTOPPED | os.WNOWAIT)
    target.write(space)
    target.process.send_signal(signal.SIGCONT)
    assert target.peek() == {2}


def test_deregistered_memory_is_not_written(target: TargetProcess) -> None:
    """It may be anything by now; a late write ends at the latch, and after ``close`` at the key."""
    space = target.space()
    assert target.ask("deregister") == b"done"
    with pytest.raises(TransportError, match="deregistered") as found:
        target.write(space)
    assert not isinstance(found.value, PeerGone)
    assert target.ask("close") == b"done"
    with pytest.raises(PeerGone, match="nothing was written"):
        target.write(space)
    assert target.peek() == {1}


# --- what is forbidden -------------------------------------------------------------------------


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
        capture_output=True,
        timeout=60,
        check=True,
        text=True,
    )
    return done.stdout


def test_another_user_is_told_why() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    told = run("""
import os
import numpy as np
from pdcore.errors import TransportError
from pdcore.transports.process_proof import this_process
from pdcore.transports.shm_attach import Attachable, PeerSpace
own = Attachable()
own.add(1, 4096, 4096)
target, pidfd = this_process(), os.pidfd_open(os.getpid())
child = os.fork()
if child == 0:
    os.setuid(65534)
    try:
        PeerSpace(target, pidfd, own.key).probe(own.regions()[0].latch)
    except TransportError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
""")
    assert "Operation not permitted" in told


#: Both of one user without any capability, and the target not to be traced by anybody.
FORBIDDEN = """
import ctypes, os
import numpy as np
from pdcore.errors import TransportError
from pdcore.testing.transport_harness import make_batch, make_lease
from pdcore.transports.shm import ShmTransport
# Everything is imported before the files of this user are out of reach.
first = ShmTransport(b"f" * 16)
first.allocate(4096)
first.connect(first.descriptor())
first.close()
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
told, descriptors = os.pipe()
done, go_on = os.pipe()
if os.fork() == 0:
    os.close(go_on)
    os.close(told)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    transport = ShmTransport(b"t" * 16)
    registered = transport.register(memoryview(bytearray(8192)))
    os.write(descriptors, transport.descriptor())
    os.read(done, 1)
    shared = transport.allocate(8192)
    os.write(descriptors, transport.descriptor())
    os.read(done, 1)
    os._exit(0)
os.close(descriptors)
ours = ShmTransport(b"o" * 16)
source = ours.register(memoryview(b"source"))
try:
    ours.connect(os.read(told, 65536))
except TransportError as error:
    print("connect:", error)
os.write(go_on, b"1")
session = ours.connect(os.read(told, 65536))
for region in (1, 2):
    lease = make_lease(b"t" * 16, 1, {region: [(0, 8192)]})
    batch = make_batch(source, source, (0, 0, 6))
    batch = type(batch)(source.region_id, region, batch.descriptors)
    try:
        handle = ours.submit(session, [batch], lease)
        (event,) = ours.poll()
        print("submit:", event.status.value)
    except TransportError as error:
        print("submit:", error)
os.close(go_on)
assert ours.close() == []
"""


def test_what_the_kernel_forbids_is_refused_and_the_rest_is_served() -> None:
    """At connect where nothing else could be written, else when it is named."""
    first, second, third = run(FORBIDDEN).splitlines()
    why = (
        "this target's memory was registered, not allocated, and the kernel does not let us "
        "write it: Operation not permitted"
    )
    assert first.startswith(f"connect: {why}")
    assert second.startswith(f"submit: {why}")
    assert second.endswith("use allocate() there, or transport socket")
    assert third == "submit: done"


def test_yama_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_attach, "YAMA", tmp_path / "ptrace_scope")
    assert why_unavailable() is None
    (tmp_path / "ptrace_scope").write_text("3\n")
    reason = why_unavailable()
    assert reason is not None
    assert "kernel.yama.ptrace_scope is 3" in reason


def test_no_room_for_a_page_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = RegistryHarness("shm")
    transport = harness.create()
    monkeypatch.setattr(shm_attach, "_DRAWS", 0)
    with pytest.raises(TransportError, match="no page could be mapped"):
        transport.register(memoryview(bytearray(64)))
    monkeypatch.undo()
    region = transport.register(memoryview(bytearray(64)))
    transport.deregister(region)
    assert transport.close() == []


# --- a transport with registered memory --------------------------------------------------------


def test_registered_and_allocated_targets_in_one_submit() -> None:
    """What an engine owns already (here a numpy array) is a target like what was allocated;
    memory that may only be read is a source."""
    with Pair(RegistryHarness("shm"), 4096) as pair:
        receiver = pair.receiver.transport
        owned = np.zeros(3 * MIB + 17, np.uint8)
        mine = receiver.register(memoryview(owned))
        receiver.register(memoryview(b"no target"))
        pair.session = pair.sender.transport.connect(receiver.descriptor())
        lease = pair.lease_of({pair.target: [(0, 4096)], mine: [(17, mine.size_bytes)]})
        source = np.random.default_rng(3).integers(0, 256, 3 * MIB, np.uint8)
        big = pair.sender.transport.register(memoryview(source))
        batches = pair.batch((0, 0, 4096)), make_batch(big, mine, (0, 17, 3 * MIB))
        handle = pair.submit(lease, *batches, notify=b"n")
        pump(pair.sender, pair.receiver, until=lambda: bool(pair.receiver.record.notes))
        assert pair.sender.record.ended[handle] is HandleStatus.DONE
        assert same(pair.target.buffer, pair.source.buffer)
        assert np.array_equal(owned[17:], source)
        assert not owned[:17].any()


def test_a_region_goes_with_its_latch() -> None:
    """After deregister a sender that still knows the region, and claims a lease, is stopped."""
    with Pair(RegistryHarness("shm", shared=False), 4096) as pair:
        lease = pair.lease()
        target = np.frombuffer(pair.target.buffer, np.uint8)
        pair.receiver.transport.release(lease.lease)
        pair.receiver.transport.deregister(pair.target)
        handle = pair.submit(lease, pair.batch((0, 0, 4096)))
        pair.sender.poll()
        assert pair.sender.record.ended[handle] is HandleStatus.FAILED
        assert not target.any()


def test_every_process_has_a_key_of_its_own() -> None:
    one, other = Attachable(), Attachable()
    for own in (one, other):
        own.add(1, PAGE, PAGE)
    assert one.key is not None
    assert other.key is not None
    pages = {*one.key.pages, *other.key.pages, one.regions()[0].latch, other.regions()[0].latch}
    assert len(pages) == 2 * KEY_PAGES + 2
    assert one.key.nonce != other.key.nonce
    one.remove(99)
    for own in (one, other):
        own.close()
        own.close()
        assert (own.regions(), own.key) == ((), None)
