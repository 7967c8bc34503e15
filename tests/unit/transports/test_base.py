from __future__ import annotations

import inspect

import pytest

from pdcore.transports.base import Completion, HandleStatus, Region, Transport
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.shm import ShmTransport


@pytest.mark.parametrize("implementation", [LoopbackTransport, ShmTransport])
def test_signatures_are_those_of_the_contract(implementation: type) -> None:
    for name, method in inspect.getmembers(Transport, inspect.isfunction):
        if name.startswith("_"):
            continue
        wanted = inspect.signature(method)
        assert inspect.signature(vars(implementation)[name]) == wanted, name


def test_regions_with_the_same_numbers_are_equal_whatever_they_hold() -> None:
    one, other = (Region(1, 4, memoryview(bytearray(4))) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert "memory" not in repr(one)


def test_a_completion_is_a_value() -> None:
    assert Completion(1, HandleStatus.DONE, True) == Completion(1, HandleStatus.DONE, True, "")
