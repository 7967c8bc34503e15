"""YAML, flags and environment -> typed configuration; every mistake is one clear message.

Order: defaults, then the file, then flags. YAML is 1.2 (``on`` is a word, ``1:30`` is not
a number). Every wrong value is a ConfigError that names file, line, section and field,
the value, and what would be right. This module holds the only environment reads of the
package (R21), and booleans are parsed in one place (D56).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, get_type_hints

import attrs
import msgspec

from pdcore.config import (
    SCHEDULER_OWNED,
    CoreLimits,
    DataConfig,
    DisaggConfig,
    InstanceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from pdcore.config.constants import FLAG_SECTIONS, SECTIONS
from pdcore.errors import ConfigError

if TYPE_CHECKING:
    from ruamel.yaml.comments import CommentedMap

#: A configuration file is a page of text; anything larger is another file by mistake.
MAX_FILE_BYTES: Final = 1 << 20
ENV_PREFIX: Final = "PDCORE_"
_TORCH_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"

C = TypeVar("C", bound=attrs.AttrsInstance)

_WORDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "null": "null",
}
_TOO_DEEP: Final = "nested too deeply; settings are sections with `field: value` lines"
#: Sections of a role's YAML file.
_YAML_SECTIONS: Final = tuple(name for name in SECTIONS if name not in FLAG_SECTIONS)


class _Source:
    """Where a mapping was written, for messages: ``file:line: section.field``."""

    __slots__ = ("_lines", "_overridden", "_where")

    def __init__(
        self,
        where: str,
        lines: CommentedMap | None = None,
        overridden: Mapping[str, object] | None = None,
    ) -> None:
        self._where = where
        self._lines = lines
        self._overridden = overridden or {}

    def at(self, field: str) -> str:
        if field in self._overridden:
            return "flags"
        if self._lines is None or field not in self._lines:
            return self._where
        line: int = self._lines.lc.key(field)[0]
        return f"{self._where}:{line + 1}"


def suggest(word: str, known: list[str]) -> str:
    """``; did you mean `x`?`` or, without a near one, the list of what exists."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean `{near[0]}`?"
    return f"; known: {', '.join(sorted(known))}"


def parse_bool(name: str, word: str) -> bool:
    """The one reading of a boolean that is spelled as text (D56). Raises ConfigError."""
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False, "": False}
    value = known.get(word.strip().lower())
    if value is None:
        raise ConfigError(f"{name}: expected true or false (1/0, yes/no, on/off), got {word!r}")
    return value


def build(
    cls: type[C], values: Mapping[str, object], section: str, source: _Source | None = None
) -> C:
    """One section from plain values. Raises ConfigError naming place, field and remedy."""
    source = source or _Source("flags")
    known = {field.name: field for field in attrs.fields(cls)}
    hints = get_type_hints(cls)
    converted: dict[str, object] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(
                f"{source.at(str(name))}: {section}.{name} is not a setting"
                f"{suggest(str(name), list(known))}"
            )
        try:
            converted[name] = msgspec.convert(_plain(value), hints[name])
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{source.at(name)}: {section}.{name}: {_explain(error)}, got {_show(value)}"
            ) from None
    try:
        return cls(**converted)
    except ValueError as error:
        text = str(error)
        # The field at fault may be a default: then the line of another one it clashes with.
        named = [word.strip(":,()") for word in text.split()]
        field = next((word for word in named if word in values), named[0])
        raise ConfigError(f"{source.at(field)}: {section}.{text}") from None


def _plain(value: object) -> object:
    """YAML's own scalar classes (they remember quotes and bases) -> plain Python."""
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _explain(error: msgspec.ValidationError) -> str:
    """ "Expected `int | null`, got `str`" -> "expected an integer or null"."""
    text = str(error).split(", got", 1)[0].split(" - at", 1)[0]
    head, _, kinds = text.partition(" `")
    if not kinds:
        return text[:1].lower() + text[1:]
    words = [_WORDS.get(kind.strip(), kind.strip()) for kind in kinds.rstrip("`").split("|")]
    return f"{head.lower()} {' or '.join(words)}"


def _show(value: object) -> str:
    shown = repr(_plain(value))
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def read_yaml(path: str | os.PathLike[str]) -> CommentedMap:
    """The top-level mapping of a file. Raises ConfigError for anything else."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    name = str(path)
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_FILE_BYTES} bytes; is this a configuration?")
    try:
        document = YAML(typ="rt").load(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not UTF-8 text") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark is not None else name
        problem = str(error.problem or error.context or "cannot be parsed").splitlines()[0]
        raise ConfigError(f"{place}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: {_TOO_DEEP}") from None
    except (YAMLError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"{name}: not valid YAML: {problem}") from None
    if document is None:
        return CommentedMap()
    if not isinstance(document, CommentedMap):
        raise ConfigError(
            f"{name}:1: expected sections ({', '.join(_YAML_SECTIONS)}), got {_show(document)}"
        )
    return document


def load_instance(
    path: str | os.PathLike[str] | None, flags: Mapping[str, Mapping[str, object]]
) -> InstanceConfig:
    """A role's configuration: defaults, overridden by the file, overridden by flags.

    ``flags`` maps a section to the values given on the command line. Raises ConfigError.
    """
    from ruamel.yaml.comments import CommentedMap

    document = read_yaml(path) if path is not None else CommentedMap()
    name = "flags" if path is None else str(path)
    _check_sections(name, document)

    def section(title: str, cls: type[C]) -> C:
        return _merge(cls, title, name, document, flags.get(title, {}))

    return InstanceConfig(
        model=section("model_config", ModelConfig),
        data=section("data_config", DataConfig),
        parallel=section("parallel_config", ParallelConfig),
        scheduler=section("scheduler_config", SchedulerConfig),
        limits=section("limits_config", CoreLimits),
        server=section("server_config", ServerConfig),
        disagg=build(DisaggConfig, flags.get("disagg", {}), "disagg"),
    )


def parse_setting(text: str) -> tuple[str, str, object]:
    """``section.field=value`` of a ``--set`` flag -> (section, field, value as YAML reads
    it). Raises ConfigError."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    key, equals, written = text.partition("=")
    section, dot, field = key.strip().partition(".")
    if not equals or not dot or not field:
        raise ConfigError(f"--set {text}: expected section.field=value")
    if section not in _YAML_SECTIONS:
        raise ConfigError(
            f"--set {text}: {section} is not a section{suggest(section, list(_YAML_SECTIONS))}"
        )
    try:
        value: object = YAML(typ="rt").load(written)
    except RecursionError:
        raise ConfigError(f"--set {section}.{field}: {_TOO_DEEP}") from None
    except YAMLError:
        raise ConfigError(f"--set {text}: {written!r} is not a YAML value") from None
    return section, field, value


def _merge(
    cls: type[C], title: str, name: str, document: CommentedMap, given: Mapping[str, object]
) -> C:
    """One section of the file with the flags laid over it."""
    from ruamel.yaml.comments import CommentedMap

    written = document.get(title)
    if written is None:
        written = CommentedMap()
    if not isinstance(written, CommentedMap):
        place = _Source(name, document).at(title)
        raise ConfigError(f"{place}: {title}: expected `field: value` lines, got {_show(written)}")
    if cls is CoreLimits:
        _refuse_scheduler_owned(name, written)
    source = _Source(name, written, overridden=given)
    return build(cls, {**written, **given}, title, source)


def _check_sections(name: str, document: CommentedMap) -> None:
    for section in document:
        if section in _YAML_SECTIONS:
            continue
        place = _Source(name, document).at(section)
        if section in (*FLAG_SECTIONS, "disagg_config", "router_config"):
            raise ConfigError(
                f"{place}: {section}: addresses, ports and roles differ from node to node and "
                f"are flags (see `pdcore serve --help`), never YAML"
            )
        raise ConfigError(
            f"{place}: {section} is not a section{suggest(str(section), list(_YAML_SECTIONS))}"
        )


def _refuse_scheduler_owned(name: str, written: CommentedMap) -> None:
    for field, owner in SCHEDULER_OWNED.items():
        if field in written:
            raise ConfigError(
                f"{_Source(name, written).at(field)}: limits_config.{field}: this is "
                f"scheduler_config.{owner}; set it there"
            )


#: Longer ones are something else than a secret.
MAX_SECRET_BYTES: Final = 4096


def read_secret(path: str) -> str | None:
    """What ``disagg.transport_secret_file`` names, without the line end; "" is no secret.
    Raises ConfigError, which never shows it."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
        secret = data.decode().strip()
    except OSError as error:
        raise ConfigError(
            f"transport_secret_file: {path} cannot be read: {error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"transport_secret_file: {path} is not text; make one with "
            f"`openssl rand -hex 32 > {path}`"
        ) from None
    if len(data) > MAX_SECRET_BYTES or not secret:
        raise ConfigError(
            f"transport_secret_file: {path} has {'no' if not secret else 'too long a'} secret; "
            f"make one with `openssl rand -hex 32 > {path}`"
        )
    return secret


@attrs.frozen
class Environment:
    """Every variable that pdcore reads, read once (R21, D56)."""

    demo_exit: bool = False
    log_level: str | None = None
    model: str | None = None
    cache_dir: Path = Path()
    run_dir: Path | None = None
    #: torch imports vendor backends by itself unless this is off.
    torch_autoload: bool = True


#: variable -> what it does; printed by `pdcore settings`, checked for misspellings.
ENVIRONMENT: Final = {
    "PDCORE_DEMO_EXIT": "1: `pdcore demo` ends by itself even with --keep",
    "PDCORE_LOG_LEVEL": "debug, info, warning or error, where no flag says otherwise",
    "PDCORE_MODEL": "model path where neither flag nor file names one",
    "PDCORE_CACHE_DIR": "converted weights; default $XDG_CACHE_HOME/pdcore",
    "PDCORE_RUN_DIR": "logs of child processes; default a new temporary folder",
}


def load_environment(env: Mapping[str, str] | None = None) -> Environment:
    """Raises ConfigError for a PDCORE_* variable that is unknown or has a wrong value."""
    env = os.environ if env is None else env
    for name in env:
        if name.startswith(ENV_PREFIX) and name not in ENVIRONMENT:
            raise ConfigError(
                f"environment: {name} is not a variable of pdcore{suggest(name, [*ENVIRONMENT])}"
            )
    level = env.get("PDCORE_LOG_LEVEL", "").lower() or None
    if level not in (None, "debug", "info", "warning", "error"):
        raise ConfigError(
            f"environment: PDCORE_LOG_LEVEL: expected debug, info, warning or error, got {level!r}"
        )
    cache = env.get("PDCORE_CACHE_DIR")
    if not cache:
        home = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        cache = os.path.join(home, "pdcore")
    run_dir = env.get("PDCORE_RUN_DIR")
    return Environment(
        demo_exit=parse_bool("environment: PDCORE_DEMO_EXIT", env.get("PDCORE_DEMO_EXIT", "")),
        log_level=level,
        model=env.get("PDCORE_MODEL") or None,
        cache_dir=Path(cache),
        run_dir=Path(run_dir) if run_dir else None,
        torch_autoload=env.get(_TORCH_AUTOLOAD, "1") != "0",
    )


def child_environment(num_threads: int | None = None) -> dict[str, str]:
    """The environment of a process we start: ours, with its thread count (R11).

    Vendor backends that torch would import by itself are left out unless the user says
    otherwise: one whose driver is missing breaks ``import torch``.
    """
    env = {_TORCH_AUTOLOAD: "0", **os.environ}
    if num_threads is not None:
        env["OMP_NUM_THREADS"] = str(num_threads)
        env["MKL_NUM_THREADS"] = str(num_threads)
    env["PYTHONUNBUFFERED"] = "1"
    return env
