"""A shared secret, proved by both ends and never said (D40)."""

from __future__ import annotations

import pytest

from pdcore.errors import TransportError
from pdcore.transports import socket_auth as auth

KEY = b"k" * 16
HELLO, NONCE, SAID = b"hello", b"n" * 32, b"said"


def test_a_proof_is_bound_to_role_words_and_secret() -> None:
    """Neither a replayed proof, nor one sent back, nor one of another secret is one."""
    proof = auth.dialler_proof(KEY, HELLO, NONCE)
    assert auth.is_proof(proof, auth.dialler_proof(KEY, HELLO, NONCE))
    for other in (
        auth.dialler_proof(b"K" * 16, HELLO, NONCE),
        auth.dialler_proof(KEY, HELLO, b"m" * 32),
        auth.dialler_proof(KEY, HELLO + NONCE[:1], NONCE[1:]),
        auth.listener_proof(KEY, HELLO, NONCE, b""),
        auth.NO_PROOF,
    ):
        assert not auth.is_proof(proof, other)
    welcome = auth.listener_proof(KEY, HELLO, NONCE, SAID)
    assert not auth.is_proof(welcome, auth.listener_proof(KEY, HELLO, NONCE, SAID + b"x"))


def test_without_a_secret_there_is_no_proof() -> None:
    assert auth.dialler_proof(None, HELLO, NONCE) == auth.NO_PROOF
    assert auth.listener_proof(None, HELLO, NONCE, SAID) == auth.NO_PROOF


def test_a_short_secret_is_refused_without_being_shown() -> None:
    assert auth.check_secret(None) is None
    assert auth.check_secret(KEY) == KEY
    with pytest.raises(TransportError, match="at least 16") as caught:
        auth.check_secret(b"hunter2")
    assert "hunter2" not in str(caught.value)


def test_nonces_differ() -> None:
    assert len({auth.fresh_nonce() for _ in range(100)}) == 100


def test_the_proof_is_the_standard_hmac() -> None:
    """A known vector, computed with the textbook construction: the wire format is fixed."""
    import hashlib

    key = KEY.ljust(64, b"\0")
    parts = (b"pdcore socket 1 dialler", HELLO, NONCE)
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + message).digest()
    outer = hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).digest()
    assert auth.dialler_proof(KEY, HELLO, NONCE) == outer
