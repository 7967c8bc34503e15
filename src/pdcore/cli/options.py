"""Flags that several commands share, and what they become in the configuration."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import attrs
from cyclopts import Parameter

from pdcore.config import SIMULATED, DisaggConfig, InstanceConfig
from pdcore.config_loader import Environment, load_instance, parse_setting, read_secret
from pdcore.errors import ConfigError, TransportError
from pdcore.types import Incarnation

Switch = Annotated[bool, Parameter(negative="", show_default=False)]
#: Values separated by commas or given several times.
Words = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]


@Parameter(name="*")
@attrs.frozen
class EngineFlags:
    """What is served and with which resources. None: the file's value, or the default."""

    model: str | None = None
    """A GGUF file or a Hugging Face safetensors folder; default: the embedded model."""
    simulated: Switch = False
    """No model: an engine that proves KV contents. Prompts are token ids."""
    model_name: str | None = None
    """The name clients use; default: the model's own."""
    dtype: str | None = None
    """float32 (exact) or bfloat16 (faster)."""
    num_threads: int | None = None
    """Threads of one worker; default 1."""
    batch_size: int | None = None
    """Requests in one decode step; default 32."""
    max_prefill_tokens: int | None = None
    """Longest prompt; default 8192."""
    kv_cache_bytes: int | None = None
    """KV pool of one worker; default 384 MiB."""
    num_blocks: int | None = None
    """KV pool of one worker in blocks, instead of bytes."""
    transport: Annotated[str | None, Parameter(name=["--transport", "--engine-backend"])] = None
    """How KV moves; default auto. `pdcore doctor` lists what works here."""
    transport_secret_file: str | None = None
    """Transport socket: a file with a secret that all peers must know; default none."""
    integrity: str | None = None
    """crc32: KV travels with checksums, which decode compares; default none."""
    log_level: str | None = None
    """debug, info, warning or error."""
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)] = ()
    """Any other setting: --set section.field=value. `pdcore settings` lists them."""


_SECTION_OF: Final = {
    "model": ("model_config", "model_path"),
    "model_name": ("model_config", "model_name"),
    "dtype": ("model_config", "dtype"),
    "num_threads": ("model_config", "num_threads"),
    "batch_size": ("scheduler_config", "batch_size"),
    "max_prefill_tokens": ("scheduler_config", "max_prefill_tokens"),
    "kv_cache_bytes": ("scheduler_config", "kv_cache_bytes"),
    "num_blocks": ("scheduler_config", "num_blocks"),
    "transport": ("disagg", "transport"),
    "transport_secret_file": ("disagg", "transport_secret_file"),
    "integrity": ("disagg", "integrity"),
    "log_level": ("server_config", "log_level"),
}

Flags = dict[str, dict[str, object]]


def overrides(flags: EngineFlags, env: Environment) -> Flags:
    """section -> field -> value, of what was given. Raises ConfigError for a contradiction
    or a malformed ``--set``."""
    if flags.simulated and flags.model is not None:
        raise ConfigError("--simulated: there is no model to load, leave out --model")
    given: Flags = {"disagg": {}}
    for name, value in attrs.asdict(flags).items():
        if name in _SECTION_OF and value is not None:
            section, field = _SECTION_OF[name]
            given.setdefault(section, {})[field] = value
    if flags.simulated:
        given.setdefault("model_config", {})["model_path"] = SIMULATED
    if env.log_level is not None:
        given.setdefault("server_config", {}).setdefault("log_level", env.log_level)
    for text in flags.set_:
        section, field, value = parse_setting(text)
        given.setdefault(section, {})[field] = value
    return given


def instance_config(
    flags: EngineFlags, env: Environment, path: Path | None = None, extra: Flags | None = None
) -> InstanceConfig:
    """Defaults, file, flags. A model path is checked here, where the message is short.
    Raises ConfigError."""
    given = overrides(flags, env)
    for section, values in (extra or {}).items():
        given.setdefault(section, {}).update(values)
    config = load_instance(path, given)
    if config.model.model_path is None and env.model is not None:
        config = attrs.evolve(config, model=attrs.evolve(config.model, model_path=env.model))
    check_model(config)
    config.require_served()
    check_transport(config.disagg)
    return config


def check_model(config: InstanceConfig) -> None:
    """Raises ConfigError when the model is not there; nothing is read yet."""
    model = config.model
    if model.is_simulated:
        return
    if model.model_path is not None:
        if not Path(model.model_path).exists():
            raise ConfigError(
                f"model_config.model_path: {model.model_path}: no such file or folder"
            )
        return
    from pdcore.engine.load import EMBEDDED_REMEDY, locate_embedded_model

    if locate_embedded_model() is None:
        raise ConfigError(
            f"the embedded model is not installed: run `{EMBEDDED_REMEDY}`, or name one with "
            "--model PATH, or try --simulated"
        )


def check_transport(disagg: DisaggConfig) -> None:
    """Raises ConfigError for a transport that is unknown, does not work here, or does not
    reach a host that was named."""
    from pdcore.transports import registry

    chosen = registry.resolve(disagg.transport)
    reason = registry.load(chosen).why_unavailable()
    if reason is not None:
        raise ConfigError(registry.refusal(chosen, reason))
    registry.require_reach(chosen, disagg.other_hosts)
    check_secret(chosen, disagg.transport_secret_file)


def check_secret(transport: str, path: str) -> None:
    """Raises ConfigError for a secret that a worker would refuse, where the message is short."""
    from pdcore.transports import registry

    secret = read_secret(path)
    if secret is None:
        return
    try:
        place = registry.WorkerPlace(secret=secret)
        registry.create_for_worker(transport, Incarnation(os.urandom(16)), place).close()
    except TransportError as error:
        raise ConfigError(f"transport_secret_file: {path}: {error}") from None


def split_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """``("a,b", "c")`` -> ``("a", "b", "c")``."""
    return tuple(part.strip() for word in words for part in word.split(",") if part.strip())


def complain(message: str) -> None:
    """One message for a person, on standard error. Never raises: what must happen after it
    happens also where nobody reads any more or the disk is full."""
    with contextlib.suppress(OSError):
        print(f"pdcore: {message}", file=sys.stderr, flush=True)
