"""Damage to valid bytes that a decoder would have to look at twice.

Half or more of what comes out still has a good header, so that it reaches the payload's
decoder and what lies behind it. Everything is drawn from one ``random.Random``.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: A frame's header: magic, version, kind, body length (little-endian).
HEADER_BYTES = 8
_EDGES = (0x00, 0x01, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xCB, 0xDC, 0xDD, 0xDF, 0xFF)
#: Values that are legal somewhere and rarely where they are put.
ODD_VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.0,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "\x00",
    "\ud7ff\ufffd",
    b"",
    b"\xff" * 16,
    b"\x00" * 4097,
    [],
    {},
    [[]] * 40,
    {"x": {}},
)


def damaged(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One to four changes of bytes; ``other`` is another valid one to take parts from."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice(_EDGES)
            case 2:
                del out[at : at + rng.randint(1, 8)]
            case 3:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
            case 4:
                del out[at:]
            case 5 if other:
                start = rng.randrange(len(other))
                out[at:at] = other[start : start + rng.randint(1, 64)]
            case _:
                start = rng.randrange(len(out) + 1)
                out[at:at] = out[start : start + rng.randint(1, 32)]
    return bytes(out)


def sealed(header: bytes, body: bytes) -> bytes:
    """``body`` under the magic, version and kind of ``header``, with its length made right."""
    return header[:4] + struct.pack("<I", len(body)) + body


def has_good_header(data: bytes) -> bool:
    return (
        len(data) >= HEADER_BYTES
        and data[:2] == b"PD"
        and data[2] == 1
        and struct.unpack_from("<I", data, 4)[0] == len(data) - HEADER_BYTES
    )


def mutated_frame(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Two in five: a value of the body changed; as many: bytes of the body changed, with a
    good header each. One in five: bytes anywhere."""
    choice = rng.randrange(5)
    if choice == 0:
        return damaged(rng, data, other)
    if choice < 3:
        return sealed(data, damaged(rng, data[HEADER_BYTES:], other[HEADER_BYTES:]))
    body = msgspec.msgpack.decode(data[HEADER_BYTES:])
    return sealed(data, _packed(changed_value(rng, body)))


def mutated_json(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The same for a JSON body; there is no header that could be wrong."""
    if rng.randrange(5) < 2:
        return damaged(rng, data, other)
    return _as_json(changed_value(rng, json.loads(data)))


def changed_value(rng: random.Random, value: object) -> object:
    """One to three places of a tree of lists and objects changed."""
    for _ in range(rng.randint(1, 3)):
        value = _changed_once(rng, value)
    return value


def _changed_once(rng: random.Random, value: object) -> object:
    """A walk down to a random place, which is replaced, left out, doubled or exchanged."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        copy = list(value)
        at = rng.randrange(len(copy))
        match rng.randrange(6):
            case 0:
                del copy[at]
            case 1:
                copy.insert(at, copy[rng.randrange(len(copy))])
            case 2:
                copy[at] = copy[rng.randrange(len(copy))]
            case _:
                copy[at] = _changed_once(rng, copy[at])
        return copy
    if isinstance(value, dict) and value and rng.random() < 0.9:
        found = dict(value)
        key = rng.choice(list(found))
        match rng.randrange(6):
            case 0:
                del found[key]
            case 1:
                found[rng.choice(["", "x", "room", "n" * 100])] = found[key]
            case 2:
                found[key] = found[rng.choice(list(found))]
            case _:
                found[key] = _changed_once(rng, found[key])
        return found
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 7, -value, value))
    if isinstance(value, bytes | str) and value and rng.random() < 0.5:
        half = len(value) // 2
        return rng.choice((value[:half], value + value, value[half:] + value[:half]))
    return rng.choice(ODD_VALUES)


def _packed(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError):  # an integer that outgrew 64 bits
        return b"\xcf" + b"\xff" * 8


def _as_json(value: object) -> bytes:
    return json.dumps(value, default=lambda one: one.hex()).encode("utf-8", "surrogatepass")


def pick(rng: random.Random, corpus: Sequence[T]) -> T:
    return corpus[rng.randrange(len(corpus))]


Mutate = Callable[[random.Random, bytes, bytes], bytes]
