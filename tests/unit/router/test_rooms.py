"""D7: what a client that asks again with the same room gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import RoomInUse
from pdcore.router.limits import RouterLimits
from pdcore.router.rooms import LONG_BYTES, Recorded, Rooms, digest_of

ONE, OTHER = b"1" * 32, b"2" * 32
JSON = b"application/json"


def raw(**fields: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def finished(rooms: Rooms, room: int, body: bytes | None, now_s: float = 0.0) -> None:
    rooms.enter(room, room)
    rooms.leave(room, room, now_s + 300.0)
    if body is not None:
        rooms.record(room, ONE, Recorded(200, JSON, body))


def test_the_same_request_gets_the_recorded_result() -> None:
    rooms = Rooms(RouterLimits())
    assert rooms.recall(5, ONE, 0.0) is None
    finished(rooms, 5, b"{}")
    assert rooms.recall(5, ONE, 299.0) == Recorded(200, JSON, b"{}")
    assert rooms.snapshot() == {"results": 1, "results_bytes": 2, "replayed": 1}


@pytest.mark.parametrize("digest", [OTHER, None])
def test_another_request_under_a_finished_room_is_a_409(digest: bytes | None) -> None:
    rooms = Rooms(RouterLimits())
    finished(rooms, 5, b"{}")
    with pytest.raises(RoomInUse, match="used for another request"):
        rooms.recall(5, digest, 1.0)


def check_what_was_not_kept_is_not_run_again(recall: Callable[[Rooms], object]) -> None:
    rooms = Rooms(RouterLimits())
    finished(rooms, 5, None)
    try:
        result = recall(rooms)
    except RoomInUse:
        return
    raise AssertionError(f"run a second time: {result}")


def test_a_result_that_was_not_kept_is_a_409() -> None:
    """D7: a sampled result cannot be given again, and a second run gives another one. The
    mutant starts the room afresh, as pdcore did before."""
    check_what_was_not_kept_is_not_run_again(lambda rooms: rooms.recall(5, ONE, 1.0))
    with pytest.raises(AssertionError, match="a second time"):
        check_what_was_not_kept_is_not_run_again(lambda rooms: None)


def test_results_expire() -> None:
    rooms = Rooms(RouterLimits())
    finished(rooms, 5, b"{}")
    finished(rooms, 6, b"{}", now_s=10.0)
    assert rooms.recall(5, OTHER, 300.0) is None
    assert rooms.snapshot()["results"] == 1
    assert rooms.recall(6, OTHER, 310.0) is None
    assert rooms.snapshot() == {"results": 0, "results_bytes": 0, "replayed": 0}


def test_a_live_room_is_known_and_a_lost_one_names_its_attempt() -> None:
    rooms = Rooms(RouterLimits(max_recent_rooms=2))
    rooms.enter(5, ticket=1)
    assert rooms.ticket(5) == 1
    rooms.enter(5, ticket=2)  # replaced: the first one's end changes nothing
    rooms.leave(5, 1, None)
    assert rooms.ticket(5) == 2
    rooms.leave(5, 2, None)
    rooms.lose(5, 77)
    assert (rooms.ticket(5), rooms.last_lost(5)) == (None, 77)
    rooms.lose(6, 78)
    rooms.lose(7, 79)
    assert [rooms.last_lost(room) for room in (5, 6, 7)] == [0, 78, 79]
    rooms.enter(6, 3)
    rooms.leave(6, 3, 300.0)
    assert rooms.last_lost(6) == 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 60)), max_size=40))
def test_both_bounds_hold_whatever_comes(results: list[tuple[int, int]]) -> None:
    """D60, D22: a table of what is over may not grow with what was."""
    limits = RouterLimits(max_results=3, max_results_bytes=100, max_result_bytes=50)
    rooms = Rooms(limits)
    for room, size in results:
        finished(rooms, room, b"x" * size)
        found = rooms.snapshot()
        assert found["results"] <= 3
        assert found["results_bytes"] <= 100
    kept = 0
    for room in range(1, 7):
        try:
            recorded = rooms.recall(room, ONE, 1.0)
        except RoomInUse:
            continue
        kept += len(recorded.body) if recorded is not None else 0
    assert kept == rooms.snapshot()["results_bytes"]


def test_a_stream_is_recorded_as_it_passes_and_let_go_when_it_gets_too_large() -> None:
    rooms = Rooms(RouterLimits(max_results_bytes=100, max_result_bytes=50))
    for room, parts in ((5, 2), (6, 6)):
        recording = rooms.recording(room, ONE)
        for _ in range(parts):
            recording.add(b"x" * 10)
        finished(rooms, room, None)
        recording.keep(200, b"text/event-stream")
        recording.close()
    assert rooms.recall(5, ONE, 1.0) == Recorded(200, b"text/event-stream", b"x" * 20)
    with pytest.raises(RoomInUse, match="not kept"):
        rooms.recall(6, ONE, 1.0)
    assert rooms.open_more(0)


def test_streams_that_are_being_recorded_share_the_bound() -> None:
    rooms = Rooms(RouterLimits(max_results_bytes=100, max_result_bytes=90))
    first, second, third = (rooms.recording(room, ONE) for room in (1, 2, 3))
    first.add(b"x" * 80)
    second.add(b"x" * 30)  # beyond: this one is let go
    third.add(b"x" * 20)
    for room, recording in ((1, first), (2, second), (3, third)):
        finished(rooms, room, None)
        recording.keep(200, JSON)
    assert rooms.recall(1, ONE, 1.0) is not None
    with pytest.raises(RoomInUse):
        rooms.recall(2, ONE, 1.0)
    assert rooms.recall(3, ONE, 1.0) is not None


def test_the_digest_is_of_what_is_asked_not_of_how_it_is_written() -> None:
    same = [
        raw(prompt="a", max_tokens=4, temperature=0.0, bootstrap_room=5, timeout=3),
        {**raw(max_tokens=4, temperature=0.0, replaces=9), "prompt": msgspec.Raw(b' "a" ')},
    ]
    digests = {digest_of("/generate", fields) for fields in same}
    assert len(digests) == 1
    assert None not in digests
    others = [raw(prompt="b"), raw(prompt="a", stream=True), raw(prompt="a", max_tokens=5)]
    assert len({digest_of("/generate", fields) for fields in [*others, same[0]]}) == 4
    assert digest_of("/v1/completions", same[0]) not in digests


def test_a_long_value_is_not_decoded_and_counts_as_it_is_written() -> None:
    """Megabytes of token ids under a client's room held the router's loop, 0.2 s each."""
    long = b"[" + b"1,  " * (LONG_BYTES // 4) + b"1]"
    spaced, dense = msgspec.Raw(long), msgspec.Raw(long.replace(b" ", b""))
    assert digest_of("/generate", {"prompt": spaced}) == digest_of("/generate", {"prompt": spaced})
    assert digest_of("/generate", {"prompt": spaced}) != digest_of("/generate", {"prompt": dense})
    unread = msgspec.Raw(b"x" * (LONG_BYTES + 1))  # no JSON: who decodes it fails
    assert digest_of("/generate", {"prompt": unread}) is not None


@pytest.mark.parametrize(
    ("fields", "is_idempotent"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": None}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "seed": 1}, True),
        ({"temperature": 0.7, "seed": None}, False),
    ],
)
def test_greedy_and_seeded_requests_are_idempotent(
    fields: dict[str, Any], is_idempotent: bool
) -> None:
    assert (digest_of("/generate", raw(prompt="a", **fields)) is not None) == is_idempotent


def test_a_body_that_cannot_be_read_is_not_idempotent() -> None:
    deep = msgspec.Raw(b"[" * 10_000 + b"]" * 10_000)
    assert digest_of("/generate", {"prompt": deep}) is None
