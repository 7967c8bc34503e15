"""Routes: only from the configured prefill instances, and cached by ETag."""

from __future__ import annotations

import pytest

from pdcore.control.bootstrap_client import RouteReply
from pdcore.control.messages import Route
from pdcore.errors import failure
from pdcore.server.routes import MAX_CACHED, RouteFetcher

ROUTE = Route(
    attn_tp_size=1,
    attn_cp_size=1,
    dp_size=1,
    block_sizes={"full": 16},
    kv_cache_dtype="float32",
    max_prefill_tokens=8192,
    ranks={},
)


class Server:
    """A bootstrap server as far as the fetcher can tell; remembers who was asked."""

    def __init__(self, *replies: RouteReply) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[str, str]] = []

    def fetch_route(self, address: str, etag: str = "") -> RouteReply:
        self.asked.append((address, etag))
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


def check_refused(fetch: object, server: Server, address: str) -> None:
    assert callable(fetch)
    event = fetch(address)
    assert event.route is None
    assert event.failure.code == "invalid_request"
    assert not server.asked


@pytest.mark.parametrize("address", ["10.0.0.9:80", "169.254.169.254:80", "[fe80::1]:1", "p0:1"])
def test_other_hosts_are_never_asked(address: str) -> None:
    """D41: the seed's decode fetched from any host a client named."""
    server = Server(RouteReply(ROUTE, '"1"'))
    check_refused(RouteFetcher(server), server, address)
    check_refused(RouteFetcher(server, ["p1", "10.0.0.9:81"]), server, address)


def test_d41_mutant_that_honours_any_address_is_caught() -> None:
    server = Server(RouteReply(ROUTE, '"1"'))

    class Mutant(RouteFetcher):
        def __init__(self) -> None:
            super().__init__(server)

            class Everything(frozenset[str]):
                def __contains__(self, item: object) -> bool:
                    return True

            self._allowed = Everything()

    with pytest.raises(AssertionError):
        check_refused(Mutant(), server, "169.254.169.254:80")


@pytest.mark.parametrize("address", ["", "p0", "127.0.0.1:0", "127.0.0.1:x", "user@127.0.0.1:1"])
def test_malformed_addresses_are_refused(address: str) -> None:
    server = Server(RouteReply(ROUTE))
    check_refused(RouteFetcher(server), server, address)


def test_allowed_hosts_and_pairs() -> None:
    server = Server(RouteReply(ROUTE, '"1"'))
    assert RouteFetcher(server, ["p1"])("p1:5").route == ROUTE
    assert RouteFetcher(server, ["p1:5"])("p1:5").route == ROUTE
    assert RouteFetcher(server)("127.0.0.1:5").route == ROUTE


def test_an_unchanged_route_comes_from_the_cache() -> None:
    server = Server(RouteReply(ROUTE, '"1"'), RouteReply(etag='"1"', unchanged=True))
    fetch = RouteFetcher(server)
    assert fetch("127.0.0.1:5").route is ROUTE
    assert fetch("127.0.0.1:5").route is ROUTE
    assert server.asked == [("127.0.0.1:5", ""), ("127.0.0.1:5", '"1"')]


def test_failures_are_passed_on() -> None:
    why = failure("unavailable", "ranks missing: 0,0,0")
    assert RouteFetcher(Server(RouteReply(failure=why)))("127.0.0.1:5").failure == why
    absurd = RouteFetcher(Server(RouteReply(unchanged=True)))("127.0.0.1:5")
    assert absurd.failure is not None
    assert absurd.failure.code == "unreachable"


def test_the_cache_is_bounded() -> None:
    """Invariant 11."""
    server = Server(RouteReply(ROUTE, '"1"'))
    fetch = RouteFetcher(server)
    for port in range(1, MAX_CACHED + 50):
        fetch(f"127.0.0.1:{port}")
    assert len(fetch._known) == MAX_CACHED
