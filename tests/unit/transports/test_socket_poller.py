from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from pdcore.transports.socket_poller import Barrier, Poller

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux")


@pytest.fixture
def poller() -> Iterator[Poller]:
    found = Poller()
    yield found
    found.close()


def test_it_sleeps_on_what_is_wanted(poller: Poller) -> None:
    read, write = os.pipe()
    try:
        poller.want(read, read=True, write=False)
        poller.want(write, read=False, write=True)
        assert poller.wait(0) == [(write, False, True)]
        poller.want(write, read=False, write=False)
        os.write(write, b"x")
        assert poller.wait(5) == [(read, True, False)]
        poller.forget(read)
        poller.forget(read)
        assert poller.wait(0) == []
    finally:
        poller.forget(write)
        os.close(read)
        os.close(write)


def test_calls_wake_it_and_are_carried_out_in_order(poller: Poller) -> None:
    done: list[int] = []
    thread = threading.Thread(
        target=lambda: [poller.call(lambda i=i: done.append(i)) for i in range(3)]
    )
    thread.start()
    thread.join()
    assert poller.wait(5) == []
    assert done == [0, 1, 2]


def test_nobody_comes_to_a_call_after_the_end(poller: Poller) -> None:
    """And no descriptor of anybody else is written to."""
    poller.close()
    poller.close()
    assert not poller.call(lambda: None)


def test_a_barrier_is_passed_or_its_thread_is_over() -> None:
    """A revoke waits for the thread's step, and does not wait for a dead thread."""
    poller = Poller()
    thread = threading.Thread(target=lambda: poller.wait(10))
    barrier = Barrier(thread)
    thread.start()
    assert poller.call(barrier.reach)
    barrier.wait()
    thread.join()
    Barrier(thread).wait()
    poller.close()
