"""The router asks its instances how they are: /health of each, regularly and when in need.

Liveness of workers is inside that answer (D48): an instance whose worker died says 503. Two
callers in need share one round, so that a flood of requests makes no flood of probes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from pdcore.router.fleet import Fleet, Health, Member, Report
from pdcore.server.client import Client, Origin, OutOfConnections, Timeout
from pdcore.server.exchange import HttpError
from pdcore.types import Role

_log: Final = logging.getLogger(__name__)
_MAX_HEALTH_BYTES: Final = 64 * 1024


class _Health(msgspec.Struct, frozen=True):
    """The part of an instance's /health that the router reads; other servers may say less."""

    status: str = ""
    disaggregation_mode: str | None = None
    instance: str | None = None
    dp_size: int | None = None
    bootstrap: str | None = None
    problems: list[str] = []
    refused_peers: dict[str, str] = {}


class Prober:
    def __init__(
        self,
        fleet: Fleet,
        client: Client,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        on_evicted: Callable[[Member, str], None] | None = None,
    ) -> None:
        """``on_evicted`` hears of a member that has just become one that stays unreachable."""
        self._fleet = fleet
        self._client = client
        self._interval_s = interval_s
        self._timeout = Timeout(connect_s=timeout_s, total_s=timeout_s)
        self._on_evicted = on_evicted
        self._round: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Probe for ever; cancel to stop."""
        while True:
            await self.probe_all()
            await asyncio.sleep(self._interval_s)

    async def probe_all(self) -> None:
        """One round over all targets; joins the one that is under way."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._probe_all())
        await asyncio.shield(self._round)

    async def _probe_all(self) -> None:
        members = self._fleet.members()
        probes = (self._probe(role, member) for role, member in members)
        reports = await asyncio.gather(*probes, return_exceptions=True)
        for (_, member), report in zip(members, reports, strict=True):
            if isinstance(report, BaseException):  # a bug must not end the probing of others
                where = member.target.netloc
                _log.error("probing %s failed", where, exc_info=report)
                report = Report(False, "it cannot be probed; the router's log has the details")
            was_gone = member.stays_unreachable
            self._fleet.report(member, report)
            if member.stays_unreachable and not was_gone and self._on_evicted is not None:
                self._on_evicted(
                    member,
                    f"{member.target.netloc} gave no answer to {member.num_unreached} probes in "
                    f"a row: {report.detail}",
                )

    async def _probe(self, role: Role, member: Member) -> Report:
        origin = Origin(member.target.host, member.target.port)
        try:
            response = await self._client.request("GET", origin, "/health", timeout=self._timeout)
            body = await response.read(_MAX_HEALTH_BYTES)
        except OutOfConnections:
            # All are busy, or we lack descriptors: that says nothing against the instance.
            return Report(member.health is Health.UP, member.detail, refused=member.refused)
        except HttpError as error:
            return Report(False, str(error), is_reached=False)
        try:
            health = msgspec.json.decode(body, type=_Health)
        except msgspec.DecodeError:
            health = _Health()
        wrong = _wrong_role(role, member, health.disaggregation_mode)
        if wrong is not None:
            return Report(False, wrong)
        port = _port((health.bootstrap or "").rpartition(":")[2])
        return Report(
            is_up=response.status == 200,
            detail="; ".join(health.problems) or health.status or f"HTTP {response.status}",
            instance=health.instance,
            dp_size=health.dp_size if health.dp_size and health.dp_size > 0 else None,
            bootstrap_port=port,
            refused=frozenset(health.refused_peers),
        )


def _wrong_role(role: Role, member: Member, mode: str | None) -> str | None:
    """An instance of the other role would take its half of each request and fail it."""
    if mode is None or mode == role.name:
        return None
    addrs = "prefill_addrs" if role is Role.PREFILL else "decode_addrs"
    return (
        f"{member.target.netloc} is listed in {addrs}, but it says that it is a {mode.lower()} "
        f"instance: list the address of a {role.value} instance there"
    )


def _port(text: str) -> int | None:
    """None for what is no TCP port; isdigit alone takes "²" too."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    return int(text) if 0 < int(text) < 65536 else None
