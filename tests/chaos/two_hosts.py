"""Two hosts on one machine: network namespaces with an address each and a cable between them.

Run inside namespaces of its own, where we may do that: ``unshare -rnm python -m
tests.chaos.two_hosts serve``, or ``cut TRANSPORT``. We are on the first host; ``enter`` is the
prefix of a command that runs on the second one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from pdcore.errors import PeerGone
from pdcore.kv.plan import WriteBatch
from pdcore.testing.transport_harness import ProcessPeer, make_lease
from pdcore.testing.transport_watch import Watched, pump, settle
from pdcore.transports.base import HandleStatus, PeerSession
from pdcore.transports.registry import create
from pdcore.types import Incarnation
from tests.scenarios.processes import Program

HERE, THERE = "10.231.7.1", "10.231.7.2"
MIB = 1 << 20
#: Which lists the network interfaces of whoever mounts it, and UCX believes it.
OWN_SYSFS = "mount -t sysfs sysfs /sys"


def ip(*arguments: str, enter: tuple[str, ...] = ()) -> None:
    subprocess.run([*enter, "ip", *arguments], check=True, timeout=30)


@contextlib.contextmanager
def second_host() -> Iterator[tuple[str, ...]]:
    """The way in."""
    holder = subprocess.Popen(
        ["unshare", "-nm", "sh", "-c", f"{OWN_SYSFS}; echo there; exec sleep 600"],
        stdout=subprocess.PIPE,
    )
    subprocess.run(OWN_SYSFS.split(), check=True, timeout=30)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        enter = ("nsenter", "-t", str(holder.pid), "-n", "-m")
        ip("link", "set", "lo", "up")
        ip("link", "set", "lo", "up", enter=enter)
        ip("link", "add", "va", "type", "veth", "peer", "name", "vb", "netns", str(holder.pid))
        ip("addr", "add", f"{HERE}/24", "dev", "va")
        ip("addr", "add", f"{THERE}/24", "dev", "vb", enter=enter)
        ip("link", "set", "va", "up")
        ip("link", "set", "vb", "up", enter=enter)
        yield enter
    finally:
        holder.kill()
        holder.communicate()


@contextlib.contextmanager
def python_there(enter: tuple[str, ...]) -> Iterator[None]:
    """Processes that are started with ``sys.executable`` run on the second host."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "python-there"
        words = " ".join((*enter, sys.executable))
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)
        with mock.patch.object(sys, "executable", str(program)):
            yield


def ask(prompt: list[int]) -> list[int] | None:
    """Tokens, or None while the cluster is not ready."""
    body = json.dumps({"prompt": prompt, "max_tokens": 6, "return_token_ids": True}).encode()
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return None
    return tokens


def serve() -> dict[str, object]:
    """Prefill on the first host, decode on the second; the engine proves every KV block."""
    both = ("--simulated", "--host", "0.0.0.0", "--transport", "socket")
    programs = []
    with second_host() as enter:
        try:
            programs.append(Program("serve", "--role", "prefill", "--ips", HERE, *both))
            with python_there(enter):
                where = ("--ips", THERE, "--prefill-ips", HERE)
                programs.append(Program("serve", "--role", "decode", *where, *both))
            addresses = ("--prefill-addrs", f"{HERE}:8001", "--decode-addrs", f"{THERE}:8100")
            programs.append(Program("serve", "--role", "router", *addresses))
            for program in programs:
                program.wait_for("ready")
            deadline = time.monotonic() + 60
            prompt = list(range(100))
            while (tokens := ask(prompt)) is None:
                assert time.monotonic() < deadline, [program.said for program in programs]
                programs[-1].process.poll()
            return {"tokens": len(tokens), "same": ask(prompt) == tokens}
        finally:
            for program in reversed(programs):
                program.close()


def connect(mine: Watched, descriptor: bytes) -> PeerSession:
    """As soon as the cable carries again."""
    for _ in range(20):
        with contextlib.suppress(PeerGone):
            return mine.transport.connect(descriptor)
    return mine.transport.connect(descriptor)


#: UCX would copy from process to process, past the cable.
OPTIONS: dict[str, dict[str, object]] = {"socket": {}, "nixl": {"ucx_tls": "tcp"}}


def cut(transport: str = "socket") -> dict[str, object]:
    """The cable is pulled in mid-transfer and plugged in again: transfers fail and are not
    quiesced, nobody is called dead; a new session settles the old one, and the KV is right."""
    size = 64 * MIB
    life = Incarnation(os.urandom(16))
    options = OPTIONS[transport]
    with second_host() as enter:
        mine = Watched(create(transport, life, host=HERE, stall_timeout_s=1.0, **options))
        with python_there(enter):
            peer = ProcessPeer(transport, {"host": THERE, **options})
        try:
            remote = peer.allocate(size)
            source = mine.transport.allocate(size)
            source.buffer[:] = np.random.default_rng(1).bytes(size)
            session = mine.transport.connect(peer.descriptor())
            lease = make_lease(peer.incarnation, 1, {remote: [(0, size)]})
            peer.grant(lease)
            whole = np.array([[0, 0, size, 1, 0, 0]], np.int64)
            batch = WriteBatch(source.region_id, remote, whole)
            # Stopped, so that the transfer is sure to be under way when the cable is pulled.
            peer.stop()
            lost = mine.transport.submit(session, [batch], lease)
            settle(mine, quiet_s=0.1)
            ip("link", "set", "va", "down")
            peer.resume()
            record = mine.record
            pump(mine, until=lambda: lost in record.ended, timeout_s=30)
            failed = record.ended[lost] is HandleStatus.FAILED
            unsettled = lost not in record.quiesced
            ip("link", "set", "va", "up")
            again = connect(mine, peer.descriptor())
            handle = mine.transport.submit(again, [batch], lease)
            pump(mine, until=lambda: record.quiesced >= {lost, handle}, timeout_s=30)
            done = record.ended[handle] is HandleStatus.DONE
            peer.fill(remote, 1)
            wanted = peer.checksum(remote)
            last = mine.transport.submit(again, [batch], lease)
            pump(mine, until=lambda: last in record.quiesced, timeout_s=30)
            same = peer.checksum(remote) == wanted
            deaths = len(record.deaths)
            return {
                "failed": failed,
                "unsettled": unsettled,
                "done": done,
                "same": same,
                "deaths": deaths,
            }
        finally:
            peer.process.send_signal(signal.SIGCONT)
            mine.transport.close()
            peer.close()


if __name__ == "__main__":
    print(json.dumps({"serve": serve, "cut": cut}[sys.argv[1]](*sys.argv[2:])))
