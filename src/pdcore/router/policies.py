"""Which instances serve a request, and what the router adds to it. Pure functions.

**Targets (R30, D47b).** Prefill is chosen by room modulo the number of usable prefill
instances. Decode is not: with the same rule on both lists, prefill i and decode i are married
for ever (with two of each, half of the pairs never carry a request, and a lost decode idles
its prefill). So decode takes ``(room + room // lcm(P, D)) % D``: inside each run of lcm(P, D)
consecutive rooms it is R30's modulo (room 5 of two and two: prefill 1, decode 1), and from one
run to the next it is shifted by one, so that every pair gets the same share. Only usable
targets count; a lost one moves only requests, no configuration.

**dp rank (D21).** One of the chosen prefill's, of the room alone, never a constant 0: a number
stirred out of the room modulo dp_size, for the room's own modulo has chosen the instance. It is
left out while dp_size is not known; prefill and decode then find one by a rule of theirs (R60).

**Fields (R31, D41).** A client may choose the room (idempotent retry, tracing), and name a
bootstrap server or dp rank out of what is configured. Attempt, instances and expiry are the
router's alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import attrs
import msgspec

from pdcore.config.deploy import BOOTSTRAP_PORT, normalise_address
from pdcore.errors import ConfigError, InvalidRequest
from pdcore.topology import choose_dp_rank
from pdcore.types import MAX_ID


class Rng(Protocol):
    """random.Random or SystemRandom."""

    def getrandbits(self, k: int, /) -> int: ...


def new_id(rng: Rng) -> int:
    """A fresh room or attempt: 63 random bits, never 0."""
    return rng.getrandbits(63) or 1


@attrs.frozen
class Target:
    """One instance as configured. ``netloc`` is ``host:port`` of its leader; ``bootstrap_port``
    is 0 for decode, and for a prefill that tells its port in /health."""

    netloc: str
    host: str
    port: int
    bootstrap_port: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.netloc}"


def parse_targets(
    prefill_addrs: Sequence[str],
    decode_addrs: Sequence[str],
    bootstrap_ports: Sequence[int] = (BOOTSTRAP_PORT,),
) -> tuple[tuple[Target, ...], tuple[Target, ...]]:
    """(prefill, decode) targets. One bootstrap port serves all prefill addresses, otherwise
    there is one for each (D47b: a short list silently dropped instances). Raises ConfigError."""
    ports = list(bootstrap_ports)
    if len(ports) == 1:
        ports *= len(prefill_addrs)
    if len(ports) != len(prefill_addrs):
        raise ConfigError(
            f"bootstrap_ports: {len(ports)} ports for {len(prefill_addrs)} prefill addresses; "
            "give one for all, or one for each in the same order"
        )
    prefills = _parse("prefill_addrs", prefill_addrs, ports)
    decodes = _parse("decode_addrs", decode_addrs, [0] * len(decode_addrs))
    return prefills, decodes


def _parse(field: str, addresses: Sequence[str], ports: Sequence[int]) -> tuple[Target, ...]:
    if not addresses:
        raise ConfigError(f"{field}: at least one host:port is needed")
    targets: list[Target] = []
    for address, bootstrap_port in zip(addresses, ports, strict=True):
        try:
            netloc = normalise_address(address).removeprefix("http://")
        except ValueError as error:
            raise ConfigError(f"{field}: {error}") from None
        host, _, port = netloc.rpartition(":")
        targets.append(Target(netloc, host.strip("[]"), int(port), bootstrap_port))
    netlocs = [target.netloc for target in targets]
    for netloc in netlocs:
        if netlocs.count(netloc) > 1:
            raise ConfigError(f"{field}: {netloc} is listed twice")
    return tuple(targets)


def choose_pair(room: int, num_prefill: int, num_decode: int) -> tuple[int, int]:
    """Indices into the usable targets; both numbers are at least 1. See the module's text."""
    turn = room // math.lcm(num_prefill, num_decode)
    return room % num_prefill, (room + turn) % num_decode


def name_dp_rank(room: int, dp_size: int | None, wanted: int | None) -> int | None:
    """D21: what both legs are told; None while ``dp_size`` is not known. ``wanted`` is the
    client's. Raises InvalidRequest if it does not exist."""
    return wanted if dp_size is None else choose_dp_rank(room, dp_size, wanted)


# --- what a client may say ---------------------------------------------------------------

#: Fields of ours that a request may not bring: only the router knows them.
ROUTER_ONLY: Final = (
    "attempt",
    "prefill_instance",
    "decode_instance",
    "expires_at_s",
    "remaining_s",
    "local_prefill",
)


class ClientFields(NamedTuple):
    """What the router reads of a request. ``replaces`` is the attempt in flight under that
    room that this request takes the place of."""

    room: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    dp_rank: int | None = None
    replaces: int | None = None
    timeout_s: float | None = None


def read_fields(fields: Mapping[str, msgspec.Raw]) -> ClientFields:
    """Raises InvalidRequest naming the field. The rest of the request is checked by the legs,
    which know the model."""
    for name in ROUTER_ONLY:
        if name in fields:
            raise InvalidRequest(name, "is set by the router: leave it out")
    if "prompt" in fields:
        check_prompt(bytes(fields["prompt"]))
    timeout_s = None
    if (raw := fields.get("timeout")) is not None:
        timeout_s = _number("timeout", raw)
    host: object = None
    if (raw := fields.get("bootstrap_host")) is not None:
        host = msgspec.json.decode(raw)
    if host is not None and not isinstance(host, str):
        raise InvalidRequest("bootstrap_host", f"expected a host name, got {host!r}")
    return ClientFields(
        room=_integer("bootstrap_room", fields, 1, MAX_ID),
        bootstrap_host=host,
        bootstrap_port=_integer("bootstrap_port", fields, 1, 65535),
        dp_rank=_integer("disagg_prefill_dp_rank", fields, 0, 65535),
        replaces=_integer("replaces", fields, 1, MAX_ID),
        timeout_s=timeout_s,
    )


def _integer(name: str, fields: Mapping[str, msgspec.Raw], low: int, high: int) -> int | None:
    raw = fields.get(name)
    if raw is None:
        return None
    value: object = msgspec.json.decode(raw)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, f"expected an integer in {low}..{high}, got {value!r}")
    return value


def _number(name: str, raw: msgspec.Raw) -> float | None:
    value: object = msgspec.json.decode(raw)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise InvalidRequest(name, f"expected seconds above 0, at most 1e6, got {value!r}")
    return float(value)


def check_prompt(raw: bytes) -> None:
    """R33: several prompts are several requests. Looks only at what begins the value, so that
    a long list of token ids costs nothing here."""
    inner = raw.lstrip()
    if not inner.startswith(b"["):
        return
    if inner[1:].lstrip()[:1] not in (b'"', b"["):
        return
    items: list[msgspec.Raw] = msgspec.json.decode(raw, type=list[msgspec.Raw])
    if len(items) > 1:
        raise InvalidRequest(
            "prompt",
            f"holds {len(items)} prompts: send one request for each, or one list of token ids",
        )


def find_bootstrap(
    host: str | None, port: int | None, known: Sequence[tuple[str, int]]
) -> list[int]:
    """Indices of the prefill targets, given by (host, bootstrap port), that a client's
    bootstrap address names; all when it names none. Raises InvalidRequest for an address that
    is not configured: decode would contact any host on a client's word (D41)."""
    found = [
        i
        for i, (known_host, known_port) in enumerate(known)
        if host in (None, known_host) and port in (None, known_port)
    ]
    if not found:
        field = "bootstrap_port" if host is None else "bootstrap_host"
        where = f"{host or '*'}:{port or '*'}"
        raise InvalidRequest(
            field, f"{where} is not a configured bootstrap server: leave it to the router"
        )
    return found


def inject(fields: Mapping[str, msgspec.Raw], added: Mapping[str, object]) -> bytes:
    """The body both legs get: the client's, values untouched, with our fields over them."""
    return msgspec.json.encode({**fields, **added})
