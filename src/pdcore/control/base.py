"""The control channel contract: small frames between ranks, never KV.

Delivery is best effort (the cores resend until answered): a frame may be lost, but a
send never blocks and never queues without bound (D24). One thread, the worker loop,
owns the channel and all its sockets.
"""

from __future__ import annotations

from typing import Protocol


class ControlChannel(Protocol):
    @property
    def address(self) -> str:
        """Where peers reach this channel, e.g. ``tcp://127.0.0.1:40123``."""
        ...

    def send(self, to: str, frame: bytes) -> bool:
        """Queue one frame to an address. False when refused (queue full, bad address):
        the caller resends later. Never blocks."""
        ...

    def receive(self, limit: int = 256) -> list[bytes]:
        """Frames that have arrived, oldest first, at most ``limit``; never blocks."""
        ...

    def fileno(self) -> int | None:
        """Readable when frames may have arrived (edge-triggered for ZMQ: drain with
        ``receive`` until it returns fewer than ``limit``), or None."""
        ...

    def forget(self, to: str) -> None:
        """Drop the connection to an address (peer evicted or restarted)."""
        ...

    def close(self) -> None: ...
