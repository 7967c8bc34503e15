"""The one table of every constant and default (D44), read off the configuration classes.

:data:`SEED_CONSTANTS` lists the seed's constants (requirements, section 1.2) and says for
each which setting it became, or why pdcore has nothing to set there. A test checks that
every name resolves, so a setting cannot be dropped or renamed silently (D61).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import attrs

from pdcore.config.deploy import DisaggConfig, RouterConfig, ServerConfig
from pdcore.config.limits import CoreLimits
from pdcore.config.sections import DataConfig, ModelConfig, ParallelConfig, SchedulerConfig

#: section -> (class, where it is written).
SECTIONS: Final[dict[str, type[attrs.AttrsInstance]]] = {
    "model_config": ModelConfig,
    "data_config": DataConfig,
    "parallel_config": ParallelConfig,
    "scheduler_config": SchedulerConfig,
    "limits_config": CoreLimits,
    "server_config": ServerConfig,
    "disagg": DisaggConfig,
    "router": RouterConfig,
}
#: Written as flags and never in YAML (R13): they differ from node to node.
FLAG_SECTIONS: Final = ("disagg", "router")


class Constant(NamedTuple):
    section: str
    name: str
    default: object
    unit: str
    allowed: str
    reason: str
    seed: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"


def _read() -> tuple[Constant, ...]:
    rows = []
    for section, cls in SECTIONS.items():
        for field in attrs.fields(cls):
            m = field.metadata
            rows.append(
                Constant(
                    section,
                    field.name,
                    field.default,
                    m["unit"],
                    m["allowed"],
                    m["reason"],
                    m["seed"],
                )
            )
    return tuple(rows)


CONSTANTS: Final = _read()


class SeedConstant(NamedTuple):
    """``settings`` are keys of :data:`CONSTANTS`; empty where ``why`` says what replaced it."""

    name: str
    value: str
    settings: tuple[str, ...] = ()
    why: str = ""


SEED_CONSTANTS: Final = (
    SeedConstant("PREFILL_HTTP_PORT / DECODE_HTTP_PORT", "8001 / 8100", ("disagg.http_port",)),
    SeedConstant("ROUTER_HTTP_PORT", "8000", ("router.port",)),
    SeedConstant("BOOTSTRAP_PORT", "18800", ("disagg.bootstrap_port", "router.bootstrap_ports")),
    SeedConstant(
        "ZMQ_ROUTER_PORT / ZMQ_PULL_PORT",
        "5555 / 5556, decode +2",
        ("disagg.link_port",),
        "one socket pair instead of two",
    ),
    SeedConstant("store port", "10002", (), "no transport needs a store host (D49)"),
    SeedConstant(
        "register_rank attempts / timeout / gap",
        "10 / 5 s / 1 s",
        ("limits_config.resend_initial_s", "limits_config.resend_max_s"),
        "repeated until it succeeds, while health says why it has not (D33)",
    ),
    SeedConstant(
        "route, query, register_dp_rank HTTP timeout",
        "5 s",
        ("limits_config.topology_retry_s",),
        "fetched off the tick; a slow answer delays nothing else (D28)",
    ),
    SeedConstant(
        "heartbeat interval / timeout / max failures",
        "5 s / 2+3 s / 3",
        ("limits_config.heartbeat_interval_s", "limits_config.heartbeat_misses"),
    ),
    SeedConstant(
        "bootstrap_timeout",
        "1800 s",
        ("server_config.request_timeout_s",),
        "a leg's timer runs from acceptance, also while it waits for the handshake (rule 8)",
    ),
    SeedConstant(
        "waiting_timeout",
        "60 s",
        ("server_config.request_timeout_s",),
        "a leg has one timer, from acceptance (rule 8)",
    ),
    SeedConstant(
        "prealloc topology retries / interval",
        "15 / 1.0 s",
        ("limits_config.topology_retry_s", "limits_config.topology_ttl_s"),
        "retried until the request's own deadline",
    ),
    SeedConstant("dp-rank query retries", "15", (), "the router names the dp rank (D20)"),
    SeedConstant(
        "ASCEND_TRANSFER_THREADS", "4", (), "a transport owns its threads and declares them"
    ),
    SeedConstant(
        "SESSION_MAX_FAILURES",
        "3",
        ("limits_config.heartbeat_misses",),
        "a peer is Dead by proof, not by counting failed writes",
    ),
    SeedConstant(
        "metadata slot / max spec tokens / alignment",
        "64 B / 7 / 2 MiB",
        ("model_config.next_n",),
        "the record travels on the control channel (rule 5); alignment is a transport's",
    ),
    SeedConstant(
        "metadata pool capacity", "batch size per dp rank", ("scheduler_config.metadata_slots",)
    ),
    SeedConstant(
        "num_reserved_decode_tokens", "64", ("scheduler_config.num_reserved_decode_tokens",)
    ),
    SeedConstant(
        "listener timeout, result poll, idle poll",
        "100 / 100 / 1000 ms",
        (),
        "event-driven: nothing polls (D46)",
    ),
    SeedConstant(
        "router HTTP timeout, request timeout",
        "1800 s, 1800 s",
        ("router.request_timeout_s", "server_config.request_timeout_s"),
    ),
    SeedConstant(
        "enqueue timeout", "60000 ms", (), "a send never blocks: a full queue is a 429 (D42)"
    ),
    SeedConstant(
        "terminal-request cache",
        "1024 entries",
        ("limits_config.tombstone_cap", "limits_config.tombstone_ttl_s"),
    ),
    SeedConstant(
        "engine init retry",
        "30 x 2 s",
        ("server_config.max_restarts", "server_config.restart_max_s"),
    ),
    SeedConstant(
        "scheduler: batch_size, max_new_tokens, max_prefill_tokens, mem_fraction_static, "
        "block_size, cp_mini_batch",
        "1, 32, 0, 0.85, 128, -1",
        (
            "scheduler_config.batch_size",
            "scheduler_config.max_new_tokens",
            "scheduler_config.max_prefill_tokens",
            "scheduler_config.mem_fraction_static",
            "scheduler_config.block_size",
            "scheduler_config.cp_mini_batch",
        ),
    ),
)
