"""A worker's calls to a bootstrap server, and when to make them.

The calls block (bounded by one timeout for the whole exchange) and are made from a helper
thread, never in a tick (D28). :class:`Registrar` is the pure part: what to call next and
what to say meanwhile. A worker registers last, after all its memory is registered (D34),
renews its lease for as long as it serves, and keeps trying with a growing pause while its
health names the reason; it never gives up silently (D33).
"""

from __future__ import annotations

import http.client
import random
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import attrs
import msgspec

from pdcore.clock import Clock
from pdcore.control.codec import PROTOCOL_MAX, PROTOCOL_MIN, negotiate
from pdcore.control.messages import RankRegistration, Route
from pdcore.control.rank_table import LEASE_S
from pdcore.errors import IncompatibleError, failure
from pdcore.types import Failure

#: A route of 512 ranks is 60 KB.
MAX_RESPONSE_BYTES: Final = 4 << 20
_CHUNK_BYTES: Final = 64 << 10


class RouteReply(NamedTuple):
    """Exactly one of the three says something: a new route, "as you know it", a failure."""

    route: Route | None = None
    etag: str = ""
    unchanged: bool = False
    failure: Failure | None = None


class CallReply(NamedTuple):
    """``failure`` None: done. ``is_final``: repeating the same call cannot succeed."""

    failure: Failure | None = None
    is_final: bool = False


@attrs.frozen
class Answer:
    """What a server said."""

    status: int
    body: bytes
    etag: str


class CallFailed(Exception):
    """No usable answer; the text says why."""


class Http(Protocol):
    """How one exchange is made: :class:`BlockingHttp`, or a simulation's own way."""

    def __call__(
        self,
        method: str,
        where: tuple[str, int],
        target: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> Answer:
        """``where`` is (host, port). Raises CallFailed."""
        ...


def split_host_port(address: str) -> tuple[str, int]:
    """``host:port``, ``[v6]:port``, or either with ``http://`` -> (host, port).

    IPv6 needs its brackets, and loses them here: http.client wants the bare host
    (SGLang #10389). Raises ValueError naming the address.
    """
    rest = address.removeprefix("http://").removesuffix("/")
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "/" in host or "@" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"expected host:port or [IPv6]:port, got {address!r}")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"port must be 1..65535 in {address!r}")
    return host, int(port)


class BootstrapClient:
    """Blocking calls; safe to use from any one thread at a time. No call raises: what goes
    wrong is a :class:`Failure` that names the address."""

    def __init__(
        self,
        clock: Clock,
        *,
        timeout_s: float = 5.0,
        token: str | None = None,
        http: Http | None = None,
    ) -> None:
        self._http = http or BlockingHttp(clock, timeout_s)
        self._token = token

    def register(self, address: str, registration: RankRegistration) -> CallReply:
        """PUT register_rank, also to renew the lease."""
        return self._write("PUT", address, "register_rank", msgspec.json.encode(registration))

    def deregister(self, address: str, rank: str, incarnation: str) -> CallReply:
        """``rank`` is the route key. Not being known there (any more) is a success."""
        body = msgspec.json.encode({"rank": rank, "incarnation": incarnation})
        return self._write("POST", address, "deregister_rank", body)

    def fetch_route(self, address: str, etag: str = "") -> RouteReply:
        """GET route. A route of a protocol range we do not share is an ``incompatible``
        failure that names both ranges (D14); 503 is ``unavailable`` with the missing ranks."""
        headers = {"If-None-Match": etag} if etag else {}
        try:
            answer = self._call("GET", address, "route", None, headers)
            if answer.status == 304 and etag:
                return RouteReply(etag=etag, unchanged=True)
            if answer.status != 200:
                code = "unavailable" if answer.status == 503 else "unreachable"
                detail = f"{address} answered {answer.status}: {_detail(answer.body)}"
                return RouteReply(failure=failure(code, detail))
            route = msgspec.json.decode(answer.body, type=Route)
            negotiate((PROTOCOL_MIN, PROTOCOL_MAX), (route.protocol_min, route.protocol_max))
        except CallFailed as error:
            return RouteReply(failure=failure("unreachable", f"{address}: {error}"))
        except IncompatibleError as error:
            return RouteReply(failure=failure("incompatible", f"{address}: {error}"))
        except (msgspec.MsgspecError, ValueError) as error:
            detail = f"{address} sent no route: {error}; is it a pdcore bootstrap server?"
            return RouteReply(failure=failure("unreachable", detail))
        return RouteReply(route=route, etag=answer.etag)

    def _write(self, method: str, address: str, path: str, body: bytes) -> CallReply:
        try:
            answer = self._call(method, address, path, body, {})
        except CallFailed as error:
            return CallReply(failure("unreachable", f"{address}: {error}"))
        if answer.status == 200:
            return CallReply()
        detail = f"{address} answered {answer.status} to {path}: {_detail(answer.body)}"
        if 400 <= answer.status < 500 and answer.status not in (408, 429):
            return CallReply(failure("incompatible", detail), is_final=True)
        return CallReply(failure("unavailable", detail))

    def _call(
        self, method: str, address: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> Answer:
        """Raises CallFailed."""
        try:
            where = split_host_port(address)
        except ValueError as error:
            raise CallFailed(str(error)) from None
        sent = dict(headers)
        if body is not None:
            sent["Content-Type"] = "application/json"
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        return self._http(method, where, f"/bootstrap/{path}", body, sent)


class BlockingHttp:
    """One connection per call; the timeout bounds the whole exchange, not each read."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s

    def __call__(
        self,
        method: str,
        where: tuple[str, int],
        target: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> Answer:
        """Raises CallFailed."""
        deadline = self._clock.monotonic() + self._timeout_s
        connection = http.client.HTTPConnection(*where, timeout=self._timeout_s)
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            content = bytearray()
            while part := response.read1(_CHUNK_BYTES):
                content += part
                if len(content) > MAX_RESPONSE_BYTES:
                    raise CallFailed(f"the answer is over {MAX_RESPONSE_BYTES} bytes")
                if self._clock.monotonic() > deadline:
                    raise CallFailed(f"no complete answer within {self._timeout_s:g} s")
            return Answer(response.status, bytes(content), response.headers.get("etag", ""))
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise CallFailed(str(error) or type(error).__name__) from None
        finally:
            connection.close()


def _detail(body: bytes) -> str:
    """The ``detail`` of a refusal, or the start of whatever else came."""
    try:
        value = msgspec.json.decode(body, type=dict[str, str])
        told = value.get("detail", "")[:500]
    except (msgspec.MsgspecError, ValueError):
        told = body[:200].decode("utf-8", "replace")
    return told or "it gave no reason; is that a bootstrap server?"


class Registrar:
    """When to register, renew and say why not; pure state, ``now`` is an argument.

    The shell asks ``is_due(now)``, makes the call on its helper thread, and feeds the reply
    back with ``handle_reply``. Until the first success, and again when the lease may have
    run out, ``problems`` is not empty: the worker is not ready, and health shows why (D33).
    """

    def __init__(
        self,
        address: str,
        *,
        renew_interval_s: float = LEASE_S / 3,
        lease_s: float = LEASE_S,
        retry_initial_s: float = 0.1,
        retry_max_s: float = 5.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """``lease_s`` is the server's; ``jitter`` returns [0, 1) and spreads retries of many
        workers over half the pause. Raises ValueError."""
        if not 0 < renew_interval_s < lease_s or not 0 < retry_initial_s <= retry_max_s:
            raise ValueError(
                f"need 0 < renew_interval_s ({renew_interval_s}) < lease_s ({lease_s}) and "
                f"0 < retry_initial_s ({retry_initial_s}) <= retry_max_s ({retry_max_s})"
            )
        self.address = address
        self._renew_interval_s = renew_interval_s
        self._lease_s = lease_s
        self._retry_s = (retry_initial_s, retry_max_s)
        self._jitter = jitter
        self._due_s = float("-inf")
        self._in_flight_since_s: float | None = None
        self._registered_s: float | None = None
        self._failure: Failure | None = None
        self.num_failures = 0

    def is_due(self, now: float) -> bool:
        """Whether to call ``register`` now; never while a call is under way."""
        return self._in_flight_since_s is None and now >= self._due_s

    def poll_deadline(self) -> float | None:
        """When ``is_due`` turns true by itself; None while a call is under way."""
        return None if self._in_flight_since_s is not None else self._due_s

    def handle_started(self, now: float) -> None:
        self._in_flight_since_s = now

    def handle_reply(self, reply: CallReply, now: float) -> None:
        """A lease counts from when the call began. A refusal that cannot pass (409) is
        retried too, at the slowest pace: the contradicting rank may be the one that goes."""
        started_s = now if self._in_flight_since_s is None else self._in_flight_since_s
        self._in_flight_since_s = None
        self._failure = reply.failure
        if reply.failure is None:
            self.num_failures = 0
            self._registered_s = started_s
            self._due_s = started_s + self._renew_interval_s
            return
        initial_s, max_s = self._retry_s
        pause_s = (
            max_s if reply.is_final else min(max_s, initial_s * 2.0 ** min(self.num_failures, 30))
        )
        self.num_failures += 1
        if reply.is_final:
            self._registered_s = None
        self._due_s = now + pause_s * (1.0 - self._jitter() / 2)

    def is_registered(self, now: float) -> bool:
        """Whether the server still counts us as live, as far as we can know."""
        return self._registered_s is not None and now < self._registered_s + self._lease_s

    def problems(self, now: float) -> list[str]:
        """Empty: registered. Else one sentence for WorkerHealth (D33)."""
        if self.is_registered(now):
            return []
        if self._failure is None:
            if self._registered_s is not None:
                return [f"its lease at the bootstrap server {self.address} has run out"]
            return [f"not registered at the bootstrap server {self.address} yet"]
        return [
            f"not registered at the bootstrap server {self.address} after "
            f"{self.num_failures} attempts: {self._failure.detail}"
        ]
