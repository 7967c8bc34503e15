"""The router process: it serves before any backend is there (R9), and port 0 is reported."""

from __future__ import annotations

import asyncio

import pytest

from pdcore.config import RouterConfig
from pdcore.router.limits import OnPrefillLoss
from pdcore.server.client import HttpClient, Origin
from pdcore.server.process import Bound, Ready, Report
from pdcore.server.router_run import reachable, router_limits, run_router
from tests.unit.server.kit import run
from tests.unit.server.legs_kit import Cluster


def test_a_router_without_backends_listens_and_says_503() -> None:
    async def main() -> None:
        stopping = asyncio.Event()
        reports: list[Report] = []
        is_ready = asyncio.Event()

        def on_report(report: Report) -> None:
            reports.append(report)
            if isinstance(report, Ready):
                is_ready.set()

        config = RouterConfig(port=0, prefill_addrs=("127.0.0.1:1",), decode_addrs=("127.0.0.1:2",))
        running = asyncio.ensure_future(run_router(config, stopping, on_report))
        await is_ready.wait()
        bound = reports[0]
        assert isinstance(bound, Bound)
        host, _, port = bound.http.rpartition(":")
        client = HttpClient()
        reply = await client.request("GET", Origin(host, int(port)), "/health")
        assert reply.status == 503
        assert b"Waiting" in await reply.read()
        await client.aclose()
        stopping.set()
        assert await running == 0

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def test_d59_a_client_that_waits_at_the_end_of_the_drain_hears_why() -> None:
    """D59, over real sockets: who asks a router that is stopped gets a 503 with a reason."""

    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        stopping, is_ready = asyncio.Event(), asyncio.Event()
        bound: list[Bound] = []

        def on_report(report: Report) -> None:
            if isinstance(report, Bound):
                bound.append(report)
            elif isinstance(report, Ready):
                is_ready.set()

        config = RouterConfig(
            port=0,
            prefill_addrs=(cluster.prefills[0].address,),
            decode_addrs=(cluster.decodes[0].address,),
            drain_s=0.0,
        )
        running = asyncio.ensure_future(run_router(config, stopping, on_report))
        await is_ready.wait()
        host, _, port = bound[0].http.rpartition(":")
        asking = asyncio.ensure_future(
            cluster.client.request(
                "POST", Origin(host, int(port)), "/generate", b'{"prompt": "hi"}'
            )
        )
        await cluster.decodes[0].arrival()
        stopping.set()
        reply = await asking
        assert reply.status == 503
        assert b"shutting_down" in await reply.read()
        assert await running == 0
        await cluster.stop()

    run(main())


def test_settings_of_a_router_reach_its_core() -> None:
    config = RouterConfig(
        prefill_addrs=("p:1",),
        decode_addrs=("d:1",),
        request_timeout_s=9.0,
        max_in_flight=7,
        on_prefill_loss="fail",
        max_attempts=5,
    )
    limits = router_limits(config)
    assert (limits.request_timeout_s, limits.max_in_flight) == (9.0, 7)
    assert (limits.on_prefill_loss, limits.max_attempts) == (OnPrefillLoss.FAIL, 5)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("2001:db8::7", "[2001:db8::7]"),
        ("node-7", "node-7"),
    ],
)
def test_the_address_it_reports_can_be_opened(host: str, shown: str) -> None:
    """SGLang PR10389, 27608: with a wildcard bound, the address to use is another one."""
    assert reachable(host) == shown
