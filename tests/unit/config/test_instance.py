"""What follows from a role's configuration, and what a worker is told."""

from __future__ import annotations

import attrs
import pytest

from pdcore.config import (
    CoreLimits,
    DataConfig,
    DisaggConfig,
    InstanceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
    worker_config,
)
from pdcore.errors import ConfigError


def _worker(config: InstanceConfig) -> WorkerConfig:
    return worker_config(
        config,
        instance="127.0.0.1:8001",
        rank=0,
        local_rank=0,
        link_address="tcp://127.0.0.1:5000",
        bootstrap="127.0.0.1:18800",
        bootstrap_token="t",
        parent_pid=1,
    )


def test_default_configuration_gives_the_default_core_limits() -> None:
    """The numbers that two classes mention are one number."""
    assert InstanceConfig().core_limits == CoreLimits()


def test_derived_values() -> None:
    """R18: derived, never configured."""
    config = InstanceConfig(
        parallel=ParallelConfig(world_size=16),
        scheduler=SchedulerConfig(batch_size=32, max_prefill_tokens=0),
    )
    assert config.batch_size_per_dp_rank == 2
    assert config.max_prefill_tokens == 256 * 2
    assert config.num_metadata_slots == 4
    assert config.core_limits.max_running == 2


def test_kv_cache_bytes_only_when_nothing_else_sizes_the_pool() -> None:
    assert InstanceConfig().kv_cache_bytes == 384 << 20
    blocks = SchedulerConfig(num_blocks=1000)
    assert InstanceConfig(scheduler=blocks).kv_cache_bytes is None


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"parallel": ParallelConfig(world_size=2, cp_size=2)}, "parallel_config.cp_size"),
        ({"parallel": ParallelConfig(world_size=2, pp_size=2)}, "parallel_config.pp_size"),
        ({"model": ModelConfig(next_n=1)}, "model_config.next_n"),
        ({"model": ModelConfig(exe_mode="ge_graph")}, "model_config.exe_mode"),
        ({"scheduler": SchedulerConfig(cp_mini_batch=2)}, "scheduler_config.cp_mini_batch"),
    ],
)
def test_valid_but_not_served_is_refused_at_start(part: dict[str, object], field: str) -> None:
    """D30, D61: what is accepted is done; the rest is refused with the remedy."""
    with pytest.raises(ConfigError, match=f"{field}: .* set it to"):
        InstanceConfig(**part).require_served()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_tensor_parallel_groups_are_served(tp_size: int) -> None:
    InstanceConfig(parallel=ParallelConfig(world_size=4, attn_tp_size=tp_size)).require_served()


@pytest.mark.parametrize("data", [{"dataset": "alpaca"}, {"dataset_path": "/data/prompts.json"}])
def test_a_dataset_is_refused(data: dict[str, str]) -> None:
    """D30: it was accepted, and nothing ran it."""
    with pytest.raises(ConfigError, match=r"data_config\.dataset.* leave it out"):
        InstanceConfig(data=DataConfig(**data)).require_served()


def test_prefills_one_token_limits_no_request() -> None:
    """R19: the seed's prefill.yaml says 1 beside a decode.yaml with 8192."""

    def most(role: str, wanted: int | None) -> int | None:
        scheduler = SchedulerConfig(max_new_tokens=wanted)
        return InstanceConfig(scheduler=scheduler, disagg=DisaggConfig(role)).max_new_tokens

    assert most("prefill", 1) is None
    assert most("decode", 1) == 1
    assert [most(role, 64) for role in ("prefill", "decode")] == [64, 64]
    assert most("decode", None) is None


def test_defaults_are_served() -> None:
    InstanceConfig().require_served()


def test_worker_config_round_trips_as_json() -> None:
    """D40: never pickle."""
    config = _worker(InstanceConfig(disagg=DisaggConfig(role="decode")))
    line = config.encode()
    assert b"\n" not in line
    assert WorkerConfig.decode(line) == config
    assert config.role == "decode"


def test_every_setting_of_a_worker_reaches_it() -> None:
    """D44: a flag that is accepted is used. What the seed did: accept and ignore."""
    config = InstanceConfig(
        model=ModelConfig(model_path="/m", dtype="bfloat16", max_model_len=99, num_threads=3),
        scheduler=SchedulerConfig(
            block_size=8, num_blocks=5000, max_new_tokens=7, batch_size=4, metadata_slots=5
        ),
        disagg=DisaggConfig(host="0.0.0.0", local_ip="10.0.0.9", transport="loopback"),
    )
    told = attrs.asdict(_worker(config))
    expected = {
        "model_path": "/m",
        "dtype": "bfloat16",
        "max_model_len": 99,
        "num_threads": 3,
        "block_size": 8,
        "num_blocks": 5000,
        "max_new_tokens": 7,
        "bind_host": "0.0.0.0",
        "advertise_host": "10.0.0.9",
        "transport": "loopback",
    }
    assert {name: told[name] for name in expected} == expected
    assert told["limits"]["max_running"] == 4
    assert told["limits"]["num_metadata_slots"] == 5


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"role": 1}', b"\x80\x04K\x01."])
def test_a_worker_refuses_anything_else(data: bytes) -> None:
    with pytest.raises(ConfigError, match="worker configuration"):
        WorkerConfig.decode(data)
