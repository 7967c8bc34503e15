from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdcore.transports import torchdist_witness as module
from pdcore.transports.process_proof import boot_id, start_ticks
from pdcore.transports.torchdist_witness import NOBODY, STAMP, Witness, stamp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def stamp_of(pid: int) -> bytes:
    return STAMP.pack(boot_id(), pid, start_ticks(pid))


@pytest.mark.parametrize("was_reset", [False, True])
def test_the_kernel_says_who_is_dead(child: subprocess.Popen[bytes], was_reset: bool) -> None:
    """However its connection ended: only proof is a death."""
    witness = Witness(stamp_of(child.pid))
    child.kill()
    assert witness.is_dead(was_reset=was_reset)
    witness.close()


@pytest.mark.parametrize("was_reset", [False, True])
def test_a_process_that_lives_is_not_dead(monkeypatch: pytest.MonkeyPatch, was_reset: bool) -> None:
    """A connection that was cut in between proves nothing."""
    monkeypatch.setattr(module, "DEATH_TIMEOUT_S", 0.0)
    witness = Witness(stamp())
    assert not witness.is_dead(was_reset=was_reset)
    witness.close()


@pytest.mark.parametrize(
    "unseen",
    [NOBODY, STAMP.pack(b"h" * 16, 1, 1), STAMP.pack(boot_id(), os.getpid(), 1)],
    ids=["nobody", "another host", "another process of that number"],
)
def test_what_cannot_be_seen_is_judged_by_its_connection(unseen: bytes) -> None:
    """Another host, another pid namespace: the peer's kernel closes for a process that ended;
    a reset may come from anything in between."""
    witness = Witness(unseen)
    assert witness.is_dead(was_reset=False)
    assert not witness.is_dead(was_reset=True)
    witness.close()
    witness.close()
