from __future__ import annotations

import select
import threading

from pdcore.transports.socket_bell import Inbox


def rings(inbox: Inbox[int]) -> bool:
    return bool(select.select([inbox.fileno()], [], [], 0)[0])


def test_it_rings_exactly_while_something_is_in_it() -> None:
    inbox: Inbox[int] = Inbox()
    try:
        assert not rings(inbox)
        inbox.put()
        assert not rings(inbox)
        inbox.put(1)
        inbox.put(2, 3)
        assert rings(inbox)
        assert len(inbox) == 3
        assert inbox.peek() == [1, 2, 3]
        assert inbox.drain() == [1, 2, 3]
        assert not rings(inbox)
        assert inbox.drain() == []
    finally:
        inbox.close()


def test_nothing_is_lost_between_threads() -> None:
    """Whoever sleeps on the descriptor hears of every word."""
    inbox: Inbox[int] = Inbox()
    thread = threading.Thread(target=lambda: [inbox.put(i) for i in range(2000)])
    thread.start()
    found: list[int] = []
    try:
        while len(found) < 2000:
            assert select.select([inbox.fileno()], [], [], 10)[0], "a word had no ring"
            found += inbox.drain()
        assert found == list(range(2000))
        assert not rings(inbox)
    finally:
        thread.join()
        inbox.close()


def test_what_is_left_at_the_end_can_still_be_taken() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    inbox.close()
    inbox.close()
    inbox.put(2)
    assert inbox.drain() == [1, 2]
