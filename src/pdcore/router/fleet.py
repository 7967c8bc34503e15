"""What the router knows of its instances: which are usable, and what they said of themselves.

A target is Unknown until it was probed, Up after a 200 of /health, Down after anything else
or after a connection that it did not take. Only Up targets get requests (D47b, D48).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import attrs

from pdcore.router.policies import Target
from pdcore.types import Role


class Health(enum.Enum):
    UNKNOWN = "Unknown"
    UP = "Up"
    DOWN = "Down"


@attrs.frozen
class Report:
    """What one probe learned. ``instance``, ``dp_size`` and ``bootstrap_port`` are None where
    the answer does not say."""

    is_up: bool
    detail: str = ""
    instance: str | None = None
    dp_size: int | None = None
    bootstrap_port: int | None = None
    #: It gave an answer, whatever it says.
    is_reached: bool = True
    #: Instances of the other role that it gives no work now: that pair is broken (D25).
    refused: frozenset[str] = frozenset()


#: So many probes in a row without any answer: what ran there is over or ends by its deadline.
UNREACHABLE_AFTER: Final = 10


class Member:
    """One target and its state. ``num_live`` counts requests whose current attempt names it,
    ``num_unreached`` the latest probes in a row that got no answer, while no request did."""

    __slots__ = (
        "bootstrap_port",
        "detail",
        "dp_size",
        "health",
        "instance",
        "num_live",
        "num_unreached",
        "refused",
        "target",
    )

    def __init__(self, target: Target) -> None:
        self.target = target
        self.health = Health.UNKNOWN
        self.detail = "not probed yet"
        self.instance = target.netloc
        self.dp_size: int | None = None
        self.bootstrap_port = target.bootstrap_port
        self.num_live = 0
        self.num_unreached = 0
        #: Instances of the other role that it does not work with now.
        self.refused: frozenset[str] = frozenset()

    def heard(self) -> None:
        """It answered a request, or a stream of it goes on: somebody is there, however long
        its /health takes under load."""
        self.num_unreached = 0

    def works_with(self, other: Member) -> bool:
        """Neither of the two has said that this pair is broken."""
        return other.instance not in self.refused and self.instance not in other.refused

    @property
    def stays_unreachable(self) -> bool:
        return self.num_unreached >= UNREACHABLE_AFTER

    def __repr__(self) -> str:
        return f"Member({self.target.netloc}, {self.health.value}, live={self.num_live})"


class Fleet:
    """All targets of one router, in the configured order."""

    def __init__(self, prefills: Sequence[Target], decodes: Sequence[Target]) -> None:
        self.prefills = [Member(target) for target in prefills]
        self.decodes = [Member(target) for target in decodes]

    def members(self) -> list[tuple[Role, Member]]:
        return [
            *((Role.PREFILL, member) for member in self.prefills),
            *((Role.DECODE, member) for member in self.decodes),
        ]

    def report(self, member: Member, report: Report) -> None:
        member.health = Health.UP if report.is_up else Health.DOWN
        member.detail = report.detail
        member.refused = report.refused
        member.num_unreached = 0 if report.is_reached else member.num_unreached + 1
        if report.instance:
            member.instance = report.instance
        if report.dp_size is not None:
            member.dp_size = report.dp_size
        if report.bootstrap_port and not member.target.bootstrap_port:
            member.bootstrap_port = report.bootstrap_port

    @staticmethod
    def mark_down(member: Member, detail: str) -> None:
        """A connection was refused: no request goes there until a probe succeeds."""
        member.health = Health.DOWN
        member.detail = detail

    def problem(self) -> str | None:
        """Why no request can be served now; None if one can."""
        for name, members in (("prefill", self.prefills), ("decode", self.decodes)):
            if Health.UP not in [member.health for member in members]:
                why = "; ".join(f"{m.target.netloc}: {m.detail}" for m in members)
                return f"no {name} instance is ready ({why})"
        return None
