"""One role's whole configuration, what follows from it, and what one worker is told."""

from __future__ import annotations

from typing import Final

import attrs
import msgspec

from pdcore.config.deploy import DisaggConfig, ServerConfig
from pdcore.config.limits import CoreLimits
from pdcore.config.sections import (
    DEFAULT_KV_CACHE_BYTES,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdcore.errors import ConfigError
from pdcore.types import NO_CHECKSUMS

#: Fields of CoreLimits that ``scheduler_config`` sets under the seed's names; elsewhere
#: they would be a second place for one number.
SCHEDULER_OWNED: Final = {
    "max_running": "batch_size",
    "max_prefill_tokens": "max_prefill_tokens",
    "prefill_chunk_tokens": "prefill_chunk_tokens",
    "num_reserved_decode_tokens": "num_reserved_decode_tokens",
    "num_metadata_slots": "metadata_slots",
}


@attrs.frozen
class InstanceConfig:
    """What one prefill or decode instance is started with."""

    model: ModelConfig = attrs.field(factory=ModelConfig)
    data: DataConfig = attrs.field(factory=DataConfig)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    scheduler: SchedulerConfig = attrs.field(factory=SchedulerConfig)
    limits: CoreLimits = attrs.field(factory=CoreLimits)
    server: ServerConfig = attrs.field(factory=ServerConfig)
    disagg: DisaggConfig = attrs.field(factory=DisaggConfig)

    @property
    def batch_size_per_dp_rank(self) -> int:
        """Derived, never configured (R18)."""
        return max(1, self.scheduler.batch_size // self.parallel.attn_dp_size)

    @property
    def max_prefill_tokens(self) -> int:
        """0 derives it from the offline prompt length (R18)."""
        derived = self.data.input_truncated_len * self.batch_size_per_dp_rank
        return self.scheduler.max_prefill_tokens or derived

    @property
    def max_new_tokens(self) -> int | None:
        """The most that a request may ask for. The seed's prefill files say 1, the token
        that prefill itself makes, which limits no request (R19)."""
        wanted = self.scheduler.max_new_tokens
        return None if self.disagg.role == "prefill" and wanted == 1 else wanted

    @property
    def num_metadata_slots(self) -> int:
        return self.scheduler.metadata_slots or 2 * self.batch_size_per_dp_rank

    @property
    def kv_cache_bytes(self) -> int | None:
        """None where ``num_blocks`` or ``mem_fraction_static`` decides."""
        scheduler = self.scheduler
        if scheduler.num_blocks is None and scheduler.mem_fraction_static is None:
            return scheduler.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
        return None

    @property
    def core_limits(self) -> CoreLimits:
        """The limits of one rank's core: ``limits`` with what ``scheduler`` decides."""
        return attrs.evolve(
            self.limits,
            max_running=self.batch_size_per_dp_rank,
            max_prefill_tokens=self.max_prefill_tokens,
            prefill_chunk_tokens=self.scheduler.prefill_chunk_tokens,
            num_reserved_decode_tokens=self.scheduler.num_reserved_decode_tokens,
            num_metadata_slots=self.num_metadata_slots,
        )

    def require_served(self) -> None:
        """Refuse at start what is valid but not served yet, instead of half-doing it (D30).

        Raises ConfigError naming field, value and remedy.
        """
        valid_but_not_served = (
            ("parallel_config.cp_size", self.parallel.cp_size, 1),
            ("parallel_config.pp_size", self.parallel.pp_size, 1),
            ("model_config.next_n", self.model.next_n, 0),
            ("model_config.exe_mode", self.model.exe_mode, "eager"),
            ("scheduler_config.cp_mini_batch", self.scheduler.cp_mini_batch, -1),
        )
        for name, text in (
            ("dataset", self.data.dataset),
            ("dataset_path", self.data.dataset_path),
        ):
            if text not in ("", "default"):
                raise ConfigError(
                    f"data_config.{name}: {text!r} names prompts to run offline, and this version "
                    "only answers requests; leave it out"
                )
        for name, value, served in valid_but_not_served:
            if value != served:
                raise ConfigError(
                    f"{name}: {value} is a valid setting, but this version serves only {served}; "
                    f"set it to {served} (for more throughput start more instances)"
                )


@attrs.frozen
class WorkerConfig:
    """Everything one worker process is told, as JSON on its standard input (never pickle).

    ``instance`` is the leader's ``host:port``; ``link_address`` where its dispatcher
    listens (it holds a secret: never log it);
    ``bootstrap`` the ``host:port`` to register with (prefill only, else empty), and
    ``bootstrap_token`` what it wants to see for that;
    ``cpu_cores`` an empty tuple for "do not pin"; ``group_link`` and ``group_rendezvous`` how the
    ranks of a group find each other, for votes and for the engine's sums (empty: alone).
    """

    role: str
    instance: str
    rank: int
    local_rank: int
    world_size: int
    link_address: str
    bootstrap: str
    bootstrap_token: str
    parent_pid: int
    limits: CoreLimits
    model_path: str | None = None
    dtype: str = "float32"
    max_model_len: int | None = None
    num_threads: int = 1
    cache_dir: str = ""
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    mem_fraction: float | None = None
    max_new_tokens: int | None = None
    transport: str = "auto"
    transport_secret_file: str = ""
    integrity: str = NO_CHECKSUMS
    bind_host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    log_level: str = "info"
    attn_tp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    dp_rank: int = 0
    allowed_bootstraps: tuple[str, ...] = ()
    cpu_cores: tuple[int, ...] = ()
    group_link: str = ""
    group_rendezvous: str = ""
    ready_timeout_s: float = 120.0

    def encode(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> WorkerConfig:
        """Raises ConfigError for anything :meth:`encode` does not produce."""
        try:
            return msgspec.json.decode(data, type=WorkerConfig)
        except msgspec.DecodeError as error:
            raise ConfigError(f"worker configuration: {error}") from None


def worker_config(
    config: InstanceConfig,
    *,
    instance: str,
    rank: int,
    local_rank: int,
    link_address: str,
    bootstrap: str,
    bootstrap_token: str,
    parent_pid: int,
    cache_dir: str = "",
    cpu_cores: tuple[int, ...] = (),
    group_link: str = "",
    group_rendezvous: str = "",
) -> WorkerConfig:
    """What the leader tells the worker of one rank."""
    parallel = config.parallel
    group = parallel.attn_tp_size * parallel.cp_size
    return WorkerConfig(
        role=config.disagg.role,
        instance=instance,
        rank=rank,
        local_rank=local_rank,
        world_size=parallel.world_size,
        link_address=link_address,
        bootstrap=bootstrap,
        bootstrap_token=bootstrap_token,
        parent_pid=parent_pid,
        limits=config.core_limits,
        model_path=config.model.model_path,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        num_threads=config.model.num_threads,
        cache_dir=cache_dir,
        block_size=config.scheduler.block_size,
        num_blocks=config.scheduler.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        mem_fraction=config.scheduler.mem_fraction_static,
        max_new_tokens=config.scheduler.max_new_tokens,
        transport=config.disagg.transport,
        transport_secret_file=config.disagg.transport_secret_file,
        integrity=config.disagg.integrity,
        bind_host=config.disagg.host,
        advertise_host=config.disagg.local_ip,
        log_level=config.server.log_level,
        attn_tp_size=parallel.attn_tp_size,
        cp_size=parallel.cp_size,
        dp_size=parallel.dp_size,
        dp_rank=rank // group,
        allowed_bootstraps=config.disagg.allowed_bootstraps,
        cpu_cores=cpu_cores,
        group_link=group_link,
        group_rendezvous=group_rendezvous,
        ready_timeout_s=config.server.ready_timeout_s,
    )
