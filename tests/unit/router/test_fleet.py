"""What the router knows of its instances."""

from __future__ import annotations

from pdcore.router.fleet import Fleet, Health, Report
from pdcore.router.policies import parse_targets
from pdcore.types import Role


def fleet(bootstrap_port: int = 18800) -> Fleet:
    return Fleet(*parse_targets(["p0:1", "p1:1"], ["d0:1"], [bootstrap_port]))


def test_nothing_is_usable_before_it_was_probed_and_the_reason_says_so() -> None:
    """R9: the router starts first; until instances are there it can say which are missing."""
    one = fleet()
    assert (
        one.problem() == "no prefill instance is ready (p0:1: not probed yet; p1:1: not probed yet)"
    )
    one.report(one.prefills[1], Report(True, "Up"))
    assert one.problem() == "no decode instance is ready (d0:1: not probed yet)"
    one.report(one.decodes[0], Report(True, "Up"))
    assert one.problem() is None
    one.mark_down(one.decodes[0], "cannot connect to d0:1")
    assert one.problem() == "no decode instance is ready (d0:1: cannot connect to d0:1)"


def test_an_instance_tells_its_name_its_dp_size_and_its_bootstrap_port() -> None:
    """D21: dp_size is known before the first request goes there."""
    one = fleet(bootstrap_port=0)
    member = one.prefills[0]
    assert (member.instance, member.dp_size, member.bootstrap_port) == ("p0:1", None, 0)
    one.report(member, Report(True, "Up", "10.0.0.5:1", 4, 40123))
    assert (member.instance, member.dp_size, member.bootstrap_port) == ("10.0.0.5:1", 4, 40123)
    one.report(member, Report(False, "HTTP 503"))
    assert (member.health, member.detail, member.dp_size) == (Health.DOWN, "HTTP 503", 4)
    configured = fleet().prefills[0]
    one.report(configured, Report(True, "Up", None, None, 40123))
    assert configured.bootstrap_port == 18800


def test_members_come_in_the_configured_order() -> None:
    names = [(role, member.target.netloc) for role, member in fleet().members()]
    assert names == [(Role.PREFILL, "p0:1"), (Role.PREFILL, "p1:1"), (Role.DECODE, "d0:1")]
