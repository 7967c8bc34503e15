"""Every seed that ever failed, run again: what it found stays fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcore.cli.verify_cluster import read_seeds
from pdcore.sim.seeds import run_seed

RECORDED = read_seeds(Path(__file__).with_name("seeds.txt"))


@pytest.mark.parametrize("seed", RECORDED)
def test_a_recorded_seed_holds(seed: int) -> None:
    """Issue 3.9: the regression tests of the simulated cluster."""
    found = run_seed(seed, is_shrunk=False)
    assert found.violations == []
