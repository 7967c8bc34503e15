from __future__ import annotations

from pdcore.transports.base import HandleStatus
from pdcore.transports.socket_debts import Debts
from pdcore.transports.socket_outgoing import Ended, Job
from pdcore.types import Incarnation, LeaseId

ONE, TWO = Incarnation(b"1" * 16), Incarnation(b"2" * 16)


def ended(handle: int) -> Ended:
    return Ended(Job(handle, LeaseId(ONE, 1), iter(())), HandleStatus.FAILED, "cut", False)


def test_each_debt_is_paid_once_and_by_its_own_life() -> None:
    told: list[Ended] = []
    debts = Debts(told.append)
    debts.owe(ONE, 3, [ended(30), ended(31)])
    debts.owe(ONE, 5, [ended(50)])
    debts.owe(TWO, 4, [ended(40)])
    debts.owe(TWO, 9, [])

    def settled(incarnation: Incarnation, below: int | None) -> list[int]:
        told.clear()
        debts.settle(incarnation, below)
        assert all(one.quiesced and one.status is HandleStatus.FAILED for one in told)
        return [one.job.handle for one in told]

    assert settled(ONE, 3) == []
    assert settled(ONE, 5) == [30, 31]
    assert settled(ONE, 5) == []
    assert settled(ONE, None) == [50]
    assert settled(TWO, None) == [40]
    assert settled(TWO, None) == []
