"""YAML, flags, environment: what is right is taken, what is wrong is one clear message."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcore import config_loader
from pdcore.config import RouterConfig
from pdcore.config_loader import (
    ENVIRONMENT,
    build,
    child_environment,
    load_environment,
    load_instance,
    parse_bool,
    read_yaml,
)
from pdcore.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"

#: (what somebody wrote, line that the message must name, words it must contain).
MALFORMED: list[tuple[str, int | None, str]] = [
    ("scheduler_config:\n  batch_size: many\n", 2, "batch_size: expected an integer, got 'many'"),
    ("scheduler_config:\n  batch_size: 0\n", 2, "batch_size must be between 1 and 65536 requests"),
    ("scheduler_config:\n  batch_size: -4\n", 2, "got -4"),
    ("scheduler_config:\n  batch_size: 2.5\n", 2, "batch_size: expected an integer, got 2.5"),
    ("scheduler_config:\n  batch_size: true\n", 2, "expected an integer, got True"),
    ("scheduler_config:\n  batch_size: null\n", 2, "expected an integer, got None"),
    ("scheduler_config:\n  batch_size: [1]\n", 2, "expected an integer, got [1]"),
    ("scheduler_config:\n\n  batch_sise: 4\n", 3, "did you mean `batch_size`?"),
    ("scheduler_config:\n  zzz: 4\n", 2, "zzz is not a setting; known: "),
    ("schedular_config:\n  batch_size: 4\n", 1, "did you mean `scheduler_config`?"),
    ("scheduler_config: 4\n", 1, "expected `field: value` lines, got 4"),
    ("scheduler_config: [batch_size]\n", 1, "expected `field: value` lines"),
    ("- scheduler_config\n", 1, "expected sections"),
    ("just words\n", 1, "expected sections"),
    ("model_config:\n  dtype: fp32\n", 2, "dtype must be one of float32, bfloat16, got 'fp32'"),
    ("model_config:\n  dtype: 32\n", 2, "dtype: expected text, got 32"),
    ("model_config:\n  exe_mode: graph\n", 2, "exe_mode must be one of eager, ge_graph"),
    ("data_config:\n  top_p: 1.5\n", 2, "top_p must be between 0.01 and 1, got 1.5"),
    ("data_config:\n  temperature: .nan\n", 2, "temperature must be between 0 and 100, got nan"),
    ("data_config:\n  temperature: cold\n", 2, "temperature: expected a number"),
    (
        "parallel_config:\n  world_size: 8\n  attn_tp_size: 3\n",
        3,
        "attn_tp_size must divide world_size (8), got 3",
    ),
    ("parallel_config:\n  world_size: 8\n  cp_size: 2\n", 3, "cp_size must be 1, or world_size"),
    (
        "scheduler_config:\n  num_blocks: 10\n",
        2,
        "num_blocks must hold max_prefill_tokens (8192), got 10",
    ),
    (
        "scheduler_config:\n  kv_cache_bytes: 5\n  mem_fraction_static: 0.5\n",
        3,
        "mem_fraction_static must not be set together with kv_cache_bytes",
    ),
    ("scheduler_config:\n  mem_fraction_static: 85\n", 2, "must be between 0.01 and 1, got 85"),
    ("disagg_config:\n  bootstrap_port: 1\n", 1, "are flags"),
    ("limits_config:\n  max_running: 4\n", 2, "this is scheduler_config.batch_size"),
    ("limits_config:\n  resend_initial_s: 9\n", 2, "resend_max_s must be >= resend_initial_s"),
    ("server_config:\n  pin_cpus: 1\n", 2, "pin_cpus: expected true or false, got 1"),
    ("server_config:\n  pin_cpus: on\n", 2, "pin_cpus: expected true or false, got 'on'"),
    ("server_config:\n  request_timeout_s: 30s\n", 2, "expected a number, got '30s'"),
    ("scheduler_config:\n  batch_size: 4\n  batch_size: 5\n", 3, "not valid YAML"),
    ("scheduler_config:\n\tbatch_size: 4\n", 2, "not valid YAML"),
    ("scheduler_config:\n  batch_size: 'four\n", None, "not valid YAML"),
    ("scheduler_config: {batch_size: 4\n", None, "not valid YAML"),
    ("a: &a [1\n", None, "not valid YAML"),
]


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "role.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("text", "line", "words"), MALFORMED)
def test_a_malformed_file_is_one_clear_message(
    tmp_path: Path, text: str, line: int | None, words: str
) -> None:
    """Issue item 8: file, line, field, allowed values; never a traceback."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_instance(path, {})
    message = str(error.value)
    assert "\n" not in message
    assert words in message
    assert message.startswith(f"{path}:{line}: " if line else str(path))


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_instance(tmp_path / "absent.yaml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_instance(tmp_path, {})
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_instance(write(tmp_path, b"\xff\xfe\x00"), {})
    with pytest.raises(ConfigError, match="larger than"):
        load_instance(write(tmp_path, b"#" * ((1 << 20) + 1)), {})


def test_a_yaml_tag_runs_nothing(tmp_path: Path) -> None:
    """D40: a file may not name code; the tag is just a mapping's label."""
    path = write(tmp_path, "scheduler_config: !!python/object/apply:os._exit {batch_size: 3}\n")
    assert load_instance(path, {}).scheduler.batch_size == 3


def test_no_file_and_an_empty_file_are_the_defaults(tmp_path: Path) -> None:
    assert load_instance(None, {}) == load_instance(write(tmp_path, ""), {})
    assert load_instance(write(tmp_path, "scheduler_config:\n"), {}).scheduler.batch_size == 32


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "scheduler_config:\n  batch_size: 4\n  block_size: 8\n")
    config = load_instance(path, {"scheduler_config": {"batch_size": 6}})
    assert config.scheduler.batch_size == 6
    assert config.scheduler.block_size == 8


def test_a_wrong_flag_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "scheduler_config:\n  batch_size: 4\n")
    with pytest.raises(ConfigError, match=r"^flags: scheduler_config\.batch_size must be"):
        load_instance(path, {"scheduler_config": {"batch_size": 0}})


def test_yaml_is_1_2(tmp_path: Path) -> None:
    """YAML 1.1 would read `on` as True, `1:30` as 90 and `010` as 8."""
    document = read_yaml(write(tmp_path, "a: on\nb: 1:30\nc: 010\n"))
    assert document["a"] == "on"
    assert document["b"] == "1:30"
    assert document["c"] == 10


def test_quoted_and_exotic_scalars_are_plain_values(tmp_path: Path) -> None:
    path = write(tmp_path, 'model_config:\n  model_path: "/m"\nlimits_config:\n  linger_s: 3\n')
    config = load_instance(path, {})
    assert type(config.model.model_path) is str
    assert config.limits.linger_s == 3.0


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_seed_examples_load(name: str) -> None:
    """R16, R19: the reference shapes; sixteen ranks on one host are served."""
    config = load_instance(CONFIGS / f"seed-16-ranks-{name}.yaml", {"disagg": {"role": name}})
    assert config.parallel.world_size == 16
    assert config.parallel.dp_size == {"prefill": 1, "decode": 16}[name]
    assert config.scheduler.block_size == 128
    assert config.batch_size_per_dp_rank == {"prefill": 8, "decode": 1}[name]
    config.require_served()


def test_every_other_example_is_served() -> None:
    """tests/unit/server/test_leader.py starts them."""
    served = {path for path in CONFIGS.glob("*.yaml") if not path.name.startswith("seed-")}
    assert {path.name for path in served} == {"prefill.yaml", "decode.yaml", "small.yaml"}
    for path in served:
        load_instance(path, {}).require_served()


def test_the_examples_of_both_roles_agree() -> None:
    """What one role takes, the other does: else requests fail after half of their work."""
    pair = [
        load_instance(CONFIGS / f"{role}.yaml", {"disagg": {"role": role}})
        for role in ("prefill", "decode")
    ]
    both = {
        (one.data, one.model, one.max_new_tokens, one.max_prefill_tokens, one.scheduler.block_size)
        for one in pair
    }
    assert len(both) == 1


def test_router_flags() -> None:
    router = build(
        RouterConfig, {"prefill_addrs": ["p:1"], "decode_addrs": ["d:2"], "port": 0}, "router"
    )
    assert router.port == 0
    with pytest.raises(ConfigError, match=r"flags: router\.prefill_addrs must name"):
        build(RouterConfig, {}, "router")


@pytest.mark.parametrize("word", ["1", "true", "TRUE", " yes ", "on"])
def test_true_words(word: str) -> None:
    assert parse_bool("x", word) is True


@pytest.mark.parametrize("word", ["0", "false", "no", "OFF", ""])
def test_false_words(word: str) -> None:
    assert parse_bool("x", word) is False


def test_d56_flag_readings_of_the_seed_are_caught() -> None:
    """D56: the seed read flags as == "1", == "0" and int(); "true" crashed or half-worked."""

    def check(parse: object) -> None:
        assert callable(parse)
        try:
            outcome = parse("true")
        except ValueError:
            outcome = "crash"
        assert outcome is True

    check(lambda word: parse_bool("x", word))
    for mutant in (lambda word: word == "1", lambda word: bool(int(word))):
        with pytest.raises(AssertionError):
            check(mutant)
    with pytest.raises(ConfigError, match="x: expected true or false"):
        parse_bool("x", "2")


def test_environment_is_read_once_and_misspellings_are_named() -> None:
    """R21."""
    env = load_environment({"PDCORE_DEMO_EXIT": "1", "XDG_CACHE_HOME": "/c", "HOME": "/h"})
    assert env.demo_exit
    assert env.cache_dir == Path("/c/pdcore")
    assert load_environment({"PDCORE_CACHE_DIR": "/d"}).cache_dir == Path("/d")
    with pytest.raises(ConfigError, match="did you mean `PDCORE_DEMO_EXIT`"):
        load_environment({"PDCORE_DEMO_EXITS": "1"})
    with pytest.raises(ConfigError, match="PDCORE_LOG_LEVEL: expected debug"):
        load_environment({"PDCORE_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match="PDCORE_DEMO_EXIT: expected true or false"):
        load_environment({"PDCORE_DEMO_EXIT": "maybe"})


def test_every_variable_is_described() -> None:
    assert all(name.startswith("PDCORE_") and text for name, text in ENVIRONMENT.items())


def test_child_environment_limits_threads() -> None:
    """R11."""
    assert child_environment(3)["OMP_NUM_THREADS"] == "3"


def test_yaml_that_is_nested_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    """A file of brackets, closed or not, is no traceback."""
    for number, text in enumerate(("[" * 500, "[" * 500 + "]" * 500)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(f"model_config: {text}")
        with pytest.raises(ConfigError, match=r"yaml: not valid YAML: nested too deeply"):
            config_loader.read_yaml(path)
    with pytest.raises(ConfigError, match=r"--set model_config.dtype: nested too deeply"):
        config_loader.parse_setting(f"model_config.dtype={'[' * 500}")


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xff\xfe", b"x" * 5000])
def test_what_is_no_secret(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"^transport_secret_file: .*openssl rand"):
        config_loader.read_secret(str(file))


def test_a_secret_is_a_file_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"a secret of enough bytes\r\n")
    assert config_loader.read_secret(str(file)) == "a secret of enough bytes"
    assert config_loader.read_secret("") is None
    for missing in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="cannot be read"):
            config_loader.read_secret(str(missing))
