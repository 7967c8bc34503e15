"""Transports by name: the ones that come with pdcore, and third parties' entry points.

Nothing is imported before it is asked for, so a vendor's missing library costs only
those who chose that vendor. A third party registers a :class:`TransportPlugin` under
the entry point group ``pdcore.transports``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import attrs

from pdcore.errors import ConfigError, TransportError
from pdcore.transports.base import Transport, TransportCaps
from pdcore.types import Incarnation

ENTRY_POINT_GROUP: Final = "pdcore.transports"

#: Chosen by ``auto``, in this order: the first that works on this machine.
AUTO: Final = "auto"
AUTO_ORDER: Final = ("shm",)

#: name -> module that has a ``PLUGIN``.
_BUILT_IN: Final[dict[str, str]] = {
    "loopback": "pdcore.transports.loopback",
    "memfabric": "pdcore.transports.memfabric",
    "mooncake": "pdcore.transports.mooncake",
    "nixl": "pdcore.transports.nixl",
    "shm": "pdcore.transports.shm",
    "socket": "pdcore.transports.socket",
    "torchdist": "pdcore.transports.torchdist",
}


@attrs.frozen
class WorkerPlace:
    """Where a worker stands among others: what it binds, the numeric address by which its
    peers reach it, and the secret that they share (None: there is none)."""

    bind_host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    secret: str | None = attrs.field(default=None, repr=False)

    def options(self) -> dict[str, object]:
        """For ``options_at`` of a transport whose connections are a socket transport's."""
        return {
            "host": self.bind_host,
            "advertise": self.advertise_host,
            "secret": self.secret,
        }


@attrs.frozen
class TransportPlugin:
    """``create(incarnation, **options)`` makes a transport; ``why_unavailable()`` says
    in one sentence why it cannot work on this machine, or None. A worker process, which
    shares its machine with others, creates it with ``worker_options``."""

    create: Callable[..., Transport]
    why_unavailable: Callable[[], str | None]
    worker_options: Mapping[str, object] = attrs.field(factory=dict)
    #: Further options in a worker process, for one that has addresses of its own.
    options_at: Callable[[WorkerPlace], Mapping[str, object]] | None = None
    #: What it declares without options, known without making one: a vendor may be missing.
    caps: TransportCaps | None = None
    #: And where peers reach it from other hosts, if that is not the same. None: it is.
    caps_between_hosts: TransportCaps | None = None
    #: What to install or change where ``why_unavailable`` has a reason.
    remedy: str = ""
    #: Ways to use it, name -> options: the conformance suite runs on each. None: the plain one.
    variants: Mapping[str, Mapping[str, object]] = attrs.field(factory=dict)
    #: Further ones beside these, for what this machine may forbid; found out when it is asked.
    variants_here: Callable[[], Mapping[str, Mapping[str, object]]] = dict
    #: Options that place it at an address of its own which the next life may take again; none
    #: for a transport whose addresses are never used twice.
    fixed_address: Callable[[], Mapping[str, object]] = dict
    #: Connect/close cycles of the growth checks; at least 30, for vendors that start slowly.
    cycles: int = attrs.field(default=1000, validator=attrs.validators.ge(30))

    def all_variants(self) -> dict[str, Mapping[str, object]]:
        """Those that can be used here; the plain one, without a name, where there are no fixed
        ones."""
        return {**(self.variants or {"": self.worker_options}), **self.variants_here()}


@attrs.frozen
class Presence:
    """One transport on this machine: ``reason`` None means that it works, ``remedy`` is what
    helps where it does not, ``caps`` what it declares (None: not known before one is made), and
    ``caps_between_hosts`` what it does where peers are on other hosts (None: the same)."""

    name: str
    reason: str | None
    remedy: str
    caps: TransportCaps | None
    caps_between_hosts: TransportCaps | None = None


def names() -> list[str]:
    """Every transport that can be named, whether it works here or not."""
    return sorted({*_BUILT_IN, *_third_party()})


def built_in() -> list[str]:
    """Those that come with pdcore."""
    return sorted(_BUILT_IN)


def available() -> dict[str, str | None]:
    """Name -> None when it works on this machine, else the reason why not."""
    return {name: presence(name).reason for name in names()}


def presence(name: str) -> Presence:
    """How it is with one transport here; one that cannot be imported is not available.
    Raises ConfigError for an unknown name."""
    try:
        plugin = load(name)
    except ConfigError as error:
        known = {**dict.fromkeys(_BUILT_IN), **_third_party()}
        if name not in known:
            raise
        entry = known[name]
        package = entry.dist.name if entry is not None and entry.dist is not None else "pdcore"
        remedy = f"repair or remove the package that it comes with, {package}"
        return Presence(name, str(error), remedy, None)
    reason = plugin.why_unavailable()
    remedy = plugin.remedy if reason is not None else ""
    return Presence(name, reason, remedy, plugin.caps, plugin.caps_between_hosts)


def load(name: str) -> TransportPlugin:
    """Raises ConfigError for an unknown name, naming the known ones, and for a plugin
    that cannot be imported."""
    module = _BUILT_IN.get(name)
    try:
        if module is not None:
            plugin: object = vars(importlib.import_module(module))["PLUGIN"]
        else:
            entry = _third_party().get(name)
            if entry is None:
                raise ConfigError(
                    f"transport: unknown name {name!r}; choose one of {', '.join([AUTO, *names()])}"
                )
            plugin = entry.load()
    except (ImportError, AttributeError, OSError, RuntimeError, SyntaxError) as error:
        raise ConfigError(f"transport {name!r} cannot be imported: {error}") from error
    if not isinstance(plugin, TransportPlugin):
        raise ConfigError(
            f"transport {name!r}: its entry point must be a TransportPlugin, got "
            f"{type(plugin).__name__}"
        )
    return plugin


def resolve(name: str) -> str:
    """``auto`` becomes the first of AUTO_ORDER that works here; other names are checked
    to be known. Raises ConfigError."""
    if name != AUTO:
        load(name)
        return name
    reasons = []
    for candidate in AUTO_ORDER:
        reason = load(candidate).why_unavailable()
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(
        f"transport: no transport for {AUTO!r} works on this machine ({'; '.join(reasons)}); "
        f"name one of {', '.join(names())}"
    )


def refusal(chosen: str, reason: str) -> str:
    """Why a transport that was named cannot be had here, and what helps."""
    remedy = load(chosen).remedy
    what = f"transport {chosen!r} does not work on this machine: {reason}"
    return f"{what}; {remedy}" if remedy else what


def create(name: str, incarnation: Incarnation, **options: object) -> Transport:
    """Make the transport ``name`` (or ``auto``) for this process start.

    Raises ConfigError for an unknown name or an option it does not have, TransportError
    when it cannot work here.
    """
    chosen = resolve(name)
    plugin = load(chosen)
    reason = plugin.why_unavailable()
    if reason is not None:
        raise TransportError(refusal(chosen, reason))
    try:
        return plugin.create(incarnation, **options)
    except TypeError as error:
        raise ConfigError(f"transport {chosen!r}: {error}") from error


def create_for_worker(
    name: str, incarnation: Incarnation, place: WorkerPlace | None = None
) -> Transport:
    """As :func:`create`, with what the transport wants in a worker process at this place.

    Raises ConfigError also for a secret that this transport would not ask for."""
    chosen = resolve(name)
    plugin = load(chosen)
    options = dict(plugin.worker_options)
    if place is not None and plugin.options_at is not None:
        options |= plugin.options_at(place)
    if place is not None and place.secret is not None and "secret" not in options:
        raise ConfigError(
            f"transport_secret_file: transport {chosen!r} asks nobody for a secret; use "
            "transport socket, or leave the secret out"
        )
    return create(chosen, incarnation, **options)


def require_reach(name: str, other_hosts: Sequence[str]) -> None:
    """Refuse at start what could only fail request by request: hosts that the transport
    cannot move KV to. Raises ConfigError."""
    if not other_hosts:
        return
    transport = create(name, Incarnation(os.urandom(16)))
    try:
        is_cross_host = transport.caps.cross_host
    finally:
        transport.close()
    if not is_cross_host:
        raise ConfigError(
            f"{', '.join(other_hosts)}: is another host than this one, and transport "
            f"{transport.name!r} moves KV within one host only; use --transport socket, or run "
            "prefill and decode on one machine and name it by the same address (--ips, "
            "--prefill-ips)"
        )


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
