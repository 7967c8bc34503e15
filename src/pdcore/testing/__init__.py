"""The public testing kit: check your own engine, transport and server as pdcore checks its own.

Names are imported when they are first used; only the strategies need hypothesis
(``pip install 'pdcore[testing]'``). docs/testing.md shows each of them at work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdcore.control.memory import FaultPlan, MemoryNetwork
    from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
    from pdcore.scheduler.ledger import Account, audit
    from pdcore.sim.cluster import Cluster
    from pdcore.sim.plan import Fault, Plan, Request, make_plan
    from pdcore.sim.seeds import Totals, run_seed, run_seeds
    from pdcore.sim.site import Parts
    from pdcore.sim.world import WorldResult, in_world, run_world
    from pdcore.testing.conformance import Report, capability_matrix, run_conformance
    from pdcore.testing.late_writes import LateWriteReport, run_late_writes
    from pdcore.testing.runner import check_model_runner
    from pdcore.testing.runner_rig import ContractError
    from pdcore.testing.strategies import (
        failures,
        fault_plans,
        frames,
        generate_requests,
        incarnations,
        leader_messages,
        leases,
        nonces,
        peer_messages,
        plans,
        room_keys,
        sampling_params,
        worker_messages,
    )
    from pdcore.testing.transport_harness import (
        LoopbackHarness,
        RegistryHarness,
        TransportHarness,
    )
    from pdcore.testing.transport_verify import Verdict, verify_transport
    from pdcore.testing.world import Rank, World, make_world
    from pdcore.transports.loopback_fabric import Faults, LoopbackFabric

#: exported name -> module.
_EXPORTS: Final[dict[str, str]] = {
    "Account": "pdcore.scheduler.ledger",
    "Cluster": "pdcore.sim.cluster",
    "ContractError": "pdcore.testing.runner_rig",
    "Fault": "pdcore.sim.plan",
    "FaultPlan": "pdcore.control.memory",
    "Faults": "pdcore.transports.loopback_fabric",
    "LateWriteReport": "pdcore.testing.late_writes",
    "LoopbackFabric": "pdcore.transports.loopback_fabric",
    "LoopbackHarness": "pdcore.testing.transport_harness",
    "MemoryNetwork": "pdcore.control.memory",
    "Parts": "pdcore.sim.site",
    "Plan": "pdcore.sim.plan",
    "Rank": "pdcore.testing.world",
    "RegistryHarness": "pdcore.testing.transport_harness",
    "Report": "pdcore.testing.conformance",
    "Request": "pdcore.sim.plan",
    "SimulatedConfig": "pdcore.engine.simulated",
    "Totals": "pdcore.sim.seeds",
    "TransportHarness": "pdcore.testing.transport_harness",
    "Verdict": "pdcore.testing.transport_verify",
    "World": "pdcore.testing.world",
    "WorldResult": "pdcore.sim.world",
    "audit": "pdcore.scheduler.ledger",
    "capability_matrix": "pdcore.testing.conformance",
    "check_model_runner": "pdcore.testing.runner",
    "failures": "pdcore.testing.strategies",
    "fault_plans": "pdcore.testing.strategies",
    "frames": "pdcore.testing.strategies",
    "generate_requests": "pdcore.testing.strategies",
    "in_world": "pdcore.sim.world",
    "incarnations": "pdcore.testing.strategies",
    "leader_messages": "pdcore.testing.strategies",
    "leases": "pdcore.testing.strategies",
    "make_plan": "pdcore.sim.plan",
    "make_world": "pdcore.testing.world",
    "nonces": "pdcore.testing.strategies",
    "peer_messages": "pdcore.testing.strategies",
    "plans": "pdcore.testing.strategies",
    "room_keys": "pdcore.testing.strategies",
    "run_conformance": "pdcore.testing.conformance",
    "run_late_writes": "pdcore.testing.late_writes",
    "run_seed": "pdcore.sim.seeds",
    "run_seeds": "pdcore.sim.seeds",
    "run_world": "pdcore.sim.world",
    "sampling_params": "pdcore.testing.strategies",
    "simulated_tokens": "pdcore.engine.simulated",
    "verify_transport": "pdcore.testing.transport_verify",
    "worker_messages": "pdcore.testing.strategies",
}

__all__ = [
    "Account",
    "Cluster",
    "ContractError",
    "Fault",
    "FaultPlan",
    "Faults",
    "LateWriteReport",
    "LoopbackFabric",
    "LoopbackHarness",
    "MemoryNetwork",
    "Parts",
    "Plan",
    "Rank",
    "RegistryHarness",
    "Report",
    "Request",
    "SimulatedConfig",
    "Totals",
    "TransportHarness",
    "Verdict",
    "World",
    "WorldResult",
    "audit",
    "capability_matrix",
    "check_model_runner",
    "failures",
    "fault_plans",
    "frames",
    "generate_requests",
    "in_world",
    "incarnations",
    "leader_messages",
    "leases",
    "make_plan",
    "make_world",
    "nonces",
    "peer_messages",
    "plans",
    "room_keys",
    "run_conformance",
    "run_late_writes",
    "run_seed",
    "run_seeds",
    "run_world",
    "sampling_params",
    "simulated_tokens",
    "verify_transport",
    "worker_messages",
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
