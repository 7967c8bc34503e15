from __future__ import annotations

import select
import subprocess
import sys

import attrs
import pytest

from pdcore.errors import PeerGone
from pdcore.transports.process_proof import ProcessKey, start_ticks
from pdcore.transports.socket_address import Origin, this_origin
from pdcore.transports.socket_witness import Witness, open_proof
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux")
ONE, TWO = Incarnation(b"1" * 16), Incarnation(b"2" * 16)


def origin_of(pid: int) -> Origin:
    return attrs.evolve(this_origin(), process=ProcessKey(pid, start_ticks(pid)))


def test_a_death_ends_all_lives_of_the_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    witness = Witness()
    try:
        there = origin_of(child.pid)
        pidfd = open_proof(this_origin(), there)
        assert witness.watch(there.process, ONE, pidfd) == pidfd
        again = open_proof(this_origin(), there)
        assert witness.watch(there.process, TWO, again) is None
        assert witness.is_watched(pidfd)
        assert not select.select([pidfd], [], [], 0)[0]
        child.kill()
        child.wait()
        assert select.select([pidfd], [], [], 5)[0]
        assert witness.bury(pidfd) == [ONE, TWO]
        assert witness.bury(pidfd) == []
        with pytest.raises(PeerGone):
            open_proof(this_origin(), there)
    finally:
        child.kill()
        child.communicate()
        witness.close()


def test_who_ended_in_order_is_not_watched() -> None:
    here = this_origin()
    witness = Witness()
    pidfd = open_proof(here, here)
    witness.watch(here.process, ONE, pidfd)
    witness.watch(here.process, TWO, open_proof(here, here))
    assert witness.forget(ONE) == []
    assert witness.forget(TWO) == [pidfd]
    assert not witness.is_watched(pidfd)
    import os

    os.close(pidfd)
    witness.close()


def test_another_hosts_process_is_not_looked_up_here() -> None:
    """Its pid would be somebody else's."""
    here = this_origin()
    assert open_proof(here, attrs.evolve(here, boot_id=b"o" * 16)) == -1
    assert open_proof(here, attrs.evolve(here, pids=here.pids + 1)) == -1
