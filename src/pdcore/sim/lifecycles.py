"""The fixed list of worlds that ``pdcore verify lifecycles`` explores, each to its end.

Together they take every row of every lifecycle: the command says which rows none of them took.
"""

from __future__ import annotations

from typing import Final

from pdcore.sim.configurations import Configuration
from pdcore.sim.other_configurations import OTHER_CONFIGURATIONS
from pdcore.sim.pair_configurations import PAIR_CONFIGURATIONS, PAIR_MIXES

CONFIGURATIONS: Final[tuple[Configuration, ...]] = (
    *PAIR_CONFIGURATIONS,
    *OTHER_CONFIGURATIONS,
)

#: Too large to be explored to their end; walked through at random.
MIXES: Final[tuple[Configuration, ...]] = PAIR_MIXES
