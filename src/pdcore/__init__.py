"""pdcore: prefill/decode disaggregation for any LLM inference server.

``import pdcore`` is cheap: names are imported when they are first used (PEP 562), so a
program that only validates a configuration never pays for torch, zmq or a web server.
To export a name, add one line to ``_EXPORTS`` and one under ``TYPE_CHECKING``.
docs/library.md says which names belong to which way of using pdcore.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdcore import errors, types
    from pdcore.assembly import WorkerOptions, build_worker
    from pdcore.config.limits import CoreLimits
    from pdcore.control.bootstrap_client import BootstrapClient
    from pdcore.control.messages import Finished, Tokens, WorkerMessage
    from pdcore.control.zmq import ZmqChannel
    from pdcore.engine.base import Allocate, GroupLost, ModelRunner, RunnerCaps
    from pdcore.engine.paging import PagedLimits, batch_slots, side_by_side
    from pdcore.engine.simulated import SimulatedRunner
    from pdcore.fsm import effects, events
    from pdcore.kv.cache import KVBlocks
    from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
    from pdcore.local import LocalPort, local_route
    from pdcore.scheduler.decode import DecodeCore
    from pdcore.scheduler.prefill import PrefillCore
    from pdcore.scheduler.route import registration_of, route_of
    from pdcore.scheduler.setup import CoreSetup
    from pdcore.server.bootstrap import create_bootstrap_app
    from pdcore.server.embedded import EmbeddedInstance
    from pdcore.server.instance import create_instance_app
    from pdcore.server.lifespans import run_lifespans
    from pdcore.server.router import create_router_app
    from pdcore.server.routes import RouteFetcher
    from pdcore.server.serve import AppServer, bind, port_of
    from pdcore.server.text import IdDetokenizer, IdTokenizer, TextModel
    from pdcore.system_clock import SystemClock
    from pdcore.transports.registry import available as available_transports
    from pdcore.transports.registry import create as create_transport
    from pdcore.types import (
        Batch,
        FinishReason,
        GenerateRequest,
        Incarnation,
        PeerRef,
        Role,
        RoomKey,
        SamplingParams,
        StepOutput,
    )
    from pdcore.worker import Worker
    from pdcore.worker_thread import WorkerThread

__version__ = "0.1.0"

#: exported name -> (module, attribute); an empty attribute exports the module itself.
_EXPORTS: Final[dict[str, tuple[str, str]]] = {
    "errors": ("pdcore.errors", ""),
    "types": ("pdcore.types", ""),
    # Values that requests and engines exchange.
    "Batch": ("pdcore.types", "Batch"),
    "FinishReason": ("pdcore.types", "FinishReason"),
    "GenerateRequest": ("pdcore.types", "GenerateRequest"),
    "Incarnation": ("pdcore.types", "Incarnation"),
    "PeerRef": ("pdcore.types", "PeerRef"),
    "Role": ("pdcore.types", "Role"),
    "RoomKey": ("pdcore.types", "RoomKey"),
    "SamplingParams": ("pdcore.types", "SamplingParams"),
    "StepOutput": ("pdcore.types", "StepOutput"),
    # Level 1: the cores.
    "CoreLimits": ("pdcore.config.limits", "CoreLimits"),
    "CoreSetup": ("pdcore.scheduler.setup", "CoreSetup"),
    "DecodeCore": ("pdcore.scheduler.decode", "DecodeCore"),
    "KVBlocks": ("pdcore.kv.cache", "KVBlocks"),
    "KVCacheEntry": ("pdcore.kv.spec", "KVCacheEntry"),
    "KVCacheSpec": ("pdcore.kv.spec", "KVCacheSpec"),
    "KVPlacement": ("pdcore.kv.spec", "KVPlacement"),
    "PrefillCore": ("pdcore.scheduler.prefill", "PrefillCore"),
    "SystemClock": ("pdcore.system_clock", "SystemClock"),
    "effects": ("pdcore.fsm.effects", ""),
    "events": ("pdcore.fsm.events", ""),
    "registration_of": ("pdcore.scheduler.route", "registration_of"),
    "route_of": ("pdcore.scheduler.route", "route_of"),
    # Level 2: a worker around your own engine.
    "Allocate": ("pdcore.engine.base", "Allocate"),
    "Finished": ("pdcore.control.messages", "Finished"),
    "GroupLost": ("pdcore.engine.base", "GroupLost"),
    "LocalPort": ("pdcore.local", "LocalPort"),
    "ModelRunner": ("pdcore.engine.base", "ModelRunner"),
    "PagedLimits": ("pdcore.engine.paging", "PagedLimits"),
    "RunnerCaps": ("pdcore.engine.base", "RunnerCaps"),
    "SimulatedRunner": ("pdcore.engine.simulated", "SimulatedRunner"),
    "Tokens": ("pdcore.control.messages", "Tokens"),
    "Worker": ("pdcore.worker", "Worker"),
    "WorkerMessage": ("pdcore.control.messages", "WorkerMessage"),
    "WorkerOptions": ("pdcore.assembly", "WorkerOptions"),
    "WorkerThread": ("pdcore.worker_thread", "WorkerThread"),
    "ZmqChannel": ("pdcore.control.zmq", "ZmqChannel"),
    "available_transports": ("pdcore.transports.registry", "available"),
    "batch_slots": ("pdcore.engine.paging", "batch_slots"),
    "build_worker": ("pdcore.assembly", "build_worker"),
    "create_transport": ("pdcore.transports.registry", "create"),
    "local_route": ("pdcore.local", "local_route"),
    "side_by_side": ("pdcore.engine.paging", "side_by_side"),
    # Level 3: the apps in your own server.
    "AppServer": ("pdcore.server.serve", "AppServer"),
    "BootstrapClient": ("pdcore.control.bootstrap_client", "BootstrapClient"),
    "EmbeddedInstance": ("pdcore.server.embedded", "EmbeddedInstance"),
    "IdDetokenizer": ("pdcore.server.text", "IdDetokenizer"),
    "IdTokenizer": ("pdcore.server.text", "IdTokenizer"),
    "RouteFetcher": ("pdcore.server.routes", "RouteFetcher"),
    "TextModel": ("pdcore.server.text", "TextModel"),
    "bind": ("pdcore.server.serve", "bind"),
    "create_bootstrap_app": ("pdcore.server.bootstrap", "create_bootstrap_app"),
    "create_instance_app": ("pdcore.server.instance", "create_instance_app"),
    "create_router_app": ("pdcore.server.router", "create_router_app"),
    "port_of": ("pdcore.server.serve", "port_of"),
    "run_lifespans": ("pdcore.server.lifespans", "run_lifespans"),
}

__all__ = [
    "Allocate",
    "AppServer",
    "Batch",
    "BootstrapClient",
    "CoreLimits",
    "CoreSetup",
    "DecodeCore",
    "EmbeddedInstance",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "GroupLost",
    "IdDetokenizer",
    "IdTokenizer",
    "Incarnation",
    "KVBlocks",
    "KVCacheEntry",
    "KVCacheSpec",
    "KVPlacement",
    "LocalPort",
    "ModelRunner",
    "PagedLimits",
    "PeerRef",
    "PrefillCore",
    "Role",
    "RoomKey",
    "RouteFetcher",
    "RunnerCaps",
    "SamplingParams",
    "SimulatedRunner",
    "StepOutput",
    "SystemClock",
    "TextModel",
    "Tokens",
    "Worker",
    "WorkerMessage",
    "WorkerOptions",
    "WorkerThread",
    "ZmqChannel",
    "__version__",
    "available_transports",
    "batch_slots",
    "bind",
    "build_worker",
    "create_bootstrap_app",
    "create_instance_app",
    "create_router_app",
    "create_transport",
    "effects",
    "errors",
    "events",
    "local_route",
    "port_of",
    "registration_of",
    "route_of",
    "run_lifespans",
    "side_by_side",
    "types",
]


def __getattr__(name: str) -> object:
    """Import an exported name on first use. Raises AttributeError for any other name."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pdcore' has no attribute {name!r}")
    module_name, attribute = _EXPORTS[name]
    module = import_module(module_name)
    value: object = vars(module)[attribute] if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
