"""A transport in a process of its own, driven by JSON lines: the far end of the checks
that kill and stop processes.

One request a line on stdin, one ``{"reply": ...}`` or ``{"error": ...}`` a line on stdout;
what the transport reports in the meantime is written as ``{"event": ...}``. The process
ends when stdin does, so it never outlives whoever started it.
"""

from __future__ import annotations

import json
import os
import select
import sys
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from pdcore.errors import PdcoreError
from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.transports.base import (
    Completion,
    Notification,
    PeerSession,
    Region,
    RemoteLease,
    Transport,
    TransportEvent,
)
from pdcore.transports.registry import create
from pdcore.types import Incarnation, LeaseId

Json = dict[str, object]


def pattern(size_bytes: int, seed: int) -> bytes:
    """The same pseudo-random bytes in every process."""
    return np.random.default_rng(seed).bytes(size_bytes)


def encode_lease(lease: RemoteLease) -> Json:
    return {
        "incarnation": lease.lease.incarnation.hex(),
        "counter": lease.lease.counter,
        "ranges": {str(region): rows.tolist() for region, rows in lease.ranges.items()},
    }


class PeerServer:
    """Carries out the requests; one method per request name."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._regions: dict[int, Region] = {}
        self._session: PeerSession | None = None

    def handle(self, request: Json) -> object:
        """Raises PdcoreError when the transport refuses, KeyError for a bad request."""
        actions: dict[str, Callable[[Json], object]] = {
            "allocate": self._allocate,
            "fill": self._fill,
            "checksum": self._checksum,
            "connect": self._connect,
            "submit": self._submit,
            "grant": self._grant,
            "fork": self._fork,
            "descriptor": lambda _: self.transport.descriptor().hex(),
            "incarnation": lambda _: self.transport.incarnation.hex(),
            "close": lambda _: self.transport.close(),
        }
        return actions[str(request["do"])](request)

    def _allocate(self, request: Json) -> int:
        region = self.transport.allocate(_int(request["size"]))
        self._regions[region.region_id] = region
        return region.region_id

    def _fill(self, request: Json) -> None:
        region = self._regions[_int(request["region"])]
        region.buffer[:] = pattern(region.size_bytes, _int(request["seed"]))

    def _checksum(self, request: Json) -> int:
        return zlib.crc32(self._regions[_int(request["region"])].buffer)

    def _connect(self, request: Json) -> str:
        self._session = self.transport.connect(bytes.fromhex(str(request["descriptor"])))
        return self._session.incarnation.hex()

    def _submit(self, request: Json) -> int:
        assert self._session is not None, "connect first"
        batch = WriteBatch(
            _int(request["local"]), _int(request["remote"]), _rows(request["pieces"], 6)
        )
        notify = request.get("notify")
        return self.transport.submit(
            self._session,
            [batch],
            decode_lease(request["lease"]),
            None if notify is None else bytes.fromhex(str(notify)),
        )

    def _fork(self, request: Json) -> int:
        """Leave a child behind, as a careless library might; it ends when somebody opens
        the named pipe ``until`` for writing and closes it."""
        child = os.fork()
        if child == 0:
            os.close(0)
            os.close(1)
            with open(str(request["until"]), "rb") as pipe:
                pipe.read()
            os._exit(0)
        return child

    def _grant(self, request: Json) -> None:
        self.transport.grant(decode_lease(request["lease"]))


def decode_lease(data: object) -> RemoteLease:
    assert isinstance(data, dict)
    lease = LeaseId(Incarnation(bytes.fromhex(data["incarnation"])), data["counter"])
    return RemoteLease(lease, {int(r): _rows(rows, 2) for r, rows in data["ranges"].items()})


def _rows(data: object, columns: int) -> Int64Array:
    return np.array(data, np.int64).reshape(-1, columns)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def encode_event(event: TransportEvent) -> Json:
    if isinstance(event, Completion):
        return {
            "kind": "completion",
            "handle": event.handle,
            "status": event.status.value,
            "quiesced": event.quiesced,
        }
    if isinstance(event, Notification):
        return {"kind": "notification", "payload": event.payload.hex()}
    return {"kind": "died", "incarnation": event.incarnation.hex(), "fenced": event.fenced}


def main(argv: Sequence[str] | None = None) -> None:
    """``NAME OPTIONS_JSON``: serve until stdin ends."""
    name, options = sys.argv[1:] if argv is None else argv
    transport = create(name, Incarnation(os.urandom(16)), **json.loads(options))
    server = PeerServer(transport)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    bell = transport.fileno()
    if bell is not None:
        poller.register(bell, select.POLLIN)
    buffered = b""
    while True:
        poller.poll(None if bell is not None else 1)
        for event in transport.poll():
            _write({"event": encode_event(event)})
        if not _stdin_ready():
            continue
        received = os.read(0, 1 << 20)
        if not received:
            break
        *lines, buffered = (buffered + received).split(b"\n")
        for line in lines:
            _write(_answer(server, line))
    transport.close()


def _stdin_ready() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def _answer(server: PeerServer, line: bytes) -> Json:
    try:
        return {"reply": server.handle(json.loads(line))}
    except PdcoreError as error:
        return {"error": str(error), "kind": type(error).__name__}


def _write(message: Json) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
