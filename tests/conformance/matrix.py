"""What the suite found, kept for the table that `nox -s conformance` ends with."""

from __future__ import annotations

import attrs

from pdcore.testing.conformance import CHECKS, Report, capability_matrix

_reports: dict[str, Report] = {}


def keep(report: Report, label: str = "") -> None:
    """A column for the table; one of a few checks only, or a second one, is none."""
    if len(report.seconds) == len(CHECKS):
        column = label or report.transport
        _reports[column] = attrs.evolve(report, transport=column)


def table() -> str:
    """Markdown; empty before anything was kept."""
    return capability_matrix(list(_reports.values())) if _reports else ""
