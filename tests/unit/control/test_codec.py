"""Frames: what goes in comes out; whatever else comes is a CodecError with a precise text."""

from __future__ import annotations

import contextlib
import importlib
import math
import struct
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from pdcore.control import codec
from pdcore.control import messages as m
from pdcore.errors import CodecError, IncompatibleError
from pdcore.types import MAX_ID, Failure, Incarnation, LeaseId, Nonce, RoomKey

KEY = RoomKey(123_456_789, MAX_ID)
PREFILL = Incarnation(b"p" * 16)
DECODE = Incarnation(b"d" * 16)
LEASE = LeaseId(DECODE, 0)
NONCE = Nonce(PREFILL, 7)
HANDSHAKE = m.Handshake(
    KEY,
    LEASE,
    b"endpoint",
    {"full": codec.pack_block_ids([1, 2, 9])},
    0,
    33,
    2**64 - 1,
    1,
    2e9,
    30.0,
)
PEER_MESSAGES: list[m.PeerMessage] = [
    HANDSHAKE,
    m.Claim(KEY, LEASE, NONCE),
    m.Grant(KEY, NONCE),
    m.Refuse(KEY, NONCE, "lease is over"),
    m.Status(KEY, LEASE, m.StatusKind.QUEUED),
    m.Status(KEY, LEASE, m.StatusKind.DONE, NONCE, None, b"record"),
    m.Status(KEY, LEASE, m.StatusKind.FAILED, NONCE, Failure("peer_lost", "gone", 503)),
    m.StatusAck(KEY, LEASE, m.StatusKind.DONE),
    m.Cancel(KEY, LEASE, ()),
    m.Cancel(KEY, LEASE, (NONCE, Nonce(PREFILL, 8))),
    m.CancelAck(KEY, LEASE, None),
    m.CancelAck(KEY, LEASE, NONCE),
    m.Stale(KEY, DECODE),
    m.Heartbeat(0),
    m.HeartbeatAck(MAX_ID),
]
SAMPLING = m.SubmitSampling(16, 0, 0.7, 0.9, 40, -5, (2, 3), False, True, 4)
LEADER_MESSAGES: list[m.LeaderMessage] = [
    m.Submit(
        KEY,
        "req-1",
        codec.pack_token_ids([0, 151_000]),
        SAMPLING,
        2e9,
        9.5,
        "h:1",
        "h:2",
        "h:3",
        0,
        4,
    ),
    m.Submit(KEY, "req-2", b"", SAMPLING, 2e9, 9.5, "h:1", "h:2", "h:3", None, None),
    m.Abort(KEY, "client is gone", True),
    m.Stop(30.0),
]
WORKER_MESSAGES: list[m.WorkerMessage] = [
    m.Accepted(KEY),
    m.Aborted(KEY, False),
    m.Tokens([KEY, RoomKey(8, 1)], [[1, 2], [3]], [[-0.5, None], None]),
    m.Finished(KEY, "stop", None, 33, 64, {"queue": 0.1}),
    m.WorkerReady(0, 0, DECODE, "tcp://127.0.0.1:5", 2048, 8192, 50_000, 100, "shm"),
    m.WorkerHealth(0, ["not registered"], {"running": 3.0}),
]


def frame(*messages: m.PeerMessage, to: Incarnation = DECODE) -> m.Frame:
    return m.Frame("10.0.0.1:8001", 3, PREFILL, "tcp://10.0.0.1:40001", to, list(messages))


def test_frames_survive_the_wire() -> None:
    sent = frame(*PEER_MESSAGES)
    assert codec.decode_frame(codec.encode_frame(sent)) == sent
    unknown = frame(to=Incarnation(b""))
    assert codec.decode_frame(codec.encode_frame(unknown)) == unknown


def test_link_messages_survive_the_wire() -> None:
    for leader_message in LEADER_MESSAGES:
        data = codec.encode_link(leader_message)
        assert codec.decode_leader_message(data) == leader_message
    for worker_message in WORKER_MESSAGES:
        data = codec.encode_link(worker_message)
        assert codec.decode_worker_message(data) == worker_message


def test_the_header_is_fixed() -> None:
    """Magic, version, kind, body length, little-endian: other languages can read it."""
    data = codec.encode_frame(frame(m.Heartbeat(1)))
    assert data[:4] == b"PD" + bytes([codec.PROTOCOL_MAX, 1])
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8
    assert codec.encode_link(m.Stop(1.0))[3] == 2
    assert codec.encode_link(m.Accepted(KEY))[3] == 3


def seal(value: object, kind: int = 1) -> bytes:
    """A frame around any body, also one that our own encoder would never make."""
    body = msgspec.msgpack.encode(value)
    return b"PD" + bytes([1, kind]) + struct.pack("<I", len(body)) + body


def envelope(*messages: object, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "instance": "h:1",
        "rank": 0,
        "incarnation": PREFILL,
        "reply_to": "tcp://h:1",
        "to_incarnation": DECODE,
        "messages": list(messages),
    }
    return seal(list((fields | changes).values()))


GOOD = codec.encode_frame(frame(m.Claim(KEY, LEASE, NONCE)))
CLAIM = ["claim", list(KEY), list(LEASE), list(NONCE)]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 bytes is shorter than its 8-byte header"),
        (GOOD[:7], "7 bytes is shorter than its 8-byte header"),
        (GOOD[:-1], "announces"),
        (GOOD + b"x", "announces"),
        (b"GET / HTTP/1.1\r\n", "starts with b'GE', not b'PD': not a pdcore peer"),
        (b"PD\x09" + GOOD[3:], "protocol version 9; this build speaks 1..1"),
        (b"PD\x00" + GOOD[3:], "protocol version 0"),
        (b"PD\x01\x02" + GOOD[4:], "leader message where rank frame belongs"),
        (b"PD\x01\x63" + GOOD[4:], "frame of kind 99 where rank frame belongs"),
        (seal({"a": 1}), "Expected `array`, got `object`"),
        (envelope(["nonsense", 1]), "Invalid value 'nonsense'"),
        (envelope([*CLAIM, 1]), "array"),
        (envelope(CLAIM[:-1]), "array"),
        (envelope(["claim", [0, 1], list(LEASE), list(NONCE)]), "between 1 and"),
        (envelope(["claim", [1, MAX_ID + 1], list(LEASE), list(NONCE)]), "between 1 and"),
        (envelope(["claim", [1, -1], list(LEASE), list(NONCE)]), "got 1, -1"),
        (envelope(["claim", [1, True], list(LEASE), list(NONCE)]), "Expected `int`, got `bool`"),
        (
            envelope(["claim", list(KEY), [b"short", 0], list(NONCE)]),
            "lease incarnation must be 16",
        ),
        (envelope(["claim", list(KEY), list(LEASE), [PREFILL, -1]]), "nonce counter must be"),
        (envelope(["status", list(KEY), list(LEASE), 9]), "Invalid enum value 9"),
        (envelope(["status", list(KEY), list(LEASE), 4]), "exactly DONE carries it"),
        (envelope(["status", list(KEY), list(LEASE), 0, None, None, b"x"]), "exactly DONE"),
        (
            envelope(["status", list(KEY), list(LEASE), 3, None, ["x", "y", 200]]),
            "HTTP status of 400..599",
        ),
        (envelope(["heartbeat", -1]), ">= 0"),
        (envelope(incarnation=b"x"), "incarnation must be 16 bytes, got 1"),
        (envelope(to_incarnation=b"x"), "to_incarnation must be 16 bytes, got 1"),
        (envelope(instance=""), "length >= 1"),
        (envelope(rank=-1), ">= 0"),
        (envelope(reply_to="x" * 301), "length <= 300"),
    ],
)
def test_malformed_frames_say_what_is_wrong(data: bytes, text: str) -> None:
    with pytest.raises(CodecError, match=None) as caught:
        codec.decode_frame(data)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_cached_tokens": 34}, "num_cached_tokens 34 > num_tokens 33"),
        ({"num_tokens": -1}, ">= 0"),
        ({"num_required": 0}, ">= 1"),
        ({"remaining_s": math.nan}, ">= -1"),
        ({"expires_at_s": math.inf}, "<= 1"),
        ({"blocks": {"full": b"123"}}, "multiple of 4 bytes, got 3"),
        ({"blocks": {"full": struct.pack("<i", -7)}}, "must be >= 0, got -7"),
    ],
)
def test_a_handshake_is_checked_field_by_field(changes: dict[str, object], text: str) -> None:
    """D19, D58: lengths and bounds are checked at the edge, before a core sees them."""
    bad = msgspec.structs.replace(HANDSHAKE, **changes)
    with pytest.raises(CodecError) as caught:
        codec.decode_frame(codec.encode_frame(frame(bad)))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (msgspec.structs.replace(LEADER_MESSAGES[0], prompt=b"123"), "multiple of 4"),
        (msgspec.structs.replace(LEADER_MESSAGES[0], replaces=0), ">= 1"),
        (msgspec.structs.replace(LEADER_MESSAGES[0], prefill_dp_rank=-1), ">= 0"),
        (m.Stop(math.nan), ">= -1"),
    ],
)
def test_malformed_leader_messages(message: m.LeaderMessage, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        codec.decode_leader_message(codec.encode_link(message))


@pytest.mark.parametrize(
    "message",
    [
        m.Tokens([KEY], [[-1]]),
        m.Tokens([KEY], [[1]], [[math.inf]]),
        m.Tokens([RoomKey(0, 1)], [[1]]),
        m.Tokens([KEY], [[1], [2]]),
        m.Tokens([KEY], [[1]], []),
        m.Finished(KEY, "stop", None, 1, 1, {"queue": math.nan}),
        m.WorkerHealth(0, [], {"x": math.inf}),
        m.WorkerReady(0, 0, Incarnation(b""), "tcp://h:5", 1, 1, 1, 1, "shm"),
    ],
)
def test_malformed_worker_messages(message: m.WorkerMessage) -> None:
    with pytest.raises(CodecError):
        codec.decode_worker_message(codec.encode_link(message))


def test_the_two_directions_of_the_link_do_not_mix() -> None:
    with pytest.raises(CodecError, match="worker message where leader message belongs"):
        codec.decode_leader_message(codec.encode_link(m.Accepted(KEY)))
    with pytest.raises(CodecError, match="leader message where worker message belongs"):
        codec.decode_worker_message(codec.encode_link(m.Stop(1.0)))


def test_size_limits_hold_before_anything_is_decoded() -> None:
    data = codec.encode_frame(frame(HANDSHAKE))
    with pytest.raises(CodecError, match=f"of {len(data)} bytes exceeds the limit of 100"):
        codec.decode_frame(data, max_bytes=100)
    with pytest.raises(CodecError, match="exceeds the limit of 100"):
        codec.encode_frame(frame(HANDSHAKE), max_bytes=100)
    with pytest.raises(CodecError, match="exceeds the limit of 10"):
        codec.encode_link(m.Accepted(KEY), max_bytes=10)
    # A list that announces four billion elements must not be allocated either.
    bomb = msgspec.msgpack.encode(["h:1", 0, PREFILL, "tcp://h:1", DECODE])
    bomb = b"\x96" + bomb[1:] + b"\xdd\xff\xff\xff\xff"
    with pytest.raises(CodecError, match="length <= 1024"):
        codec.decode_frame(b"PD\x01\x01" + struct.pack("<I", len(bomb)) + bomb)


def test_deep_nesting_is_refused() -> None:
    body = b"\x91" * 100_000
    with pytest.raises(CodecError):
        codec.decode_frame(b"PD\x01\x01" + struct.pack("<I", len(body)) + body)


def test_encode_frames_splits_in_order() -> None:
    """Messages of one tick go out in as many frames as the limit makes necessary."""
    messages = [m.Heartbeat(i) for i in range(100)]
    whole = codec.encode_frame(frame(*messages))
    assert codec.encode_frames(frame(*messages)) == [whole]
    parts = codec.encode_frames(frame(*messages), max_bytes=len(whole) // 3)
    assert len(parts) > 3
    decoded = [message for part in parts for message in codec.decode_frame(part).messages]
    assert decoded == messages
    with pytest.raises(CodecError, match="exceeds"):
        codec.encode_frames(frame(HANDSHAKE), max_bytes=100)


def test_integers_that_msgpack_cannot_hold_are_our_fault_and_said_so() -> None:
    with pytest.raises(CodecError, match="cannot encode rank frame"):
        codec.encode_frame(frame(m.Heartbeat(2**64)))


EXPLODED: list[int] = []


def explode(value: int) -> int:
    EXPLODED.append(value)
    return value


class Trap:
    """What unpickling a peer's bytes may do: run anything."""

    def __reduce__(self) -> tuple[Callable[[int], int], tuple[int]]:
        return explode, (1,)


def check_runs_nothing(decode: Callable[[bytes], object], payload: bytes) -> None:
    EXPLODED.clear()
    with contextlib.suppress(CodecError):
        decode(payload)
    assert not EXPLODED, "decoding ran code of the sender"


def test_d40_a_pickle_is_refused_and_never_run() -> None:
    """D40: pickle on a socket is remote code execution."""
    pickle = importlib.import_module("pickle")
    payload = pickle.dumps(Trap())
    for decode in (codec.decode_frame, codec.decode_leader_message, codec.decode_worker_message):
        check_runs_nothing(decode, payload)
        with pytest.raises(CodecError, match="not a pdcore peer"):
            decode(payload)
        with pytest.raises(CodecError):
            decode(GOOD[:4] + struct.pack("<I", len(payload)) + payload)
    with pytest.raises(AssertionError, match="ran code"):
        check_runs_nothing(pickle.loads, payload)


# --- versions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 9), (4, 4), 4)],
)
def test_negotiate_takes_the_highest_common_version(
    mine: tuple[int, int], theirs: tuple[int, int], version: int
) -> None:
    assert codec.negotiate(mine, theirs) == version


def test_negotiate_names_both_ranges() -> None:
    with pytest.raises(IncompatibleError, match=r"speaks 3\.\.4, the peer 1\.\.2; upgrade"):
        codec.negotiate((3, 4), (1, 2))
    with pytest.raises(IncompatibleError, match=r"the peer's protocol range 2\.\.1 is empty"):
        codec.negotiate((1, 4), (2, 1))


# --- packed ids -------------------------------------------------------------------------


def test_packed_ids_are_little_endian_int32_on_every_host() -> None:
    assert codec.pack_block_ids([1, 258, 2**31 - 1]) == bytes.fromhex("01000000 02010000 ffffff7f")
    assert codec.unpack_block_ids(bytes.fromhex("01000000 02010000")) == [1, 258]
    assert codec.pack_token_ids([]) == b""
    assert codec.unpack_token_ids(b"") == []
    assert codec.pack_block_ids(np.array([5, 6], dtype=np.int64)) == codec.pack_block_ids([5, 6])


@pytest.mark.parametrize("ids", [[-1], [2**31], [1, -(2**31)], [2**70], [1.5], ["a"], [None]])
def test_ids_that_do_not_fit_are_refused_by_name(ids: list[int]) -> None:
    with pytest.raises(CodecError, match="token ids must be"):
        codec.pack_token_ids(ids)


def test_cut_or_negative_packed_ids_are_refused() -> None:
    with pytest.raises(CodecError, match="multiple of 4 bytes, got 5"):
        codec.unpack_block_ids(b"12345")
    with pytest.raises(CodecError, match="block ids must be >= 0, got -2"):
        codec.unpack_block_ids(struct.pack("<3i", 1, -2, 3))
    with pytest.raises(CodecError, match="must be >= 0"):
        codec.unpack_ids(b"\x00\x00\x00\x80")


# --- endpoints --------------------------------------------------------------------------

ENDPOINT = m.Endpoint(
    "shm", b"blob", "digest", "print", 2, 1, 100, ("k", "v"), (1, 1), (0, 64), (8, 8)
)


def test_endpoints_survive_and_are_checked() -> None:
    assert codec.decode_endpoint(codec.encode_endpoint(ENDPOINT)) == ENDPOINT
    for changes, text in (
        ({"regions": (1,)}, "lists differ in length"),
        ({"entry_names": ("k", "k")}, "names a cache entry twice"),
        ({"tp_rank": 2}, "tp_rank 2 >= tp_size 2"),
        ({"offsets": (0, -64)}, ">= 0"),
    ):
        bad = msgspec.structs.replace(ENDPOINT, **changes)
        with pytest.raises(CodecError, match=text):
            codec.decode_endpoint(codec.encode_endpoint(bad))
    big = msgspec.structs.replace(ENDPOINT, transport_descriptor=b"x" * (1 << 20))
    with pytest.raises(CodecError, match="exceeds"):
        codec.encode_endpoint(big)
    with pytest.raises(CodecError, match="malformed endpoint"):
        codec.decode_endpoint(b"\xc1")


def test_an_endpoint_that_asks_for_no_checksums_has_no_field_for_them() -> None:
    """A peer of before can read it, and what such a peer sends is read as "none"."""
    fields = msgspec.msgpack.decode(codec.encode_endpoint(ENDPOINT))
    asking = msgspec.structs.replace(ENDPOINT, integrity="crc32")
    assert msgspec.msgpack.decode(codec.encode_endpoint(asking)) == [*fields, "crc32"]
    assert len(fields) == len(m.Endpoint.__struct_fields__) - 1
    assert codec.decode_endpoint(codec.encode_endpoint(asking)) == asking


def test_a_frame_has_a_bounded_number_of_messages() -> None:
    """A loop iteration stays short whoever sends: 200,000 heartbeats are refused unread, and
    our own long lists leave in several frames."""
    many = [m.Heartbeat(i) for i in range(m.MAX_FRAME_MESSAGES * 2 + 1)]
    whole = m.Frame("h:1", 0, PREFILL, "tcp://h:1", DECODE, many)
    with pytest.raises(CodecError, match="length <= 1024"):
        codec.decode_frame(codec.encode_frame(whole))
    parts = [codec.decode_frame(data).messages for data in codec.encode_frames(whole)]
    assert all(len(part) <= m.MAX_FRAME_MESSAGES for part in parts)
    assert [message for part in parts for message in part] == many


@pytest.mark.parametrize("field", ["attn_tp_size", "attn_cp_size", "dp_size"])
def test_a_route_with_impossible_sizes_is_refused(field: str) -> None:
    """Decode works through the ranks a route names: a billion of them would be its loop."""
    route = {
        "attn_tp_size": 1,
        "attn_cp_size": 1,
        "dp_size": 1,
        "block_sizes": {"full": 16},
        "kv_cache_dtype": "float32",
        "max_prefill_tokens": 64,
        "ranks": {},
    }
    assert msgspec.convert(route, m.Route)
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({**route, field: 1_000_000_000}, m.Route)
