"""How a connection opens: both ends say who they are, prove it, and are the ones meant.

The dialling end waits for it (``connect`` is bounded); the listening end answers step by
step, whenever a frame came, and tells a caller nothing but a challenge before it has proved
that it knows the secret.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import attrs

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.socket_auth import (
    NO_PROOF,
    dialler_proof,
    fresh_nonce,
    is_proof,
    listener_proof,
)
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_wire import (
    MAC_BYTES,
    MAX_REASON_BYTES,
    Hello,
    Kind,
    Welcome,
    pack,
    pack_challenge,
    pack_hello,
    pack_regions,
    unpack_challenge,
    unpack_hello,
    unpack_welcome,
)
from pdcore.types import Incarnation


class StaleTarget(TransportError):
    """The caller means another process life than this one."""


@attrs.define
class Identity:
    """Who we are to others. ``home``: an encoded Home, replaced once we listen. ``secret``
    None: anybody who reaches us and knows our incarnation is answered."""

    incarnation: Incarnation
    home: bytes
    secret: bytes | None = attrs.field(default=None, repr=False)


@attrs.frozen
class Published:
    """What everybody who is welcomed is told: our target regions, id to bytes, and, of a
    transport that is built upon this one, ``extra``. One value, so that a thread that reads it
    while another replaces it has both of the same moment; ``regions`` is never changed."""

    regions: Mapping[int, int] = attrs.field(factory=dict)
    extra: bytes = attrs.field(default=b"", repr=False)


class Greeting:
    """The listening end of one opening."""

    def __init__(self, me: Identity) -> None:
        #: What the caller said; none before its HELLO.
        self.hello: Hello | None = None
        self._me = me
        self._said = b""
        self._nonce = b""

    def challenge(self, body: bytes) -> bytes:
        """A HELLO came: the answer. Raises StaleTarget, TransportError."""
        hello = unpack_hello(body)
        if hello.target != self._me.incarnation:
            raise StaleTarget("stale descriptor: this is another process life")
        self.hello, self._said, self._nonce = hello, body, fresh_nonce()
        has_secret = self._me.secret is not None
        return pack(Kind.CHALLENGE, pack_challenge(self._nonce, has_secret=has_secret))

    def welcome(self, proof: bytes, published: Published) -> bytes:
        """A PROOF came: the answer. Raises TransportError for a wrong one."""
        secret = self._me.secret
        expected = dialler_proof(secret, self._said, self._nonce)
        if len(proof) != MAC_BYTES or not is_proof(proof, expected):
            raise TransportError(
                "authentication failed: both ends need the same secret"
                if secret is not None
                else "authentication failed: this end was given no secret"
            )
        said = pack_regions(dict(published.regions)) + published.extra
        return pack(Kind.WELCOME, listener_proof(secret, self._said, self._nonce, said) + said)


def pack_refusal(why: TransportError) -> bytes:
    if isinstance(why, StaleTarget):
        return pack(Kind.STALE)
    return pack(Kind.REFUSED, str(why).encode()[:MAX_REASON_BYTES])


def greet(
    sock: socket.socket,
    me: Identity,
    target: Incarnation,
    numbers: tuple[int, int],
    deadline: float,
) -> Welcome:
    """The dialling end, on a connected socket, until ``deadline`` (monotonic). ``numbers``:
    this session's, and that of the oldest session to the same life that is not over.

    Raises PeerGone when the peer hangs up or does not answer in time, TransportError when
    it refuses, cannot prove that it knows our secret, or talks nonsense.
    """
    said = pack_hello(Hello(me.incarnation, target, *numbers, fresh_nonce(), me.home))
    reader = FrameReader((Kind.CHALLENGE, Kind.REFUSED, Kind.STALE))
    _send(sock, pack(Kind.HELLO, said), deadline)
    has_secret, nonce = unpack_challenge(_answer(sock, reader, deadline))
    if has_secret != (me.secret is not None):
        who = "the peer" if has_secret else "this end"
        raise TransportError(
            f"authentication failed: only {who} was given a secret; both ends need the same one"
        )
    reader.allowed = (Kind.WELCOME, Kind.REFUSED)
    _send(sock, pack(Kind.PROOF, dialler_proof(me.secret, said, nonce)), deadline)
    body = _answer(sock, reader, deadline)
    welcome = unpack_welcome(body)
    expected = listener_proof(me.secret, said, nonce, body[MAC_BYTES:])
    if not is_proof(welcome.mac, expected if me.secret is not None else NO_PROOF):
        raise TransportError("authentication failed: the peer does not know our secret")
    return welcome


def _send(sock: socket.socket, frame: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    try:
        sock.sendall(frame)
    except TimeoutError:
        raise PeerGone("the peer did not answer in time: stopped, or overloaded") from None
    except OSError as error:
        raise PeerGone(f"the peer closed the connection: {error.strerror}") from error


def _answer(sock: socket.socket, reader: FrameReader, deadline: float) -> bytes:
    while True:
        sock.settimeout(_left(deadline))
        try:
            frame = reader.receive(sock)
        except TimeoutError:
            raise PeerGone("the peer did not answer in time: stopped, or overloaded") from None
        except (OSError, EOFError) as error:
            raise PeerGone(f"the peer closed the connection: {error}") from error
        if frame is not None:
            kind, body = frame
            if kind is Kind.STALE:
                raise PeerGone("stale descriptor: another process life is there now")
            if kind is Kind.REFUSED:
                raise TransportError(f"the peer refused: {body.decode(errors='replace')}")
            return body


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
