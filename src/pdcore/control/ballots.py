"""What the ranks of one group say to each other: ballots, and the rounds they make.

A group is the TP x CP ranks that move the same requests in the same tick (architecture,
section 9). Its first rank is the *hub*; the others are linked to it alone. A round is

  Begin   hub -> rank: cast your ballot (somebody has something to tell);
  Ballot  rank -> hub: a snapshot of what this rank votes, and what it brings into the round;
  Closed  hub -> rank: the ballots of all, in order of rank; everybody plays the same round.

Ranks of a group trust each other as they trust their engine, but a message that cannot be
read is an error, never a guess.
"""

from __future__ import annotations

import msgspec

from pdcore.control.messages import LeaderMessage
from pdcore.errors import CodecError
from pdcore.types import Failure

#: A round carries the requests of one loop iteration, prompts included.
MAX_GROUP_BYTES = 256 << 20


class StepDone(msgspec.Struct, frozen=True, array_like=True):
    """How a rank's engine step ended. ``digest`` is that of the sampled tokens, which must be
    the same on all ranks; ``blamed`` as in ``StepCompleted``."""

    batch_id: int
    digest: int
    failure: Failure | None
    blamed: list[int]


class Ballot(msgspec.Struct, frozen=True, array_like=True, tag="ballot"):
    """``votes`` holds one small number per id that all ranks hold, in one order; ``ids_hash``
    covers ids and committed states; ``failures``: place in the vector, and why it failed here;
    ``tokens``: place, and the first token that was received here.
    ``now_s`` and ``unix_s`` are the sender's clocks: the hub's are the group's. ``messages`` are
    those of the leader that arrive with this round. ``is_drained``: nothing is left here that
    would keep the group from its end."""

    round: int
    rank: int
    ids_hash: int
    votes: bytes
    failures: list[tuple[int, Failure]]
    tokens: list[tuple[int, int]]
    now_s: float
    unix_s: float
    messages: list[LeaderMessage]
    step: StepDone | None
    is_drained: bool


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    round: int


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    round: int
    ballots: list[Ballot]


GroupMessage = Ballot | Begin | Closed

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[GroupMessage] = msgspec.msgpack.Decoder(Ballot | Begin | Closed)


def encode_group(message: GroupMessage) -> bytes:
    return _ENCODER.encode(message)


def decode_group(data: bytes) -> GroupMessage:
    """Raises CodecError."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CodecError(f"a message of the group cannot be read: {error}") from None
