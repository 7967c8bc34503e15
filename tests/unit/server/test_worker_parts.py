"""The parts of a worker: KV pool sizes, limits, and what is published, in which order."""

from __future__ import annotations

import random
from pathlib import Path

import attrs
import pytest

from pdcore.config import CoreLimits, InstanceConfig, WorkerConfig, worker_config
from pdcore.control.codec import decode_endpoint
from pdcore.control.link import LeaderLink
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner
from pdcore.errors import ConfigError, EngineError
from pdcore.scheduler.route import registration_of
from pdcore.server.worker_parts import (
    build,
    effective_limits,
    load,
    num_blocks,
    numeric_host,
    place_of,
)
from pdcore.testing.runner_rig import Rig
from pdcore.transports.registry import WorkerPlace
from pdcore.transports.shm_segment import available_bytes

RUNNER = SimulatedRunner(SimulatedConfig())
BLOCK_BYTES = sum(RUNNER.kv_cache_spec.block_bytes.values())


def worker(**changes: object) -> WorkerConfig:
    told = worker_config(
        InstanceConfig(),
        instance="127.0.0.1:8001",
        rank=0,
        local_rank=0,
        link_address="tcp://127.0.0.1:1",
        bootstrap="127.0.0.1:2",
        bootstrap_token="t",
        parent_pid=1,
    )
    simulated = {"model_path": "simulated", "transport": "loopback", **changes}
    return attrs.evolve(told, **simulated)


def test_no_prompt_is_longer_than_the_model() -> None:
    limits = effective_limits(CoreLimits(), 100)
    assert limits.max_prefill_tokens == 99
    assert limits.prefill_chunk_tokens == 99
    assert effective_limits(CoreLimits(), 100_000) == CoreLimits()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_blocks": 300, "kv_cache_bytes": None}, 300),
        ({"kv_cache_bytes": 300 * BLOCK_BYTES + 5}, 300),
        ({"kv_cache_bytes": 1 << 40}, 32 * 256 + 1),
        ({"kv_cache_bytes": None, "mem_fraction": 0.5}, 32 * 256 + 1),
    ],
)
def test_pool_sizes(changes: dict[str, object], expected: int) -> None:
    """R100; never more than 32 sequences of the model's full length could use."""
    config = worker(**changes)
    assert num_blocks(config, effective_limits(config.limits, 4096), RUNNER) == expected


def test_a_pool_that_cannot_hold_one_prompt_is_refused_with_the_size_that_would() -> None:
    """R100: (blocks - 1) x block_size - 1 >= max_prefill_tokens."""
    config = worker(kv_cache_bytes=200 * BLOCK_BYTES)
    limits = effective_limits(config.limits, 4096)
    with pytest.raises(ConfigError, match=r"kv_cache_bytes to at least (\d+)") as error:
        num_blocks(config, limits, RUNNER)
    needed = int(str(error.value).split("at least ")[1].split(" ")[0])
    count = num_blocks(worker(kv_cache_bytes=needed), limits, RUNNER)
    with pytest.raises(ConfigError):
        num_blocks(worker(kv_cache_bytes=needed - 1), limits, RUNNER)
    assert (count - 1) * 16 - 1 >= limits.max_prefill_tokens


def test_a_share_of_memory_is_of_what_the_cgroup_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """R100 with mem_fraction_static: a container's limit counts, not the machine's memory.
    The same function says what a shared segment may take."""
    monkeypatch.setattr("pdcore.server.worker_parts.available_bytes", lambda: 1000 * BLOCK_BYTES)
    config = worker(kv_cache_bytes=None, mem_fraction=0.5)
    assert num_blocks(config, effective_limits(config.limits, 4096), RUNNER) == 500
    available = "pdcore.transports.shm_segment.available_bytes"
    assert f"{available_bytes.__module__}.{available_bytes.__name__}" == available


@pytest.mark.parametrize(("role", "expected"), [("decode", 76), ("prefill", 4096)])
def test_decode_is_as_long_as_its_longest_prompt_and_output(role: str, expected: int) -> None:
    """R18, for every engine: the simulated one did not listen."""
    limits = attrs.evolve(CoreLimits(), max_prefill_tokens=64)
    config = worker(role=role, max_new_tokens=12, limits=limits)
    assert load(config, lambda text: None).max_model_len == expected


def test_simulated_takes_its_sizes_from_the_configuration() -> None:
    runner = load(worker(block_size=8, max_model_len=64), lambda text: None)
    assert runner.max_model_len == 64
    assert runner.kv_cache_spec.block_sizes == {"full": 8}


def noticed(runner: SimulatedRunner, position: int) -> bool:
    """Whether the next step says that the KV of this position has another byte."""
    rig = Rig(runner, 8, random.Random(1))
    (seq,) = rig.sequences([[(7 * i) % 1000 for i in range(40)]], 2)
    rig.prefill([seq])
    block, offset = divmod(position, 16)
    row = runner.kv_cache_spec.entries[3].token_bytes
    rig.block(3, seq.blocks["full"][block])[offset * row] ^= 1
    try:
        rig.decode([seq], 1)
    except EngineError as error:
        return f"the KV of position {position} in block" in str(error)
    return False


def test_one_wrong_row_in_the_middle_of_a_block_is_noticed_by_the_next_step() -> None:
    """Issue 3, point 10: after a fault the block bytes of other requests are unchanged, all of
    them. Served simulated engines look at every position, so that one stray row fails the
    request it hit, however short; with two offsets per block most would go by."""
    for position in range(40):
        runner = load(worker(), lambda text: None)
        assert isinstance(runner, SimulatedRunner)
        assert noticed(runner, position), position
    lax = [noticed(SimulatedRunner(SimulatedConfig()), position) for position in range(40)]
    assert sum(lax) < 10


def test_a_worker_is_registered_with_what_decode_must_compare() -> None:
    """D34 (memory first), D35: layout and model, not only sizes."""

    link = LeaderLink(lambda rank, message: None)
    config = worker(link_address=link.address, role="prefill")
    parts = build(config, lambda text: None)
    try:
        built = parts.assemble(parts.link)
        told = registration_of(built.core.setup)
        assert told.layout_digest == RUNNER.kv_cache_spec.digest()
        assert told.fingerprint == "simulated"
        assert told.kv_cache_dtype == "uint8"
        assert told.max_prefill_tokens == 4095
        assert told.rank_port == int(parts.channel.address.rpartition(":")[2])
        assert told.incarnation == built.core.setup.me.incarnation.hex()
    finally:
        assert parts.close(0.0) == []
        link.close()


def test_checksums_are_what_the_configuration_says() -> None:
    link = LeaderLink(lambda rank, message: None)
    config = worker(link_address=link.address, role="decode", integrity="crc32", bootstrap="")
    parts = build(config, lambda text: None)
    try:
        setup = parts.assemble(parts.link).core.setup
        assert decode_endpoint(setup.endpoint()).integrity == "crc32"
    finally:
        parts.close(0.0)
        link.close()


def test_a_failed_start_leaves_nothing_open() -> None:
    with pytest.raises(ConfigError, match="link address"):
        build(worker(link_address="tcp://nowhere"), lambda text: None)


def test_names_are_resolved_once_at_start() -> None:
    """Peers connect to numbers only: the channel's thread must never wait for a resolver."""
    assert numeric_host("127.0.0.1") == "127.0.0.1"
    assert numeric_host("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match=r"local_ip 'a\.\.b' does not resolve"):
        numeric_host("a..b")


def test_the_transport_learns_where_the_worker_stands(tmp_path: Path) -> None:
    """R15: what to bind and what others dial, as numbers; and the secret, from its file."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of enough bytes\n")
    config = worker(bind_host="localhost", transport_secret_file=str(secret))
    place = place_of(config, "10.0.0.1")
    assert place.bind_host in ("127.0.0.1", "::1")
    assert place.advertise_host == "10.0.0.1"
    assert place.secret == "a secret of enough bytes"
    assert place_of(worker(bind_host="*"), "10.0.0.1") == WorkerPlace("*", "10.0.0.1")
    with pytest.raises(ConfigError, match=r"^host 'a\.\.b' does not resolve"):
        place_of(worker(bind_host="a..b"), "10.0.0.1")
