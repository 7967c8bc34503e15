"""Messages in words: one line that tells two different packets apart."""

from __future__ import annotations

from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Claim,
    Grant,
    Handshake,
    PeerMessage,
    Refuse,
    Stale,
    Status,
    StatusAck,
)
from pdcore.sim.actors import Packet, unpack
from pdcore.sim.places import life_of
from pdcore.types import Nonce


def describe(packet: Packet) -> str:
    """ "Claim 1.1 lease 1 nonce prefill0.0/1 (prefill0.0 -> decode.0)"."""
    sender = life_of(packet.sender.incarnation)
    return f"{_body(unpack(packet.data))} ({sender} -> {life_of(packet.to_incarnation)})"


def _body(message: PeerMessage) -> str:
    name = type(message).__name__
    match message:
        case Handshake() | Claim() | Status() | StatusAck() | Cancel() | CancelAck():
            head = f"{name} {_key(message.key)} lease {message.lease.counter}"
            if isinstance(message, Handshake) and message.is_dummy:
                head = f"dummy {head}"
        case Grant() | Refuse() | Stale():
            head = f"{name} {_key(message.key)}"
        case _:
            return name
    match message:
        case Claim() | Grant() | Refuse() | CancelAck():
            return f"{head} nonce {_nonce(message.nonce)}"
        case Status():
            return f"{head} {message.kind.name} nonce {_nonce(message.nonce)}"
        case StatusAck():
            return f"{head} {message.kind.name}"
        case Cancel():
            return f"{head} nonces [{', '.join(_nonce(n) for n in message.nonces)}]"
        case Stale():
            return f"{head} {life_of(message.addressed)} is no more"
        case _:
            return head


def _key(key: tuple[int, int]) -> str:
    return f"{key[0]}.{key[1]}"


def _nonce(nonce: Nonce | None) -> str:
    return "none" if nonce is None else f"{life_of(nonce.incarnation)}/{nonce.counter}"
