from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.socket_greeting import Greeting, Identity, Published, greet, pack_refusal
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_wire import (
    HEAD,
    MAC_BYTES,
    Hello,
    Kind,
    Welcome,
    pack,
    pack_challenge,
    pack_hello,
    pack_regions,
)
from pdcore.types import Incarnation

US, THEM = Incarnation(b"u" * 16), Incarnation(b"t" * 16)
KEY, OTHER_KEY = b"k" * 16, b"o" * 16
REGIONS = {1: 4096, 5: 64}
PUBLISHED = Published(REGIONS)


def answer(sock: socket.socket, me: Identity, published: Published = PUBLISHED) -> None:
    """The listening end, as the transport's thread does it."""
    greeting, reader = Greeting(me), FrameReader((Kind.HELLO, Kind.PROOF))
    try:
        while True:
            frame = reader.receive(sock)
            if frame is None:
                continue
            kind, body = frame
            if kind is Kind.HELLO:
                sock.sendall(greeting.challenge(body))
            else:
                sock.sendall(greeting.welcome(body, published))
    except TransportError as error:
        sock.sendall(pack_refusal(error))
    except (EOFError, OSError):
        pass


def meet(mine: bytes | None, theirs: bytes | None, *, target: Incarnation = THEM) -> Welcome:
    return talk(lambda sock: answer(sock, Identity(THEM, b"them", theirs)), mine, target=target)


def talk(
    other: Callable[[socket.socket], None],
    mine: bytes | None = None,
    *,
    target: Incarnation = THEM,
    timeout_s: float = 5,
) -> Welcome:
    one, two = socket.socketpair()
    thread = threading.Thread(target=other, args=(two,))
    thread.start()
    try:
        deadline = time.monotonic() + timeout_s
        return greet(one, Identity(US, b"us", mine), target, (7, 3), deadline)
    finally:
        one.close()
        thread.join()
        two.close()


@pytest.mark.parametrize("key", [None, KEY])
def test_the_welcome_brings_what_the_receiver_tells_besides(key: bytes | None) -> None:
    """Of a transport that is built upon this one; covered by the proof as the regions are."""
    more = Published(REGIONS, b"more")
    found = talk(lambda sock: answer(sock, Identity(THEM, b"them", key), more), key)
    assert (found.regions, found.extra) == (REGIONS, b"more")


@pytest.mark.parametrize("key", [None, KEY])
def test_both_ends_meet(key: bytes | None) -> None:
    found = meet(key, key)
    assert found.regions == REGIONS


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (KEY, None, "only this end was given a secret"),
        (None, KEY, "only the peer was given a secret"),
        (KEY, OTHER_KEY, "both ends need the same secret"),
    ],
)
def test_secrets_must_agree(mine: bytes | None, theirs: bytes | None, why: str) -> None:
    with pytest.raises(TransportError, match=why) as caught:
        meet(mine, theirs)
    assert not isinstance(caught.value, PeerGone)


def test_another_life_is_refused_before_anything_else() -> None:
    """G6: the descriptor of a process that is gone."""
    with pytest.raises(PeerGone, match="another process life is there"):
        meet(KEY, KEY, target=Incarnation(b"g" * 16))


def test_a_proof_that_was_recorded_opens_nothing() -> None:
    """The listener's nonce is fresh: what proved the secret once proves nothing again."""
    me = Identity(THEM, b"them", KEY)
    said = pack_hello(Hello(US, THEM, 1, 1, b"n" * 32))
    first = Greeting(me)
    first.challenge(said)
    from pdcore.transports.socket_auth import dialler_proof

    proof = dialler_proof(KEY, said, first._nonce)
    assert first.welcome(proof, PUBLISHED)
    again = Greeting(me)
    again.challenge(said)
    with pytest.raises(TransportError, match="authentication failed"):
        again.welcome(proof, PUBLISHED)
    for wrong in (b"", proof[:-1], proof + b"x", bytes(MAC_BYTES)):
        with pytest.raises(TransportError, match="authentication failed"):
            first.welcome(wrong, PUBLISHED)


def test_a_caller_learns_nothing_before_its_proof() -> None:
    """The challenge has no regions, no process, and no proof to guess a secret from."""
    greeting = Greeting(Identity(THEM, b"process", KEY))
    challenge = greeting.challenge(pack_hello(Hello(US, THEM, 1, 1, b"n" * 32)))
    assert len(challenge) == HEAD.size + 33
    assert b"process" not in challenge


def impostor(sock: socket.socket) -> None:
    """Asks for a proof, and cannot give one."""
    reader = FrameReader((Kind.HELLO, Kind.PROOF))
    while reader.receive(sock) is None:
        pass
    sock.sendall(pack(Kind.CHALLENGE, pack_challenge(b"n" * 32, has_secret=True)))
    while reader.receive(sock) is None:
        pass
    sock.sendall(pack(Kind.WELCOME, b"m" * MAC_BYTES + pack_regions(REGIONS)))


def test_who_listens_must_prove_it_too() -> None:
    with pytest.raises(TransportError, match="the peer does not know our secret"):
        talk(impostor, KEY)


def test_without_a_secret_the_end_of_a_proof_is_no_proof() -> None:
    with pytest.raises(TransportError, match="authentication failed"):
        Greeting(Identity(THEM, b"", None)).welcome(b"x" * MAC_BYTES, PUBLISHED)


def test_who_hangs_up_says_nothing_or_talks_nonsense() -> None:
    with pytest.raises(PeerGone, match="closed the connection"):
        talk(lambda sock: sock.shutdown(socket.SHUT_RDWR))
    with pytest.raises(PeerGone, match="did not answer in time"):
        talk(lambda sock: None, timeout_s=0.05)
    with pytest.raises(TransportError, match="another protocol"):
        talk(lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request"))
    with pytest.raises(TransportError, match="the peer refused: nobody is at home"):
        talk(lambda sock: sock.sendall(pack_refusal(TransportError("nobody is at home"))))
    with pytest.raises(TransportError, match="unexpected WELCOME"):
        talk(lambda sock: sock.sendall(pack(Kind.WELCOME, bytes(40))))


def test_the_secret_is_in_no_repr() -> None:
    assert "kkkk" not in repr(Identity(US, b"", KEY))
