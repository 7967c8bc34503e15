"""Two lives at one address, seen by the production peer book."""

from __future__ import annotations

import pytest

from pdcore.sim.explore import explore, replay
from pdcore.sim.peer_world import PEER_MUTANTS, PeerWorld, peer_watching


def test_deaths_are_proved_and_successors_are_found() -> None:
    """D3, D25, D32: silence frees nothing and kills nobody; a restart is detected."""
    with peer_watching():
        found = explore(PeerWorld())
    assert found.violations == ()
    assert found.exhausted
    assert any("Suspect --message_received--> Healthy" in row for row in found.rows)


@pytest.mark.parametrize("mutant", PEER_MUTANTS)
def test_a_known_bad_variant_is_caught(mutant: str) -> None:
    """D3: a time-out that declares a stopped process dead."""
    found = explore(PeerWorld(PEER_MUTANTS[mutant]))
    with pytest.raises(AssertionError, match="a process that lives was declared dead"):
        assert not found.violations, found.violations[0].problem
    steps = replay(PeerWorld(PEER_MUTANTS[mutant]), found.violations[0].trace)
    assert steps[-1].problems
    assert not replay(PeerWorld(), found.violations[0].trace)[-1].problems


def test_a_stopped_process_is_suspected_and_comes_back() -> None:
    world = PeerWorld()
    steps = replay(world, ["A is stopped", *["an interval passes"] * 4])
    assert "Suspect" in steps[-1].state
    steps = replay(world, ["A is stopped", *["an interval passes"] * 4, "A goes on", "A answers"])
    assert "Healthy" in steps[-1].state
