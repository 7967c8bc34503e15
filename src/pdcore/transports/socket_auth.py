"""Proving that both ends know the same secret, without saying it (D58, D40).

Each end answers the other's fresh nonce with an HMAC-SHA256 over everything that was said
so far, under a label of its own role, so that a proof can be neither replayed, nor sent back
to who made it, nor moved to another pair of incarnations. The dialling end goes first: who
knows nothing gets nothing to guess at from the other one.

What follows the opening is not signed: on a network where somebody may change packets on
their way, run it through an encrypted tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

from pdcore.errors import TransportError
from pdcore.transports.socket_wire import MAC_BYTES, NONCE_BYTES

#: Shorter ones could be guessed from one recorded opening.
MIN_SECRET_BYTES: Final = 16
NO_PROOF: Final = bytes(MAC_BYTES)

_DIALLER: Final = b"pdcore socket 1 dialler"
_LISTENER: Final = b"pdcore socket 1 listener"


def check_secret(secret: bytes | None) -> bytes | None:
    """Raises TransportError for a secret that is too short; never shows it."""
    if secret is not None and len(secret) < MIN_SECRET_BYTES:
        raise TransportError(
            f"the transport's secret has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are "
            "needed: generate one, for example with `openssl rand -hex 32`"
        )
    return secret


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def dialler_proof(secret: bytes | None, hello: bytes, nonce: bytes) -> bytes:
    """``hello``: the body of HELLO (both incarnations and the dialler's nonce are in it);
    ``nonce``: the listener's. Zeros without a secret."""
    return _mac(secret, _DIALLER, hello, nonce)


def listener_proof(secret: bytes | None, hello: bytes, nonce: bytes, said: bytes) -> bytes:
    """``said``: what WELCOME says besides the proof."""
    return _mac(secret, _LISTENER, hello, nonce, said)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compares in a time that tells nothing."""
    return hmac.compare_digest(given, expected)


def _mac(secret: bytes | None, *parts: bytes) -> bytes:
    if secret is None:
        return NO_PROOF
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        # With its length, so that no two sequences of parts read the same.
        mac.update(len(part).to_bytes(8, "little") + part)
    return mac.digest()
