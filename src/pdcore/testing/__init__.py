"""The public testing kit: check your own engine, transport and server as pdcore checks its own.

Names are imported when they are first used. docs/testing.md shows each of them at work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdcore.control.memory import FaultPlan, MemoryNetwork
    from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
    from pdcore.scheduler.ledger import Account, audit
    from pdcore.testing.conformance import Report, capability_matrix, run_conformance
    from pdcore.testing.late_writes import LateWriteReport, run_late_writes
    from pdcore.testing.runner import check_model_runner
    from pdcore.testing.runner_rig import ContractError
    from pdcore.testing.transport_harness import (
        LoopbackHarness,
        RegistryHarness,
        TransportHarness,
    )
    from pdcore.testing.world import Rank, World, make_world
    from pdcore.transports.loopback_fabric import Faults, LoopbackFabric

#: exported name -> module.
_EXPORTS: Final[dict[str, str]] = {
    "Account": "pdcore.scheduler.ledger",
    "ContractError": "pdcore.testing.runner_rig",
    "FaultPlan": "pdcore.control.memory",
    "Faults": "pdcore.transports.loopback_fabric",
    "LateWriteReport": "pdcore.testing.late_writes",
    "LoopbackFabric": "pdcore.transports.loopback_fabric",
    "LoopbackHarness": "pdcore.testing.transport_harness",
    "MemoryNetwork": "pdcore.control.memory",
    "Rank": "pdcore.testing.world",
    "RegistryHarness": "pdcore.testing.transport_harness",
    "Report": "pdcore.testing.conformance",
    "SimulatedConfig": "pdcore.engine.simulated",
    "TransportHarness": "pdcore.testing.transport_harness",
    "World": "pdcore.testing.world",
    "audit": "pdcore.scheduler.ledger",
    "capability_matrix": "pdcore.testing.conformance",
    "check_model_runner": "pdcore.testing.runner",
    "make_world": "pdcore.testing.world",
    "run_conformance": "pdcore.testing.conformance",
    "run_late_writes": "pdcore.testing.late_writes",
    "simulated_tokens": "pdcore.engine.simulated",
}

__all__ = [
    "Account",
    "ContractError",
    "FaultPlan",
    "Faults",
    "LateWriteReport",
    "LoopbackFabric",
    "LoopbackHarness",
    "MemoryNetwork",
    "Rank",
    "RegistryHarness",
    "Report",
    "SimulatedConfig",
    "TransportHarness",
    "World",
    "audit",
    "capability_matrix",
    "check_model_runner",
    "make_world",
    "run_conformance",
    "run_late_writes",
    "simulated_tokens",
]


def __getattr__(name: str) -> object:
    """Import an exported name on first use. Raises AttributeError for any other name."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pdcore.testing' has no attribute {name!r}")
    value: object = vars(import_module(_EXPORTS[name]))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
