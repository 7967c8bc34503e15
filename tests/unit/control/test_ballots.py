"""Messages within a group: what was said is what is heard, or an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.control.ballots import (
    Ballot,
    Begin,
    Closed,
    StepDone,
    decode_group,
    encode_group,
)
from pdcore.control.messages import Abort, Stop
from pdcore.errors import CodecError, failure
from pdcore.types import RoomKey

STEP = StepDone(3, 2**31, failure("internal", "why"), [1, 2])
BALLOT = Ballot(
    5,
    1,
    (1 << 63) - 1,
    b"\0\1\2",
    [(0, failure("internal", "first"))],
    [(2, 17)],
    1.5,
    1e9,
    [Abort(RoomKey(1, 2), "x", True), Stop(2.0)],
    STEP,
    True,
)


@pytest.mark.parametrize("message", [BALLOT, Begin(7), Closed(5, [BALLOT, BALLOT])])
def test_messages_survive_the_way(message: Ballot | Begin | Closed) -> None:
    assert decode_group(encode_group(message)) == message


@given(data=st.binary(max_size=64), cut=st.integers(0, 200))
def test_what_cannot_be_read_is_a_codec_error(data: bytes, cut: int) -> None:
    whole = encode_group(Closed(5, [BALLOT]))
    for garbage in (b"\xc1" + data, whole[: min(cut, len(whole) - 1)]):
        with pytest.raises(CodecError, match="cannot be read"):
            decode_group(garbage)
