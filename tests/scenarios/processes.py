"""Processes of pdcore as a person would start them, and what the kernel and their pages say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pdcore.server.client import HttpClient, HttpError, Origin, Timeout

START_S = 60.0


class Program:
    """``pdcore ARGUMENTS`` in a process of its own, in the network namespace ``host`` if one is
    named. What it prints is read by a thread, so that it never waits for us."""

    def __init__(
        self, *arguments: str, env: Mapping[str, str] | None = None, host: str = ""
    ) -> None:
        place = ["ip", "netns", "exec", host] if host else []
        self.process = subprocess.Popen(
            [*place, sys.executable, "-m", "pdcore.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.said: list[str] = []
        self._news = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.said.append(line)
                self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first line that begins so. AssertionError with all it said instead."""

        def found() -> re.Match[str] | None:
            return next((m for line in self.said if (m := re.match(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._has_ended, timeout_s)
            match = found()
        assert match is not None, f"{pattern!r} was not said:\n{''.join(self.said)}"
        return match

    def stop(self) -> int:
        """As Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def close(self) -> None:
        """Whatever state it is in, stopped included. Its children go with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self._reader.join(30)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()


class Cluster(Program):
    """``pdcore up --simulated``, ready."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__("up", "--simulated", "--port", "0", *arguments, env=env)
        ready = self.wait_for(r"ready: http://([\d.]+):(\d+)")
        self.origin = Origin(ready[1], int(ready[2]))

    def pids(self) -> list[int]:
        """This cluster's processes."""
        return family(self.pid)


def children() -> dict[int, list[int]]:
    """pid -> pids of its children that are not over, oldest first."""
    found: dict[int, list[tuple[int, int]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            age = int(fields[19]), int(stat.parent.name)
            found.setdefault(int(fields[1]), []).append(age)
    return {parent: [pid for _, pid in sorted(ages)] for parent, ages in found.items()}


def family(root: int) -> list[int]:
    """A process and all that descend from it."""
    of, found, todo = children(), [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo.extend(of.get(pid, ()))
    return found


def wait_gone(pids: Iterable[int], timeout_s: float = 20.0) -> list[int]:
    """Those of ``pids`` that are still there after ``timeout_s``; waits on pidfds."""
    until, left = time.monotonic() + timeout_s, []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
            left.append(pid)
        os.close(fd)
    return left


def usage(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """pid -> (open descriptors, resident MiB without what is shared)."""
    found = {}
    for pid in pids:
        statm = Path(f"/proc/{pid}/statm").read_text().split()
        resident = (int(statm[1]) - int(statm[2])) * os.sysconf("SC_PAGE_SIZE") >> 20
        found[pid] = (len(os.listdir(f"/proc/{pid}/fd")), resident)
    return found


def segments(pids: Iterable[int]) -> set[int]:
    """Inodes of KV segments that any of these processes has mapped or open."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "pdcore-kv" in line:
                found.add(int(line.split()[4]))
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if "pdcore-kv" in os.readlink(fd):
                    found.add(fd.stat().st_ino)
            except OSError:
                continue  # closed while we looked
    return found


async def fetch(origin: Origin, target: str) -> tuple[int, bytes]:
    """Status and body; (0, why) where nobody answers within seconds."""
    client = HttpClient()
    try:
        response = await client.request("GET", origin, target, timeout=Timeout(2.0, None, 5.0))
        return response.status, await response.read()
    except HttpError as error:
        return 0, str(error).encode()
    finally:
        await client.aclose()


def backends(stats: bytes) -> dict[Origin, str]:
    """Instance -> what the router thinks of it, prefill first."""
    page = json.loads(stats)
    found = {}
    for backend in page["prefill_backends"] + page["decode_backends"]:
        host, _, port = backend["address"].removeprefix("http://").partition(":")
        found[Origin(host, int(port))] = backend["health"]
    return found


async def ledger(instance: Origin) -> dict[str, float]:
    """The counters of an instance's one worker; empty where nobody answers."""
    _, text = await fetch(instance, "/metrics")
    queues = "bootstrap|waiting|inflight|pending|prealloc|transfer|running|draining"
    counters = re.findall(rf'name="(kv_\w+|{queues})"[^}}]*\}} ([\d.e+]+)', text.decode())
    return {name: float(value) for name, value in counters}


def ledgers(origin: Origin) -> list[dict[str, float]]:
    """The counters of every instance behind a router."""

    async def ask() -> list[dict[str, float]]:
        _, stats = await fetch(origin, "/stats")
        return [await ledger(instance) for instance in backends(stats)]

    return asyncio.run(ask())


def until(look: Callable[[], object], watched: int, timeout_s: float, what: str) -> None:
    """Look until it is true, with pauses in which process ``watched`` must not end."""
    end = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        assert wait_gone([watched], 0.1), f"process {watched} ended while waiting: {what}"
