from __future__ import annotations

from pdcore.errors import TransportError
from pdcore.transports.engines import WriteFailed


def test_a_failed_write_promises_the_least_unless_told() -> None:
    """What a vendor does not say is not assumed: the peer is not gone, and the error is one
    that every caller of a transport already handles."""
    error = WriteFailed("status 5")
    assert isinstance(error, TransportError)
    assert (error.is_peer_gone, error.may_land) == (False, False)
    assert WriteFailed("cut", may_land=True).may_land
