"""``pdcore serve``: one role of a cluster, in the foreground."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import attrs
from cyclopts import Parameter

from pdcore.cli.options import (
    EngineFlags,
    Flags,
    Words,
    complain,
    instance_config,
    split_words,
)
from pdcore.cli.workplace import Workplace, workplace
from pdcore.config.deploy import BOOTSTRAP_PORT, LOOPBACK, is_loopback
from pdcore.errors import ConfigError

if TYPE_CHECKING:
    from pdcore.config import RouterConfig
    from pdcore.config_loader import Environment
    from pdcore.server.leader_main import Spec
    from pdcore.server.process import Report

#: Flags that mean something to some roles only.
_ONLY_FOR: Final = {
    "yaml_file_path": ("prefill", "decode"),
    "ips": ("prefill", "decode"),
    "node_index": ("prefill", "decode"),
    "devices_per_node": ("prefill", "decode"),
    "prefill_ips": ("decode",),
    "prefill_addrs": ("router",),
    "decode_addrs": ("router",),
    "on_prefill_loss": ("router",),
    "max_attempts": ("router",),
    "max_in_flight": ("router",),
}


@Parameter(name="*")
@attrs.frozen
class NodeFlags:
    """Where this process is and whom it talks to."""

    yaml_file_path: Path | None = None
    """Settings of the role (examples/configs); flags win."""
    host: str | None = None
    """What to bind; default 127.0.0.1, 0.0.0.0 for all interfaces."""
    port: int | None = None
    """HTTP port; default 8001 prefill, 8100 decode, 8000 router; 0 takes a free one."""
    node_index: int | None = None
    """Position of this node in --ips; default 0."""
    devices_per_node: int | None = None
    """Workers that one node holds; default 1."""
    ips: Words = ()
    """Nodes of this role in order, separated by commas; others connect to ips[node-index]."""
    prefill_ips: Words = ()
    """Decode: nodes whose bootstrap servers it may ask. Default: this machine; another one
    needs --transport socket."""
    bootstrap_port: Annotated[tuple[int, ...], Parameter(negative="", show_default=False)] = ()
    """Of bootstrap servers; default 18800. The router takes one for all, or one each."""
    prefill_addrs: Words = ()
    """Router: leaders of prefill instances, host:port, separated by commas."""
    decode_addrs: Words = ()
    """Router: leaders of decode instances, host:port, separated by commas."""
    on_prefill_loss: Literal["fail", "retry", "local-prefill"] | None = None
    """Router: when a prefill that had accepted is lost; default retry, on another one."""
    max_attempts: int | None = None
    """Router: attempts of one request, the first one counted; default 3."""
    max_in_flight: int | None = None
    """Router: requests at once; default 4096, more are answered 429."""


def serve(
    *,
    role: Literal["prefill", "decode", "router"],
    node: NodeFlags | None = None,
    engine: EngineFlags | None = None,
) -> int:
    """Run one role until SIGTERM or Ctrl-C, which drain; a second one ends it at once.

    Processes may start in any order: the router answers 503 while instances are missing,
    decode asks prefill's bootstrap server when the first request names it. Without
    addresses everything is on this machine. Logs of workers: log_RANK.log in PDCORE_RUN_DIR.

    For example:

    - `pdcore serve --role prefill`
    - `pdcore serve --role decode`
    - `pdcore serve --role router --prefill-addrs 127.0.0.1:8001 --decode-addrs 127.0.0.1:8100`

    Prefill on 10.0.0.1, decode on 10.0.0.2, the router anywhere. --transport socket moves KV
    between machines; both must be given the same secret, or a network of their own:

    - `pdcore serve --role prefill --ips 10.0.0.1 --host 0.0.0.0 --transport socket`
    - `pdcore serve --role decode --ips 10.0.0.2 --host 0.0.0.0 --prefill-ips 10.0.0.1
      --transport socket`
    - `pdcore serve --role router --prefill-addrs 10.0.0.1:8001 --decode-addrs 10.0.0.2:8100`

    Parameters
    ----------
    role
        What this process is.
    """
    from pdcore.config_loader import load_environment
    from pdcore.server.leader_main import LeaderSpec, RouterSpec

    node, engine = node or NodeFlags(), engine or EngineFlags()
    check_role(role, node)
    env = load_environment()
    if role == "router":
        return _run(RouterSpec(router_config(node, engine, env)), None)
    config = instance_config(engine, env, node.yaml_file_path, {"disagg": disagg_flags(role, node)})
    place = workplace(env)
    return _run(LeaderSpec(config, str(place.cache_dir), str(place.run_dir)), place)


def check_role(role: str, node: NodeFlags) -> None:
    """Raises ConfigError for a flag that this role does not have: it would do nothing (D44)."""
    given = {name for name, value in attrs.asdict(node).items() if value not in (None, ())}
    for name, roles in _ONLY_FOR.items():
        if name in given and role not in roles:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: is for --role {' or '.join(roles)}, not {role}")
    if role == "router":
        for name in ("prefill_addrs", "decode_addrs"):
            if name not in given:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: --role router needs it: host:port of the "
                    f"{name.removesuffix('_addrs')} leaders, separated by commas"
                )


def disagg_flags(role: str, node: NodeFlags) -> dict[str, object]:
    """The ``disagg`` section of a prefill or decode process. Raises ConfigError."""
    if len(node.bootstrap_port) > 1:
        raise ConfigError(f"--bootstrap-port: --role {role} takes one port")
    values: dict[str, object] = {
        "role": role,
        "host": node.host,
        "http_port": node.port,
        "node_index": node.node_index,
        "devices_per_node": node.devices_per_node,
        "bootstrap_port": node.bootstrap_port[0] if node.bootstrap_port else None,
    }
    from pdcore.scheduler.topologies import bracket

    ips = [ip.strip("[]") for ip in split_words(node.ips)]
    index = node.node_index or 0
    if ips:
        values["ips"] = ips
        if not 0 <= index < len(ips):
            raise ConfigError(f"--node-index: {index} is outside the {len(ips)} addresses of --ips")
        values["local_ip"] = ips[index]
        check_bound(node.host or LOOPBACK, ips[index])
    prefill_port = node.bootstrap_port[0] if node.bootstrap_port else BOOTSTRAP_PORT
    allowed = [f"{bracket(ip)}:{prefill_port}" for ip in split_words(node.prefill_ips)]
    if allowed:
        values["allowed_bootstraps"] = allowed
    return {name: value for name, value in values.items() if value is not None}


def check_bound(host: str, advertised: str) -> None:
    """Raises ConfigError where others are told an address at which nothing listens."""
    if is_loopback(host) and not is_loopback(advertised):
        raise ConfigError(
            f"--ips: others would connect to {advertised}, but only {host} is bound; add "
            f"--host 0.0.0.0 (all interfaces) or --host {advertised}"
        )


def router_config(node: NodeFlags, engine: EngineFlags, env: Environment) -> RouterConfig:
    """Raises ConfigError naming the flag."""
    from pdcore.config import RouterConfig
    from pdcore.config_loader import build

    unused = [
        field.name.rstrip("_")
        for field in attrs.fields(EngineFlags)
        if field.name != "log_level" and attrs.asdict(engine)[field.name] != field.default
    ]
    if unused:
        flag = f"--{unused[0].replace('_', '-')}"
        raise ConfigError(f"{flag}: is for --role prefill or decode, not router")
    values: Flags = {
        "router": {
            "host": node.host,
            "port": node.port,
            "prefill_addrs": list(split_words(node.prefill_addrs)),
            "decode_addrs": list(split_words(node.decode_addrs)),
            "bootstrap_ports": list(node.bootstrap_port) or None,
            "on_prefill_loss": node.on_prefill_loss,
            "max_attempts": node.max_attempts,
            "max_in_flight": node.max_in_flight,
            "log_level": engine.log_level or env.log_level,
        }
    }
    given = {name: value for name, value in values["router"].items() if value is not None}
    return build(RouterConfig, given, "router")


def _say(text: str) -> None:
    """A line for whoever reads. Nobody does any more, or the disk is full: it is lost, as a
    report to a parent that does not read is, and the instance goes on (D45)."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _run(spec: Spec, place: Workplace | None) -> int:
    """``place`` is None for a router, which has no workers that log."""
    from pdcore.server.leader_main import run_process, set_up_logging
    from pdcore.server.process import EXIT_USAGE, Bound, Failed, Health, Progress, Ready

    set_up_logging(spec)

    def report(news: Report) -> None:
        match news:
            case Bound():
                also = f", bootstrap server on {news.bootstrap}" if news.bootstrap else ""
                _say(f"listening on http://{news.http}{also}")
            case Progress():
                _say(news.text)
            case Ready():
                _say("ready")
            case Health():
                if news.problems:
                    _say(f"not ready: {'; '.join(news.problems)}")
            case Failed():
                complain(news.message)

    status = run_process(spec, report)
    if place is None:
        return status
    if status in (0, EXIT_USAGE):  # then the message says it all
        place.remove()
    else:
        place.keep()
        complain(f"worker logs are in {place.run_dir}")
    return status
