"""Whole events, whatever the chunks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.server.sse import DONE, EventSplitter, EventTooLarge, event, last_data


@given(
    st.lists(st.sampled_from([b"data: a\n\n", b"data: {}\r\n\r\n", b": ping\n\n"]), max_size=6),
    st.binary(max_size=5),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_only_whole_events_are_handed_on_and_nothing_is_lost(
    events: list[bytes], tail: bytes, at: list[int]
) -> None:
    tail = tail.replace(b"\n", b"")
    data = b"".join(events) + tail
    edges = [0, *sorted(min(a, len(data)) for a in at), len(data)]
    splitter = EventSplitter()
    out = b""
    for a, b in itertools.pairwise(edges):
        piece = splitter.feed(data[a:b])
        assert not piece or piece.endswith((b"\n\n", b"\r\n\r\n"))
        out += piece
    assert out + splitter.rest == data
    assert len(splitter.rest) <= max(len(tail), len(data) - len(out))
    if not tail:
        assert out == data


def test_an_event_without_end_is_refused() -> None:
    splitter = EventSplitter(max_event_bytes=10)
    assert splitter.feed(b"data: 1234") == b""
    with pytest.raises(EventTooLarge):
        splitter.feed(b"5")


def test_an_event_is_one_data_line() -> None:
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'


@pytest.mark.parametrize(
    ("events", "data"),
    [
        (b"", b""),
        (event(b"1"), b"1"),
        (event(b"1") + DONE, b"[DONE]"),
        (b"data: 1\r\n\r\ndata:2\r\n\r\n", b"2"),
        (b"id: 7\ndata: a\ndata: b\n\n", b"a\nb"),
        (event(b"1") + b": ping\n\n", b""),
    ],
)
def test_the_last_events_data(events: bytes, data: bytes) -> None:
    assert last_data(events) == data
