"""Decode's way to a prefill instance's route: allowed addresses only, cached by ETag.

The bootstrap address comes with a request, and requests come from clients: a decode worker
must not be made to call arbitrary hosts (D41). Runs in a background thread (D28).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, Protocol

from pdcore.control.bootstrap_client import RouteReply, split_host_port
from pdcore.control.messages import Route
from pdcore.errors import failure
from pdcore.fsm.events import TopologyFetched

#: Instances remembered; more only cost the bytes of a route again.
MAX_CACHED: Final = 256
LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class Client(Protocol):
    """The part of :class:`pdcore.control.bootstrap_client.BootstrapClient` that is used."""

    def fetch_route(self, address: str, etag: str = "") -> RouteReply: ...


class RouteFetcher:
    """Callable with ``host:port``. ``allowed`` holds hosts or ``host:port`` pairs; empty
    means this host's loopback only."""

    def __init__(self, client: Client, allowed: Collection[str] = ()) -> None:
        self._client = client
        self._allowed = frozenset(allowed) or LOOPBACK_HOSTS
        self._known: OrderedDict[str, tuple[str, Route]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, bootstrap: str) -> TopologyFetched:
        """Never raises: what goes wrong is the event's failure."""
        try:
            host, _ = split_host_port(bootstrap)
        except ValueError as error:
            why = failure("invalid_request", f"bootstrap_host, bootstrap_port: {error}")
            return TopologyFetched(bootstrap, None, why)
        if host not in self._allowed and bootstrap not in self._allowed:
            why = failure(
                "invalid_request",
                f"bootstrap_host: {bootstrap} is not among the prefill instances this decode "
                f"instance may ask; start it with --prefill-ips {host}",
            )
            return TopologyFetched(bootstrap, None, why)
        with self._lock:
            etag, known = self._known.get(bootstrap, ("", None))
        reply = self._client.fetch_route(bootstrap, etag)
        if reply.failure is not None:
            return TopologyFetched(bootstrap, None, reply.failure)
        route = known if reply.unchanged else reply.route
        if route is None:
            why = failure("unreachable", f"{bootstrap} says that nothing changed, but we ask first")
            return TopologyFetched(bootstrap, None, why)
        with self._lock:
            self._known[bootstrap] = (reply.etag, route)
            self._known.move_to_end(bootstrap)
            while len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
        return TopologyFetched(bootstrap, route)
