"""Where things listen and how processes are watched: flags rather than YAML (R13, R20).

Every port may be 0: a free one is taken and reported to whoever started the process (D44).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

import attrs

from pdcore.config.fields import bounded, choice, flag, note, optional_int, port, text
from pdcore.types import INTEGRITY, NO_CHECKSUMS

#: The seed's ports (requirements, section 1.2); `pdcore up` and `pdcore demo` take free ones.
ROUTER_HTTP_PORT: Final = 8000
HTTP_PORTS: Final = {"prefill": 8001, "decode": 8100, "router": ROUTER_HTTP_PORT}
BOOTSTRAP_PORT: Final = 18800
LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_NAMES: Final = frozenset({"localhost", "::1"})
_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::"})


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, as it is spelled; nothing is resolved."""
    return host in _LOOPBACK_NAMES or host.startswith("127.")


def _as_ports(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _texts(default: tuple[str, ...], reason: str, *, seed: str = "") -> tuple[str, ...]:
    return attrs.field(default=default, converter=tuple, metadata=note(reason, seed=seed))


@attrs.frozen
class DisaggConfig:
    """Role and addresses of one instance on this node. Flags only: a YAML file is shared by
    all nodes of a role, these differ from node to node (R13)."""

    role: str = choice("prefill", ("prefill", "decode"), "one instance plays one role (R1)")
    host: str = text(LOOPBACK, "what to bind; loopback unless told (D40)", seed="0.0.0.0")
    local_ip: str = text(LOOPBACK, "what others connect to, never guessed (R15)", is_required=True)
    http_port: int | None = optional_int(
        "", "none: 8001 prefill, 8100 decode; 0: a free one", low=0, high=65535, seed="8001 / 8100"
    )
    bootstrap_port: int = port(BOOTSTRAP_PORT, "prefill only; 0: a free one", seed="18800")
    link_port: int = port(0, "leader to its workers", seed="5555 / 5556, +2 on decode")
    transport: str = text(
        "auto", "shm; between hosts name one that reaches them: socket", seed="memfabric"
    )
    transport_secret_file: str = text(
        "", "transport socket: a secret of 16 bytes or more that all peers must know (D40)"
    )
    integrity: str = choice(
        NO_CHECKSUMS,
        INTEGRITY,
        "checksums of the KV: decode asks for them and compares; prefill with crc32 serves only "
        "a decode that asks",
    )
    node_index: int = bounded(0, "", "position of this node in `ips`", low=0)
    devices_per_node: int = bounded(1, "devices", "workers this node can hold", low=1)
    ips: tuple[str, ...] = _texts((LOOPBACK,), "nodes of this role, in order")
    allowed_bootstraps: tuple[str, ...] = _texts(
        (), "decode: prefill bootstrap servers it may ask; empty: any on its own host (D41)"
    )

    def __attrs_post_init__(self) -> None:
        if self.node_index >= len(self.ips):
            raise ValueError(
                f"node_index must be below the number of ips ({len(self.ips)}), "
                f"got {self.node_index}"
            )
        if self.local_ip in _WILDCARDS:
            raise ValueError(
                f"local_ip is {self.local_ip}, an address that nobody can connect to: "
                "name this node's own one, which other hosts use"
            )
        if is_loopback(self.local_ip) and self.other_hosts:
            raise ValueError(
                f"local_ip is {self.local_ip}, where {', '.join(self.other_hosts)} would reach "
                "itself and not this node: name this node's own address (--ips, --node-index)"
            )

    @property
    def port(self) -> int:
        return HTTP_PORTS[self.role] if self.http_port is None else self.http_port

    @property
    def other_hosts(self) -> tuple[str, ...]:
        """Hosts that are named and are not this one, which is ``local_ip`` and loopback."""
        asked = (address.rpartition(":")[0] or address for address in self.allowed_bootstraps)
        named = dict.fromkeys(host.strip("[]") for host in (*self.ips, *asked))
        return tuple(host for host in named if host != self.local_ip and not is_loopback(host))


@attrs.frozen
class ServerConfig:
    """``server_config``: HTTP limits and the supervision of processes."""

    request_timeout_s: float = bounded(
        1800.0,
        "s",
        "a request's whole life; each hop gets what is left (R36)",
        low=0.1,
        seed="1800",
    )
    max_body_bytes: int = bounded(8 << 20, "bytes", "a larger request body is a 413", low=1024)
    ready_timeout_s: float = bounded(
        600.0, "s", "from spawn to ready; a first start converts the weights", low=0.1
    )
    drain_s: float = bounded(
        30.0, "s", "running requests may finish this long after SIGTERM (D59)", low=0
    )
    stop_timeout_s: float = bounded(10.0, "s", "after draining; then a process is killed", low=0.1)
    restart_initial_s: float = bounded(0.5, "s", "pause before a dead worker restarts", low=0.01)
    restart_max_s: float = bounded(30.0, "s", "upper end of the restart back-off", low=0.01)
    max_restarts: int = bounded(
        5, "times", "in a row without becoming ready; then the instance exits 1 (D45)", low=0
    )
    worker_health_timeout_s: float = bounded(
        60.0,
        "s",
        "without a word from a worker: it is killed and restarted as if dead; a quarter of it: "
        "unhealthy (D45). One step of the engine must be shorter",
        low=0.1,
    )
    enable_stop: bool = flag(
        False, "POST /stop drains the instance (R34); off, as everybody could (D40)"
    )
    pin_cpus: bool = flag(False, "give each worker its slice of this process's cores (R11)")
    log_level: str = choice(
        "info", ("debug", "info", "warning", "error"), "of worker and leader logs", seed="INFO"
    )


def normalise_address(address: str) -> str:
    """``host:port`` or a URL -> ``http://host:port`` without a trailing slash (R29).

    Raises ValueError for anything else, naming what is wrong.
    """
    url = address if "://" in address else f"http://{address}"
    parts = urlsplit(url.rstrip("/"))
    if parts.scheme != "http" or parts.path or parts.query or not parts.hostname:
        raise ValueError(f"expected host:port or http://host:port, got {address!r}")
    if "@" in parts.netloc:  # not quoted: it may hold a password
        raise ValueError("expected host:port without user:password@; none is ever sent")
    try:
        number = parts.port
    except ValueError:
        number = None
    if not number:
        raise ValueError(f"expected a port between 1 and 65535 in {address!r}")
    return f"http://{parts.netloc}"


@attrs.frozen
class RouterConfig:
    """The router: placement is a launcher's choice, it may run anywhere (R9)."""

    host: str = text(LOOPBACK, "what to bind; loopback unless told", seed="0.0.0.0")
    port: int = port(ROUTER_HTTP_PORT, "0: a free one", seed="8000")
    prefill_addrs: tuple[str, ...] = _texts((), "leaders of prefill instances, host:port")
    decode_addrs: tuple[str, ...] = _texts((), "leaders of decode instances, host:port")
    bootstrap_ports: tuple[int, ...] = attrs.field(
        default=(BOOTSTRAP_PORT,),
        converter=_as_ports,
        metadata=note(
            "one for all prefill addresses, or one each; 0: as /health says", seed="18800"
        ),
    )
    request_timeout_s: float = bounded(
        1800.0, "s", "a request's whole life; later than the legs' (rule 8)", low=0.1, seed="1800"
    )
    max_body_bytes: int = bounded(8 << 20, "bytes", "a larger request body is a 413", low=1024)
    drain_s: float = bounded(
        30.0, "s", "running requests may finish this long after SIGTERM (D59)", low=0
    )
    max_in_flight: int = bounded(
        4096, "requests", "more are answered 429 with Retry-After (D60)", low=1
    )
    on_prefill_loss: str = choice(
        "retry",
        ("fail", "retry", "local-prefill"),
        "a prefill that had accepted is lost before the first token: answer the failure, make "
        "another attempt on another prefill instance, or let decode compute the prompt itself",
    )
    max_attempts: int = bounded(
        3,
        "attempts",
        "of one request, the first one counted; it kills no more instances than this if it kills "
        "whatever runs it",
        low=1,
    )
    log_level: str = choice("info", ("debug", "info", "warning", "error"), "of the router's log")

    def __attrs_post_init__(self) -> None:
        for name, addresses in (
            ("prefill_addrs", self.prefill_addrs),
            ("decode_addrs", self.decode_addrs),
        ):
            if not addresses:
                raise ValueError(f"{name} must name at least one leader, host:port")
            for address in addresses:
                try:
                    normalise_address(address)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        if len(self.bootstrap_ports) not in (1, len(self.prefill_addrs)):
            raise ValueError(
                f"bootstrap_ports must be one port, or one for each of the "
                f"{len(self.prefill_addrs)} prefill_addrs, got {len(self.bootstrap_ports)}"
            )
        for number in self.bootstrap_ports:
            if isinstance(number, bool) or not 0 <= number <= 65535:
                raise ValueError(f"bootstrap_ports must be between 0 and 65535, got {number!r}")
