"""One request in flight as its handler awaits it."""

from __future__ import annotations

import asyncio

from pdcore.server.pending import Ended, NewTokens, Pending
from pdcore.types import GenerateRequest, RoomKey, SamplingParams
from tests.unit.server.kit import run, settle

END = Ended("stop", None, 3, 2, {})


def pending() -> Pending:
    request = GenerateRequest(RoomKey(1, 2), "r", (1,), SamplingParams(), 0.0, 1.0)
    return Pending(request, 0, 0.0)


def test_tokens_that_came_together_are_read_together_and_before_the_end() -> None:
    async def play() -> None:
        one = pending()
        one.add_tokens([1, 2], [-0.5, None])
        one.add_tokens([3], [-1.0])
        one.end(END)
        assert await one.next() == NewTokens([1, 2, 3], [-0.5, None, -1.0])
        assert await one.next() == END
        assert await one.next() == END
        assert one.num_tokens == 3

    run(play())


def test_the_first_end_counts() -> None:
    async def play() -> None:
        one = pending()
        one.end(END)
        one.end(Ended("error", None, 0, 0, {}))
        assert await one.next() == END

    run(play())


def test_admission_is_acceptance_a_token_or_the_end() -> None:
    async def play() -> None:
        for feed in (Pending.accept, lambda p: p.add_tokens([1], None)):
            one = pending()
            waiting = asyncio.ensure_future(one.admitted())
            await settle(3)
            assert not waiting.done()
            feed(one)
            assert await waiting is None
        one = pending()
        one.end(END)
        assert await one.admitted() == END

    run(play())


def test_a_waiting_reader_is_woken_and_may_be_cancelled() -> None:
    async def play() -> None:
        one = pending()
        waiting = asyncio.ensure_future(one.next())
        await settle(3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        one.add_tokens([4], None)
        assert await one.next() == NewTokens([4], [])
        assert "sent" not in repr(one)

    run(play())


def test_what_its_worker_has_done_is_told() -> None:
    """D23: a 504 says what was awaited."""
    one = pending()
    assert one.progress == "has not answered"
    one.accept()
    assert one.progress == "has accepted it"
    one.add_tokens([1, 2], None)
    assert one.progress == "has sent 2 tokens"
