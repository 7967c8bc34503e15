"""The traps of shared memory, each as a test: see the module's list."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pdcore.errors import TransportError
from pdcore.transports.process_proof import boot_id, this_process
from pdcore.transports.shm_segment import (
    HEADER_BYTES,
    NAMED_DIRECTORY,
    Segment,
    attach_segment,
    available_bytes,
    create_segment,
    sweep_stale,
)
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux")
US = Incarnation(b"u" * 16)
SIZE = 1 << 20


@pytest.fixture(params=["memfd", "named"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """The directory of the named fallback, or None for memfd."""
    return None if request.param == "memfd" else str(tmp_path)


@contextlib.contextmanager
def created(where: str | None) -> Iterator[Segment]:
    segment = create_segment(SIZE, US, where)
    try:
        yield segment
    finally:
        os.close(segment.fd)


def attach(segment: Segment, **changes: int) -> Segment:
    sizes = {"size_bytes": segment.size_bytes, "offset": segment.offset} | changes
    return attach_segment(os.dup(segment.fd), **sizes, sealed=segment.sealed)


def test_both_sides_see_the_same_bytes(where: str | None) -> None:
    with created(where) as segment:
        assert not np.frombuffer(segment.buffer, np.uint8).any()
        other = attach(segment)
        other.buffer[5:9] = b"told"
        assert bytes(segment.buffer[5:9]) == b"told"
        assert other.fd == -1


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    made = create_segment(SIZE, US, str(tmp_path))
    assert os.listdir(tmp_path) == []
    os.close(made.fd)


def test_a_sealed_segment_cannot_be_resized() -> None:
    """Trap: truncating under a mapping is a SIGBUS. Any resize fails with EPERM."""
    made = create_segment(SIZE, US)
    try:
        for size in (0, SIZE // 2, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(made.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert made.buffer[SIZE - 1] == 0
    finally:
        os.close(made.fd)


def test_an_unsealed_memfd_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with pytest.raises(TransportError, match="seals"):
        attach_segment(fd, SIZE, 0, sealed=True)


@pytest.mark.parametrize("changes", [{"size_bytes": SIZE - 1}, {"size_bytes": 2 * SIZE}])
def test_another_size_than_announced_is_not_mapped(
    where: str | None, changes: dict[str, int]
) -> None:
    with created(where) as segment, pytest.raises(TransportError, match="announced"):
        attach(segment, **changes)


def test_a_pipe_is_no_segment() -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(TransportError):
        attach_segment(read, SIZE, 0, sealed=False)


def test_another_owner_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    path = tmp_path / "theirs"
    path.write_bytes(bytes(SIZE))
    os.chown(path, 65534, 65534)
    with pytest.raises(TransportError, match="uid 65534"):
        attach_segment(os.open(path, os.O_RDWR), SIZE, 0, sealed=False)


def test_too_much_is_an_error_now_not_a_signal_later() -> None:
    """Trap: sparse ftruncate of 32 TiB "works" and the first touch is a SIGBUS."""
    for size in (1 << 45, 1 << 70, available_bytes() + (1 << 40)):
        with pytest.raises(TransportError, match=r"not enough memory.*fewer KV blocks"):
            create_segment(size, US)
    for size in (0, -5):
        with pytest.raises(TransportError, match="positive"):
            create_segment(size, US)


def test_d60_no_room_to_map_it_names_the_size_and_the_remedy() -> None:
    """D60: a limit of the address space is met by mmap, when the memory is already reserved."""
    program = f"""
import resource, sys; sys.path[:] = {sys.path!r}
from pdcore.errors import TransportError
from pdcore.transports.shm_segment import create_segment
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    create_segment(64 << 20, b"u" * 16)
except TransportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    said = "cannot map 67108864 bytes: Cannot allocate memory; configure fewer KV blocks"
    assert done.stdout.strip() == said


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., int]:
    """What is available in a machine whose kernel says this: MemAvailable in KiB, our cgroup,
    and of each cgroup (memory.max, memory.current, bytes of cached files)."""

    def available(own: str, limits: dict[str, tuple[str, int, int]], kib: int = 4096) -> int:
        proc, root = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(f"MemTotal: 9999 kB\nMemAvailable:  {kib} kB\n")
        if own:
            (proc / "self/cgroup").write_text(own)
        for name, (ceiling, used, cached) in limits.items():
            group = root / name
            group.mkdir(parents=True, exist_ok=True)
            (group / "memory.max").write_text(f"{ceiling}\n")
            (group / "memory.current").write_text(f"{used}\n")
            stat = f"anon 5\nactive_file {cached}\ninactive_file 3\n"
            (group / "memory.stat").write_text(stat)
        return available_bytes(proc, root)

    return available


MACHINE_BYTES = 4096 * 1024


@pytest.mark.parametrize(
    ("own", "limits", "bytes_"),
    [
        ("0::/a/b\n", {}, MACHINE_BYTES),
        ("0::/a/b\n", {"a/b": ("max", 7, 0)}, MACHINE_BYTES),
        ("0::/a/b\n", {"a/b": ("1000", 600, 100)}, 1000 - 600 + 100 + 3),
        ("0::/a/b\n", {"a/b": ("max", 7, 0), "a": ("5000", 600, 0)}, 4403),
        ("0::/a/b\n", {"a/b": ("9000", 0, 0), "a": ("5000", 600, 0), "": ("2000", 0, 0)}, 2003),
        ("0::/a/b\n", {"a/b": ("1000", 6000, 0)}, 0),
        ("0::/a/b\n", {"a/b": ("much", 6000, 0)}, MACHINE_BYTES),
        ("0::/a/b\n", {"a/c": ("1000", 0, 0)}, MACHINE_BYTES),
        ("4:memory:/x\n0::/\n", {"": ("2000", 500, 0)}, 1503),
        ("4:memory:/x\n", {"": ("2000", 500, 0)}, 1503),
        ("", {"": ("2000", 500, 0)}, 1503),
        ("0::/a\n", {"a": (str(1 << 40), 0, 0)}, MACHINE_BYTES),
    ],
    ids=[
        "none seen",
        "no limit",
        "ours",
        "above ours",
        "the tightest",
        "over it already",
        "unreadable",
        "a neighbour's",
        "the root's",
        "version 1 beside it",
        "no cgroups",
        "more than the machine",
    ],
)
def test_d60_a_cgroups_limit_is_what_is_available(
    machine: Callable[..., int],
    own: str,
    limits: dict[str, tuple[str, int, int]],
    bytes_: int,
) -> None:
    """D60: a container's limit kills whoever goes over it; the machine's free memory says nothing
    of it. Cached files give way."""
    assert machine(own, limits) == bytes_


def test_a_small_dev_shm_is_a_clear_error(tmp_path: Path) -> None:
    """ENOSPC for real: a 1 MiB tmpfs, as containers have 64 MiB."""
    program = f"""
import sys; sys.path[:] = {sys.path!r}
from pdcore.errors import TransportError
from pdcore.transports.shm_segment import create_segment
try:
    create_segment(4 << 20, b"u" * 16, {str(tmp_path)!r})
except TransportError as error:
    print(error)
"""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount],
        input=program,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode and "pdcore" not in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert "No space left" in done.stdout, done
    assert "is too small" in done.stdout


def test_a_forked_child_cannot_write(where: str | None) -> None:
    """Trap: pidfd says dead, yet a forked child keeps writing through the mapping it
    inherited. Here it has none: touching it kills the child, the parent keeps it."""
    with created(where) as segment:
        segment.buffer[0] = 7
        child = os.fork()
        if child == 0:
            # Only what is safe in a forked child: touch, and leave without cleanup.
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            segment.buffer[0] = 9
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV
        assert segment.buffer[0] == 7


def test_pages_live_as_long_as_a_view(tmp_path: Path) -> None:
    """Trap: close() under a live view is a SIGSEGV. There is no close; views keep it."""
    made = create_segment(SIZE, US)
    os.close(made.fd)
    view = np.frombuffer(made.buffer, np.uint8)[100:200]
    del made
    view[:] = 3
    assert view.sum() == 300


def stale_name(directory: Path) -> Path:
    name = f"pdcore-{os.geteuid()}-{boot_id().hex()[:8]}-{this_process().pid}-feed"
    return directory / name


def test_the_sweep_removes_what_a_crash_left(tmp_path: Path) -> None:
    """A named file whose owner died between creating and unlinking it."""
    path = stale_name(tmp_path)
    path.write_bytes(b"PDCOREKV" + bytes(HEADER_BYTES))
    assert sweep_stale(str(tmp_path)) == [path.name]
    assert not path.exists()


def test_the_sweep_leaves_the_living_and_the_strange(tmp_path: Path) -> None:
    """A lock means a living owner; no header, another uid's name, or a link: not ours."""
    locked, blank, other, link = (
        tmp_path / f"pdcore-{uid}-x-{name}"
        for uid, name in ((os.geteuid(), 1), (os.geteuid(), 2), (12345, 3), (os.geteuid(), 4))
    )
    for path in (locked, other):
        path.write_bytes(b"PDCOREKV" + bytes(HEADER_BYTES))
    blank.write_bytes(bytes(HEADER_BYTES))
    link.symlink_to(other)
    with open(locked, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep_stale(str(tmp_path)) == []
    assert all(path.exists() for path in (locked, blank, other, link))
    assert sweep_stale(str(tmp_path / "nowhere")) == []


def test_a_killed_owner_drops_its_lock(tmp_path: Path) -> None:
    """SIGKILL between creating and unlinking: the next start cleans up, no tracker needed."""
    path = stale_name(tmp_path)
    program = f"""
import fcntl, os, sys
fd = os.open({str(path)!r}, os.O_CREAT | os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
os.pwrite(fd, b"PDCOREKV", 0)
print("locked", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        assert child.stdout.readline() == b"locked\n"
        assert sweep_stale(str(tmp_path)) == []
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()
        child.stdin.close()
    assert sweep_stale(str(tmp_path)) == [path.name]


def test_a_directory_that_cannot_be_written() -> None:
    with pytest.raises(TransportError, match="/proc/nowhere"):
        create_segment(SIZE, US, "/proc/nowhere")
    assert os.path.isdir(NAMED_DIRECTORY)
