"""What the bootstrap server knows: which process holds which rank, and where rooms went.

Sans-IO: ``now`` is an argument, HTTP is :mod:`pdcore.server.bootstrap`. Each place of the
configured topology has one rank-registration lifecycle (:mod:`pdcore.fsm.rank`); this
module decides what may register at all. The seed counted registrations and believed them
(D31, D32): here a registration must name a place that exists, agree with the configuration
and with every live rank, belong to a process life that was not replaced, and be renewed.
Ready means: exactly the expected places, each under a live lease.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import attrs
import msgspec

from pdcore.control.messages import RankRegistration, Route, RouteRank
from pdcore.errors import ConfigError, InvalidRequest, RegistrationConflict
from pdcore.fsm.rank import Rank
from pdcore.fsm.states import RankState
from pdcore.topology import ParallelLayout, RankCoordinates
from pdcore.types import MAX_ID

#: What all ranks of an instance have in common; a rank that disagrees is refused.
SHARED_FIELDS: Final = (
    "block_sizes",
    "kv_cache_dtype",
    "max_prefill_tokens",
    "layout_digest",
    "fingerprint",
    "transport",
    "protocol_min",
    "protocol_max",
    "all_cp_ranks",
)

#: How long a registration counts without being renewed; workers renew every third of it.
LEASE_S: Final = 15.0

_WILDCARDS: Final = frozenset({"", "*", "0.0.0.0", "::"})


@attrs.frozen
class RankTableConfig:
    """The topology to wait for, what is already known of it, and the bounds.

    ``expected`` holds values of :data:`SHARED_FIELDS` that the configuration fixes; a field
    that is not in it is fixed by the first rank that registers. ``lease_s`` must be several
    times the registration interval of a worker. Raises ConfigError.
    """

    instance: str
    layout: ParallelLayout
    expected: Mapping[str, object] = attrs.field(factory=dict)
    lease_s: float = LEASE_S
    #: A silent rank is remembered as stale this long after its lease ran out.
    retention_s: float = 600.0
    #: Longer than a request may live between its two legs (D22).
    room_ttl_s: float = 600.0
    max_rooms: int = 65_536
    max_rooms_per_query: int = 4096

    def __attrs_post_init__(self) -> None:
        unknown = sorted(set(self.expected) - set(SHARED_FIELDS))
        if unknown:
            raise ConfigError(f"expected: {unknown} are not among {list(SHARED_FIELDS)}")
        for name in ("lease_s", "retention_s", "room_ttl_s", "max_rooms", "max_rooms_per_query"):
            value = attrs.asdict(self, recurse=False)[name]
            if value <= 0:
                raise ConfigError(f"{name} must be > 0, got {value}")


class EncodedRoute(NamedTuple):
    """The body of GET /bootstrap/route, serialised once per version, and its ETag."""

    body: bytes
    etag: str


class RankTable:
    """Not thread-safe: one event loop owns it."""

    def __init__(self, config: RankTableConfig, first_epoch: int = 0) -> None:
        """``first_epoch``: larger than any former life of this server used (its start time),
        so that an epoch never goes back."""
        self.config = config
        self.rooms = RoomTable(config)
        self._epoch = first_epoch
        self._ranks = {key: Rank(key) for key in sorted(config.layout.expected_route_keys())}
        self._renewed_s: dict[str, float] = {}
        self._next_expiry_s = float("inf")
        self._encoded: EncodedRoute | None = None

    @property
    def epoch(self) -> int:
        """Grows with every change of the route."""
        return self._epoch

    def register(self, registration: RankRegistration, now: float) -> bool:
        """Adopt or renew; True when the route changed (new, restarted or moved rank).

        Raises InvalidRequest for a rank outside the topology or at an address that nobody can
        connect to, RegistrationConflict for sizes
        or shared values that contradict the configuration or a live rank, and for a process
        life that another one has replaced (R24, D31, D32)."""
        self._expire(now)
        _check_address(registration.rank_ip)
        key = self._place(registration)
        self._check_shared(key, registration)
        rank = self._ranks[key]
        if not rank.may_registered(registration):
            raise RegistrationConflict(
                "incarnation",
                f"a later process has registered as rank {key}: this one must stop",
            )
        effects = rank.registered(registration)
        self._renewed_s[key] = now
        self._next_expiry_s = min(self._next_expiry_s, now + self.config.lease_s)
        return self._changed(effects)

    def deregister(self, key: str, incarnation: str, now: float) -> bool:
        """A goodbye. False (and nothing happens) unless that process life holds the place.
        Raises InvalidRequest for a place that does not exist."""
        self._expire(now)
        rank = self._ranks.get(key)
        if rank is None:
            raise InvalidRequest("rank", f"{key} is not one of {', '.join(self._ranks)}")
        effects = rank.deregistered(incarnation)
        self._changed(effects)
        return effects is not None

    def lose(self, key: str, now: float) -> bool:
        """The process that holds this place is gone, on its supervisor's word: out of the
        route at once, not when its lease runs out, and for good (D32, D48). False when nobody
        holds it. Raises InvalidRequest for a place that does not exist."""
        rank = self._ranks.get(key)
        if rank is None or rank.registration is None:
            return self.deregister(key, "", now)
        return self.deregister(key, rank.registration.incarnation, now)

    def missing(self, now: float) -> list[str]:
        """Route keys without a live registration, in order; empty means ready (D31, D33)."""
        self._expire(now)
        return [k for k, rank in self._ranks.items() if rank.state is not RankState.REGISTERED]

    def why_not_ready(self, now: float) -> str:
        """For people: names every missing rank; empty when ready."""
        missing = self.missing(now)
        if not missing:
            return ""
        described = ", ".join(
            f"{key} (silent for {now - self._renewed_s[key]:.0f} s)"
            if self._ranks[key].state is RankState.STALE
            else f"{key} (not registered)"
            for key in missing
        )
        return f"{len(missing)} of {len(self._ranks)} ranks (dp,cp,tp) are missing: {described}"

    def route(self, now: float) -> EncodedRoute | None:
        """The whole table as one document (R25); None until ready."""
        if self.missing(now):
            return None
        if self._encoded is None:
            body = msgspec.json.encode(self._build_route())
            etag = f'"{self._epoch}-{hashlib.sha256(body).hexdigest()[:16]}"'
            self._encoded = EncodedRoute(body, etag)
        return self._encoded

    def snapshot(self, now: float) -> dict[str, str]:
        """Route key -> state, for /bootstrap/health and tests."""
        self._expire(now)
        return {key: rank.state.value for key, rank in self._ranks.items()}

    def _place(self, registration: RankRegistration) -> str:
        layout = self.config.layout
        sizes = layout.tp_size, layout.cp_size, layout.dp_size, layout.pp_size
        values = msgspec.structs.asdict(registration)
        for axis, size in zip(("attn_tp", "attn_cp", "attn_dp", "pp"), sizes, strict=True):
            claimed, rank = values[f"{axis}_size"], values[f"{axis}_rank"]
            if claimed != size:
                raise RegistrationConflict(
                    f"{axis}_size",
                    f"the rank says {claimed}, this instance is configured with {size}",
                )
            if rank >= size:
                raise InvalidRequest(f"{axis}_rank", f"must be 0..{size - 1}, got {rank}")
        if registration.protocol_min > registration.protocol_max:
            raise InvalidRequest(
                "protocol_min",
                f"{registration.protocol_min} is above protocol_max {registration.protocol_max}",
            )
        return layout.route_key(
            RankCoordinates(
                registration.attn_dp_rank,
                registration.attn_cp_rank,
                registration.attn_tp_rank,
                registration.pp_rank,
            )
        )

    def _check_shared(self, key: str, registration: RankRegistration) -> None:
        mine = _shared(registration)
        for name, value in self.config.expected.items():
            _require_equal(name, key, mine[name], "the configuration", value)
        others = [
            (other, other.registration)
            for other_key, other in self._ranks.items()
            if other_key != key and other.registration is not None
        ]
        for other, theirs in others:
            if other.state is RankState.REGISTERED:
                for name, value in _shared(theirs).items():
                    _require_equal(name, key, mine[name], f"rank {other.place}", value)
        for other, theirs in others:
            if other.state is RankState.STALE and _shared(theirs) != mine:
                # A silent rank of a former deployment must not veto the new one.
                self._changed(other.retention_expired())

    def _expire(self, now: float) -> None:
        if now < self._next_expiry_s:
            return
        self._next_expiry_s = float("inf")
        for key, rank in self._ranks.items():
            if rank.state is RankState.ABSENT:
                continue
            due_s = self._renewed_s[key] + self.config.lease_s
            if rank.state is RankState.REGISTERED and due_s <= now:
                self._changed(rank.lease_expired())
            if rank.state is RankState.STALE:
                due_s += self.config.retention_s
                if due_s <= now:
                    self._changed(rank.retention_expired())
                    continue
            self._next_expiry_s = min(self._next_expiry_s, due_s)

    def _changed(self, effects: Sequence[object] | None) -> bool:
        """Every effect of a rank's lifecycle is a RouteChanged."""
        if not effects:
            return False
        self._epoch += 1
        self._encoded = None
        return True

    def _build_route(self) -> Route:
        held = {k: r.registration for k, r in self._ranks.items() if r.registration is not None}
        any_rank = next(iter(held.values()))
        return Route(
            attn_tp_size=self.config.layout.tp_size,
            attn_cp_size=self.config.layout.cp_size,
            dp_size=self.config.layout.dp_size,
            block_sizes=any_rank.block_sizes,
            kv_cache_dtype=any_rank.kv_cache_dtype,
            max_prefill_tokens=any_rank.max_prefill_tokens,
            ranks={k: RouteRank(r.rank_ip, r.rank_port, r.incarnation) for k, r in held.items()},
            instance=self.config.instance,
            epoch=self._epoch,
            layout_digest=any_rank.layout_digest,
            fingerprint=any_rank.fingerprint,
            transport=any_rank.transport,
            protocol_min=any_rank.protocol_min,
            protocol_max=any_rank.protocol_max,
            pp_size=self.config.layout.pp_size,
            all_cp_ranks=any_rank.all_cp_ranks,
        )

    def __repr__(self) -> str:
        live = sum(r.state is RankState.REGISTERED for r in self._ranks.values())
        return f"RankTable({live}/{len(self._ranks)} registered, epoch={self._epoch})"


class RoomTable:
    """room -> prefill dp rank (R26, R27), bounded and expiring (D22)."""

    def __init__(self, config: RankTableConfig) -> None:
        self._config = config
        #: room -> (dp rank, expires at); oldest first, so expiry looks at the front only.
        self._rooms: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    def register(self, room: int, dp_rank: int, now: float) -> None:
        """Raises InvalidRequest out of range. Past ``max_rooms`` the oldest is forgotten."""
        _check_room("bootstrap_room", room)
        dp_size = self._config.layout.dp_size
        if not 0 <= dp_rank < dp_size:
            raise InvalidRequest("dp_rank", f"must be 0..{dp_size - 1}, got {dp_rank}")
        self._expire(now)
        self._rooms.pop(room, None)
        self._rooms[room] = (dp_rank, now + self._config.room_ttl_s)
        if len(self._rooms) > self._config.max_rooms:
            self._rooms.popitem(last=False)

    def query(self, rooms: Sequence[int], now: float) -> dict[str, int]:
        """``{"<room>": dp rank or -1}``. Raises InvalidRequest out of range or for too many."""
        limit = self._config.max_rooms_per_query
        if len(rooms) > limit:
            raise InvalidRequest("bootstrap_rooms", f"at most {limit} at once, got {len(rooms)}")
        for room in rooms:
            _check_room("bootstrap_rooms", room)
        self._expire(now)
        return {str(room): self._rooms.get(room, (-1, 0.0))[0] for room in rooms}

    def _expire(self, now: float) -> None:
        while self._rooms:
            room, (_, expires_s) = next(iter(self._rooms.items()))
            if expires_s > now:
                return
            del self._rooms[room]


def _check_room(field: str, room: int) -> None:
    if not 0 < room <= MAX_ID:
        raise InvalidRequest(field, f"a room is between 1 and {MAX_ID}, got {room}")


def _check_address(rank_ip: str) -> None:
    """A wildcard is what a socket may bind, never where others find it (R15): in a route it
    would send every decode to itself."""
    if rank_ip.strip("[]") in _WILDCARDS:
        raise InvalidRequest(
            "rank_ip",
            f"{rank_ip!r} is an address that nobody can connect to: register the one that decode "
            "instances reach this rank at",
        )


def _shared(registration: RankRegistration) -> dict[str, object]:
    values = msgspec.structs.asdict(registration)
    return {name: values[name] for name in SHARED_FIELDS}


def _require_equal(name: str, key: str, mine: object, who: str, theirs: object) -> None:
    if mine != theirs:
        raise RegistrationConflict(
            name,
            f"rank {key} says {mine!r}, {who} has {theirs!r}; all ranks of an instance must "
            "agree: start this one with the same model and settings",
        )
