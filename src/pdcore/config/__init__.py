"""The configuration schema: every constant of pdcore, once, with its unit and its reason.

Layer 1: no I/O, no environment (:mod:`pdcore.config_loader` reads files and variables).
pdcore's own defaults serve the embedded model without any configuration; the seed's
values, where they differ, stand beside them and live in ``examples/configs`` (D44,
R13-R19). ``docs/configuration.md`` is generated from these classes, so it cannot drift
(D61).
"""

from __future__ import annotations

from pdcore.config.constants import CONSTANTS, SEED_CONSTANTS, Constant, SeedConstant
from pdcore.config.deploy import DisaggConfig, RouterConfig, ServerConfig, normalise_address
from pdcore.config.instance import (
    SCHEDULER_OWNED,
    InstanceConfig,
    WorkerConfig,
    worker_config,
)
from pdcore.config.limits import DEFAULT_LIMITS, CoreLimits
from pdcore.config.sections import (
    DEFAULT_KV_CACHE_BYTES,
    SIMULATED,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)

__all__ = [
    "CONSTANTS",
    "DEFAULT_KV_CACHE_BYTES",
    "DEFAULT_LIMITS",
    "SCHEDULER_OWNED",
    "SEED_CONSTANTS",
    "SIMULATED",
    "Constant",
    "CoreLimits",
    "DataConfig",
    "DisaggConfig",
    "InstanceConfig",
    "ModelConfig",
    "ParallelConfig",
    "RouterConfig",
    "SchedulerConfig",
    "SeedConstant",
    "ServerConfig",
    "WorkerConfig",
    "normalise_address",
    "worker_config",
]
