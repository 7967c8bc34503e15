"""What torchdist must do besides the suite, with processes that import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torchdist needs the extra `torch`")

from pdcore.testing.transport_checks_process import one_piece, whole_lease
from pdcore.testing.transport_harness import RegistryHarness
from pdcore.testing.transport_watch import Watched, pump

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux"),
]
SOON_S = 20.0


def test_death_is_seen_although_a_forked_child_lives(tmp_path: Path) -> None:
    """The control connections are closed in the child, so their end is the parent's."""
    pipe = str(tmp_path / "until")
    os.mkfifo(pipe)
    harness = RegistryHarness("torchdist")
    mine = Watched(harness.create())
    peer = harness.peer()
    try:
        local = mine.transport.allocate(16 << 20)
        source = peer.allocate(16 << 20)
        peer.connect(mine.transport.descriptor())
        lease = whole_lease(mine, local.region_id)
        mine.transport.grant(lease)
        for _ in range(20):
            peer.submit(source, local.region_id, one_piece(1 << 20, 16 << 20), lease, b"n")
        pump(mine, until=lambda: bool(mine.record.notes), timeout_s=SOON_S)
        peer.request("fork", until=pipe)
        peer.kill()
        pump(mine, until=lambda: bool(mine.record.deaths), timeout_s=SOON_S)
        assert mine.record.deaths[0].fenced
    finally:
        with open(pipe, "wb"):
            pass
        peer.close()
        mine.transport.close()


def test_a_transport_that_is_not_closed_does_not_keep_the_interpreter() -> None:
    program = f"""
import sys; sys.path[:] = {sys.path!r}
from pdcore.testing.transport_harness import Pair, RegistryHarness
pair = Pair(RegistryHarness("torchdist"), 1 << 24)
pair.submit(pair.lease(), pair.batch((0, 0, 1 << 24)))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
