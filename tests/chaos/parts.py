"""A cluster of which every part can be killed, stopped and started again, and its load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from pdcore.server.client import HttpClient, Origin
from pdcore.transports import socket_address
from tests.chaos.leaks import Holding, belonging_to, grown, holding
from tests.scenarios.processes import (
    Program,
    backends,
    children,
    family,
    fetch,
    ledger,
    segments,
    until,
    wait_gone,
)
from tests.scenarios.soak_client import Outcome, ask

INSTANCES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
WORKERS = tuple(f"{name} worker" for name in INSTANCES)
BLOCKS = "2000"
#: What has to be over by then: restarts, resends, draining of what was cut off (30 s).
SETTLE_S = 60.0
#: A request's own time where silence is only told by time.
REQUEST_S = 4.0
#: And where nothing has to wait for it: longer than any machine is slow.
PATIENT_S = 60.0
LANES = 12

#: A death in mid-request: somebody noticed and said so.
LOST = frozenset(
    {
        "ok",
        "peer_lost",
        "stale_route",
        "worker_lost",
        "unreachable",
        "unavailable",
        "transfer_failed",
    }
)
#: Silence is only ever told by time.
SILENT = LOST | {"deadline_exceeded"}


def expect_only(outcomes: list[Outcome], allowed: frozenset[str]) -> None:
    """Nothing but these kinds, so never a wrong token and never an answer that is late."""
    bad = Counter(one.problem for one in outcomes if one.kind not in allowed)
    assert not bad, bad


def free_port() -> str:
    """One that no outgoing connection takes while its owner is dead."""
    return str(socket_address.free_port("127.0.0.1"))


class Parts:
    """Two prefill and two decode instances and a router, each by ``pdcore serve``; the
    instances with ``tp_size`` tensor parallel ranks each."""

    def __init__(self, folder: Path, transport: str = "auto", tp_size: int = 1) -> None:
        self._folder = folder
        self._transport = transport
        self._tp_size = tp_size
        self._arguments: dict[str, list[str]] = {}
        self.programs: dict[str, Program] = {}
        self.at: dict[str, Origin] = {}
        #: The last test left it as it found it.
        self.is_whole = False
        for name in INSTANCES:
            self._launch(name, self._first_arguments(name))
        for name in INSTANCES:
            self._know(name)
        prefills, decodes = (
            ",".join(self.at[name].netloc for name in INSTANCES if name.startswith(role))
            for role in ("prefill", "decode")
        )
        given = ["--prefill-addrs", prefills, "--decode-addrs", decodes, "--bootstrap-port", "0"]
        self._launch("router", ["--role", "router", "--port", free_port(), *given])
        self._know("router")
        self.expect_up()
        self.free = self._idle_pools()
        # Everything that is made on first use is there: threads, pools, connections.
        asyncio.run(Load(self.router, seed=0).run(_nothing, num_after=60))
        self.before = self.holdings()

    def _first_arguments(self, name: str) -> list[str]:
        role = name.partition("-")[0]
        bootstrap = ["--bootstrap-port", free_port()] if role == "prefill" else []
        settings = ["--num-blocks", BLOCKS, "--set", "server_config.restart_initial_s=1"]
        settings += ["--transport", self._transport, "--devices-per-node", str(self._tp_size)]
        for field in ("world_size", "attn_tp_size"):
            settings += ["--set", f"parallel_config.{field}={self._tp_size}"]
        return ["--role", role, "--simulated", "--port", free_port(), *bootstrap, *settings]

    def _launch(self, name: str, arguments: list[str]) -> None:
        run = self._folder / name
        self._arguments[name] = arguments
        self.programs[name] = Program("serve", *arguments, env={"PDCORE_RUN_DIR": str(run)})

    def _know(self, name: str) -> None:
        """Wait until it is ready. From the first time on it has the same ports."""
        program = self.programs[name]
        line = program.wait_for(
            r"listening on http://([\d.]+):(\d+)(?:, bootstrap server on [\d.]+:(\d+))?"
        )
        program.wait_for("ready")
        self.at[name] = Origin(line[1], int(line[2]))
        for flag, port in (("--port", line[2]), ("--bootstrap-port", line[3])):
            if port is not None:
                self._arguments[name][self._arguments[name].index(flag) + 1] = port

    # --- parts ---------------------------------------------------------------------------

    @property
    def router(self) -> Origin:
        return self.at["router"]

    def pid(self, part: str) -> int:
        """Of "router", of "prefill-0" (the leader), of "prefill-0 worker"."""
        name, _, worker = part.partition(" ")
        leader = self.programs[name].pid
        return children()[leader][0] if worker else leader

    def pids(self) -> list[int]:
        return [pid for program in self.programs.values() for pid in family(program.pid)]

    def restart(self, name: str) -> None:
        """What an outer supervisor would do after a death: the same command again."""
        self.programs[name].close()
        self._launch(name, self._arguments[name])
        self._know(name)

    def close(self) -> list[int]:
        """End everything at once; returns what is left."""
        pids = self.pids()
        for program in self.programs.values():
            program.close()
        return wait_gone(pids)

    # --- what it says --------------------------------------------------------------------

    def health(self, name: str) -> tuple[int, list[str]]:
        """Status of /health, 0 where nobody answers, and the problems it names."""
        status, body = asyncio.run(fetch(self.at[name], "/health"))
        return status, json.loads(body)["problems"] if status else []

    def seen(self, name: str) -> str:
        """What the router thinks of an instance."""
        status, body = asyncio.run(fetch(self.router, "/stats"))
        return backends(body)[self.at[name]] if status == 200 else ""

    def expect_unready(self, name: str, timeout_s: float = SETTLE_S) -> None:
        """Its health says 503 and why."""

        def look() -> bool:
            status, problems = self.health(name)
            return status == 503 and bool(problems)

        until(look, self.pid(name), timeout_s, f"{name} says why it is not ready")

    def expect_seen(self, name: str, health: str, timeout_s: float = SETTLE_S) -> None:
        what = f"the router sees {name} as {health}"
        until(lambda: self.seen(name) == health, self.pid("router"), timeout_s, what)

    def expect_up(self) -> None:
        """Every instance says so itself, and the router has heard it."""
        for name in INSTANCES:
            what = f"{name} is ready again"
            until(lambda name=name: self.health(name) == (200, []), self.pid(name), SETTLE_S, what)
            self.expect_seen(name, "Up")

    def _idle_pools(self) -> dict[str, float]:
        until(
            lambda: all("kv_free" in self.ledger(name) for name in INSTANCES),
            self.pid("router"),
            SETTLE_S,
            "every worker reports its pool",
        )
        return {name: self.ledger(name)["kv_free"] for name in INSTANCES}

    def ledger(self, name: str) -> dict[str, float]:
        return asyncio.run(ledger(self.at[name]))

    def _is_pool_whole(self, name: str) -> bool:
        now = self.ledger(name)
        used = {key: n for key, n in now.items() if key != "kv_free" and n}
        used.pop("kv_total", None)
        return now.get("kv_free") == self.free[name] and not used

    def holdings(self) -> dict[str, Holding]:
        """What each part has open now. Raises OSError, IndexError while a part is away."""
        return {part: holding(self.pid(part)) for part in (*INSTANCES, *WORKERS, "router")}

    def leaks(self) -> list[str]:
        """Everything that is more than it was, or not where it should be, in words."""
        orphans = belonging_to(self._folder) - set(self.pids())
        return [
            *(f"process {pid} belongs to nobody" for pid in sorted(orphans)),
            *(f"{part} maps segment {inode} of a dead worker" for part, inode in self._foreign()),
            *grown(self.before, self.holdings()),
            *(
                f"{name}: blocks are not all free: {self.ledger(name)}"
                for name in INSTANCES
                if not self._is_pool_whole(name)
            ),
        ]

    def left_over(self) -> list[str]:
        """What is still too much when all had time to settle."""
        end_s = time.monotonic() + SETTLE_S
        while (found := self.leaks()) and time.monotonic() < end_s:
            assert wait_gone([self.pid("router")], 0.5), "the router ended"
        return found

    def _foreign(self) -> set[tuple[str, int]]:
        """(part, inode) of segments that a part maps and no living worker owns."""
        owned = {inode for name in INSTANCES for inode in self._own_segments(name)}
        return {
            (name, inode)
            for name in self.programs
            for inode in segments(family(self.programs[name].pid))
            if inode not in owned
        }

    def _own_segments(self, name: str) -> set[int]:
        """Of each worker the one whose descriptor it holds: peers only map it."""
        workers = children()[self.programs[name].pid]
        fds = [fd for worker in workers for fd in Path(f"/proc/{worker}/fd").iterdir()]
        return {fd.stat().st_ino for fd in fds if "pdcore-kv" in os.readlink(fd)}

    def expect_whole(self) -> None:
        """Up; every block of every pool free, none quarantined, held, leased or draining; no
        segment mapped but those of the four workers that live; no process, descriptor or
        thread more than at the start; requests answered."""
        self.expect_up()
        left = self.left_over()
        assert not left, left
        outcomes = asyncio.run(Load(self.router, seed=9).run(_nothing, num_after=30))
        found = Counter(one.problem for one in outcomes)
        assert found == {"ok": len(outcomes)}, found
        self.is_whole = True


async def _nothing(load: Load) -> None:
    """No fault."""


class Load:
    """Lanes that ask one request after the other, streams and blocking ones, until told."""

    def __init__(self, origin: Origin, seed: int, timeout_s: float = PATIENT_S) -> None:
        self.outcomes: list[Outcome] = []
        self._origin = origin
        self._rng = random.Random(seed)
        self._timeout_s = timeout_s
        self._news = asyncio.Condition()
        self._is_over = asyncio.Event()

    async def run(
        self, fault: Callable[[Load], Awaitable[None]], num_after: int = 40
    ) -> list[Outcome]:
        """Begin, then ``fault``, then until ``num_after`` more are answered well."""
        client = HttpClient()
        lanes = [asyncio.create_task(self._lane(client)) for _ in range(LANES)]
        try:
            await self.some_ok(LANES)
            await fault(self)
            await self.some_ok(num_after)
        finally:
            self._is_over.set()
            await asyncio.gather(*lanes)
            await client.aclose()
        return self.outcomes

    async def some_ok(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait for so many more good answers."""
        await self.some(lambda one: one.kind == "ok", count, timeout_s)

    async def some(
        self, wanted: Callable[[Outcome], bool], count: int = 1, timeout_s: float = 60.0
    ) -> None:
        """Wait for so many more outcomes of a kind."""
        start = len(self.outcomes)
        async with self._news:
            await asyncio.wait_for(
                self._news.wait_for(lambda: sum(map(wanted, self.outcomes[start:])) >= count),
                timeout_s,
            )

    async def _lane(self, client: HttpClient) -> None:
        while not self._is_over.is_set():
            outcome = await ask(
                client,
                self._origin,
                self._rng,
                timeout_s=self._timeout_s,
                is_stream=self._rng.random() < 0.5,
            )
            async with self._news:
                self.outcomes.append(outcome)
                self._news.notify_all()
            if outcome.kind != "ok":
                # As Retry-After asks, but at most until the load is over.
                await asyncio.wait([asyncio.ensure_future(self._is_over.wait())], timeout=0.2)
