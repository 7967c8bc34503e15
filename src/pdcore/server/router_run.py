"""The router as a process of its own: one app on one socket, drained before it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdcore.config import RouterConfig
from pdcore.router.limits import OnPrefillLoss, RouterLimits
from pdcore.server.process import Bound, Ready, Report
from pdcore.server.router import create_router_app
from pdcore.server.serve import AppServer, bind
from pdcore.system_clock import SystemClock


def router_limits(config: RouterConfig) -> RouterLimits:
    return RouterLimits(
        max_in_flight=config.max_in_flight,
        request_timeout_s=config.request_timeout_s,
        on_prefill_loss=OnPrefillLoss(config.on_prefill_loss),
        max_attempts=config.max_attempts,
    )


def reachable(host: str) -> str:
    """Where a person on this machine reaches what binds ``host``: a wildcard is no address to
    connect to, and an IPv6 literal needs brackets."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


async def run_router(
    config: RouterConfig, stopping: asyncio.Event, report: Callable[[Report], None]
) -> int:
    """Serve until ``stopping`` is set; returns the exit status. The router is ready as soon
    as it listens: backends may come later (R9). Raises ConfigError for an address that
    cannot be had."""
    app = create_router_app(
        config.prefill_addrs,
        config.decode_addrs,
        config.bootstrap_ports,
        clock=SystemClock(),
        limits=router_limits(config),
        max_body_bytes=config.max_body_bytes,
    )
    server = AppServer(app, bind(config.host, config.port))
    report(Bound(f"{reachable(config.host)}:{server.port}"))
    try:
        await server.start()
        report(Ready())
        await stopping.wait()
    finally:
        await server.stop(config.drain_s, app.state.give_up)
    return 0
