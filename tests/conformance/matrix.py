"""What the suite found, kept for the table that `nox -s conformance` ends with."""

from __future__ import annotations

import json

import attrs

from pdcore.testing.conformance import CHECKS, Report, capability_matrix
from pdcore.transports.base import Revocation, TransportCaps

_reports: dict[str, Report] = {}


def keep(report: Report, label: str = "") -> None:
    """A column for the table; one of a few checks only, or a second one, is none."""
    if len(report.seconds) == len(CHECKS):
        column = label or report.transport
        _reports[column] = attrs.evolve(report, transport=column)


def dump() -> str:
    """What was kept in this process, for the one that shows the table."""
    plain = (attrs.asdict(report) | {"caps": report.caps.as_json()} for report in _reports.values())
    return json.dumps(list(plain))


def load(dumped: str) -> None:
    """Keep what another process did."""
    for row in json.loads(dumped):
        caps = dict(row.pop("caps"))
        caps["revocation"] = Revocation(caps["revocation"])
        caps["device_kinds"] = tuple(caps["device_kinds"])
        row["passed"] = tuple(row["passed"])
        keep(Report(caps=TransportCaps(**caps), **row))


def table() -> str:
    """Markdown, in the order of the names; empty before anything was kept."""
    reports = sorted(_reports.values(), key=lambda report: report.transport)
    return capability_matrix(reports) if reports else ""
