"""What the processes of a world share."""

from __future__ import annotations

from pdcore.sim.plan import make_plan
from pdcore.sim.site import START_S, SimClock, Trace, make_site


def test_clocks_follow_virtual_time_and_may_differ() -> None:
    site = make_site(make_plan(0))
    skewed = SimClock(site.loop, 0.25)
    assert site.clock.monotonic() == skewed.monotonic() == START_S
    assert skewed.unix() - site.clock.unix() == 0.25


def test_a_trace_is_a_hash_of_what_happened_and_when() -> None:
    site = make_site(make_plan(0))
    one, other = Trace(site.loop), Trace(site.loop)
    for trace in (one, other):
        trace("what", "detail")
    assert one.digest() == other.digest()
    assert other.lines == ["0.000000 what detail"]
    other("more", "")
    assert one.digest() != other.digest()


def test_a_violation_says_when() -> None:
    site = make_site(make_plan(0))
    site.violate("it broke")
    assert site.violations == ["at 0.000 s: it broke"]
