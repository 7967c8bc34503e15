from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcore.transports.socket_vector import MAX_BUFFERS, Vector


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=20), st.data())
def test_however_the_calls_stop_the_bytes_are_the_same(parts: list[bytes], data: object) -> None:
    vector = Vector([memoryview(part) for part in parts])
    sent = b""
    while vector.left:
        window = vector.window()
        ready = b"".join(bytes(view) for view in window)
        assert isinstance(data, st.DataObject)
        count = data.draw(st.integers(1, len(ready)))
        sent += ready[:count]
        vector.advance(count)
        assert vector.left == sum(map(len, parts)) - len(sent)
    assert sent == b"".join(parts)
    assert vector.window() == []


def test_a_call_never_gets_more_buffers_than_the_kernel_takes() -> None:
    vector = Vector([memoryview(b"x")] * (MAX_BUFFERS + 5))
    assert len(vector.window()) == MAX_BUFFERS
    vector.advance(MAX_BUFFERS)
    assert len(vector.window()) == vector.left == 5
