"""Prefill on one host, decode on another: addresses of their own, and a cable that can be cut.

Over sockets, which is what moves KV between hosts without a vendor's library, and over NIXL,
whose UCX is made to use TCP as between real hosts: here it could copy from process to process
past the cable.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcore.server.client import HttpClient, Origin
from pdcore.transports import registry
from tests.scenarios.hosts import WHY_NOT, Deployment, Host, two_hosts
from tests.scenarios.processes import ledger, until
from tests.scenarios.soak_client import Outcome, ask

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

TIMEOUT_S = 6.0
#: Twice what blocks may be quarantined for between hosts, and some.
PATIENCE_S = 300.0
#: What a request may be told while the other host cannot be reached.
CUT = {"ok", "deadline_exceeded", "unavailable", "unreachable", "peer_lost", "transfer_failed"}


ENV = {"socket": {}, "nixl": {"UCX_TLS": "tcp"}}


class Pair(Deployment):
    """The simulated engine, whose clients know what is right."""

    def __init__(self, a: Host, b: Host, folder: Path, transport: str) -> None:
        engine = ("--simulated", "--num-blocks", "600")
        super().__init__(a, b, folder, *engine, transport=transport, env=ENV[transport])
        until(lambda: self.load(1)[0].kind == "ok", self.router.pid, 60.0, "a request is served")

    def load(self, count: int, seed: int = 0, at_once: int = 8) -> list[Outcome]:
        """So many requests of a client beside the router."""

        async def lane(client: HttpClient, number: int) -> list[Outcome]:
            rng = random.Random(f"{seed} {number}")
            return [
                await ask(client, self.origin, rng, timeout_s=TIMEOUT_S, is_stream=bool(i % 2))
                for i in range(-(-count // at_once))
            ]

        async def run() -> list[Outcome]:
            client = HttpClient()
            lanes = await asyncio.gather(*(lane(client, n) for n in range(min(at_once, count))))
            await client.aclose()
            return [outcome for found in lanes for outcome in found]

        return self.decode_host.run(lambda: asyncio.run(run()))

    def expect_whole_pools(self) -> None:
        for host, port, program in (
            (self.prefill_host, 8001, self.prefill),
            (self.decode_host, 8100, self.decode),
        ):
            at = Origin(host.address, port)

            def is_whole(host: Host = host, at: Origin = at) -> bool:
                now = host.run(lambda: asyncio.run(ledger(at)))
                used = {k: n for k, n in now.items() if k not in ("kv_free", "kv_total") and n}
                return "kv_free" in now and not used

            until(is_whole, program.pid, PATIENCE_S, f"all blocks of {at.netloc} are back")


@pytest.fixture(scope="module", params=ENV)
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    skip_without(request.param)
    with two_hosts() as (a, b):
        made = Pair(a, b, tmp_path_factory.mktemp("hosts"), request.param)
        yield made
        made.close()


def skip_without(transport: str) -> None:
    why_not = registry.presence(transport).reason
    if why_not is not None:
        pytest.skip(f"{transport}: {why_not}")


def kinds(outcomes: list[Outcome]) -> Counter[str]:
    return Counter(one.problem if one.kind not in CUT else one.kind for one in outcomes)


def test_requests_are_right_across_hosts(deployment: Pair) -> None:
    outcomes = deployment.load(80)
    assert kinds(outcomes) == {"ok": len(outcomes)}
    deployment.expect_whole_pools()


def test_a_cut_cable_costs_what_was_on_its_way_and_no_more(deployment: Pair) -> None:
    """Requests that need the other host end in time with a reason; when the cable is back the
    next ones are served, by the same processes, and no block stays out."""
    host = deployment.prefill_host
    before = deployment.load(8, seed=1)
    assert kinds(before) == {"ok": len(before)}
    host.plug(False)
    during = deployment.load(16, seed=2)
    host.plug(True)
    assert set(kinds(during)) <= CUT, kinds(during)
    assert kinds(during)["ok"] < len(during), "the cable was out"

    def serves() -> bool:
        return kinds(deployment.load(8, seed=3)) == {"ok": 8}

    until(serves, deployment.router.pid, PATIENCE_S, "both hosts serve again")
    deployment.expect_whole_pools()


def test_a_cable_that_is_cut_in_the_middle_of_transfers(deployment: Pair) -> None:
    """Again and again, for half a second, under load: never a wrong token, never lost."""
    host, is_over = deployment.prefill_host, threading.Event()

    def cut_again_and_again() -> None:
        rng = random.Random(7)
        while not is_over.wait(0.3 + rng.random()):
            host.plug(False)
            is_over.wait(rng.random())
            host.plug(True)

    cutter = threading.Thread(target=cut_again_and_again)
    cutter.start()
    try:
        outcomes = deployment.load(160, seed=4)
    finally:
        is_over.set()
        cutter.join()
    assert set(kinds(outcomes)) <= CUT, kinds(outcomes)
    assert kinds(outcomes)["ok"] > 0

    def serves() -> bool:
        return kinds(deployment.load(8, seed=5)) == {"ok": 8}

    until(serves, deployment.router.pid, PATIENCE_S, "both hosts serve again")
    deployment.expect_whole_pools()


@pytest.mark.parametrize("transport", ENV)
def test_a_cable_that_is_cut_in_the_middle_of_one_transfer(transport: str) -> None:
    """D3: the transfer fails at our own time limit and is not quiesced while its bytes may be
    on their way; nobody is called dead; with the cable back it is, and the next one arrives."""
    skip_without(transport)
    run = subprocess.run(
        ["unshare", "-nm", sys.executable, "-m", "tests.chaos.two_hosts", "cut", transport],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = json.loads(run.stdout.splitlines()[-1])
    assert said == {"failed": True, "unsettled": True, "done": True, "same": True, "deaths": 0}
