"""KV through memfabric's TransferEngine (R76): SDMA and RDMA between Ascend NPUs.

The vendor's engine writes (memfabric_engine, memfabric_vendor); all else a transport promises
is of the side channel and the lanes that every vendor's engine gets (onesided).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final

from pdcore.errors import TransportError
from pdcore.transports.memfabric_engine import REMEDY, MemFabricEngine, MemFabricOptions
from pdcore.transports.memfabric_vendor import report
from pdcore.transports.memfabric_vendor import why_unavailable as vendor_unavailable
from pdcore.transports.onesided import OneSidedTransport, caps_of
from pdcore.transports.onesided_side import CONNECT_TIMEOUT_S, STALL_TIMEOUT_S, SideOptions
from pdcore.transports.registry import TransportPlugin, WorkerPlace
from pdcore.transports.socket_address import TCP, UNIX, free_port
from pdcore.types import Incarnation

NAME: Final = "memfabric"


def why_unavailable() -> str | None:
    """One sentence for ``pdcore doctor``, or None."""
    return vendor_unavailable("from pdcore.transports.memfabric import trial; trial()")


def trial() -> None:
    """Start an engine and end it: what ``why_unavailable`` runs in a process of its own. Does
    not come back, since the library's threads may outlive what they need."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    failed = None
    try:
        options = MemFabricOptions(
            store_url=f"tcp://127.0.0.1:{port}", creates_store=True, start_timeout_s=5.0
        )
        MemFabricEngine(options).close()
    except TransportError as error:
        failed = error
    report(failed)
    os._exit(0)


def create(
    incarnation: Incarnation,
    *,
    device_id: int = 0,
    data_op_type: str = "SDMA",
    store_url: str = "",
    creates_store: bool = False,
    nic: str = "",
    start_timeout_s: float = 60.0,
    settle_timeout_s: float = 15.0,
    lands_late_s: float = 30.0,
    families: Sequence[str] = (UNIX, TCP),
    host: str = "127.0.0.1",
    advertise: str | None = None,
    port: int = 0,
    secret: str | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> OneSidedTransport:
    """The first eight are MemFabricOptions', the rest SideOptions'; the engine is reached at
    ``advertise``, or at ``host`` without one. Raises TransportError."""
    try:
        options = MemFabricOptions(
            advertise or host,
            device_id,
            data_op_type,
            store_url,
            creates_store,
            nic,
            start_timeout_s,
            settle_timeout_s,
            lands_late_s,
        )
    except ValueError as error:
        raise TransportError(f"memfabric: {error.args[0]}") from error
    side = SideOptions(families, host, advertise, port, secret, connect_timeout_s, stall_timeout_s)
    return OneSidedTransport(NAME, incarnation, MemFabricEngine(options), side)


PLUGIN = TransportPlugin(
    create=create,
    why_unavailable=why_unavailable,
    options_at=WorkerPlace.options,
    caps=caps_of(MemFabricOptions().limits, cross_host=True),
    remedy=REMEDY,
    cycles=30,
    fixed_address=lambda: {"port": free_port("127.0.0.1")},
)
