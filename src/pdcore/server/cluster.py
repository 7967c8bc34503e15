"""A whole cluster on one machine: prefill and decode leaders and a router, each a process.

For ``pdcore up``, ``pdcore demo`` and tests. Leaders take free ports and report them; the
router starts when all are known. Members die with this process, however it ends
(:mod:`pdcore.server.process`). One event loop, and it must run in the thread that starts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import msgspec

from pdcore.config import InstanceConfig, RouterConfig
from pdcore.errors import ConfigError, PdcoreError
from pdcore.server.leader_main import LeaderSpec, RouterSpec, Spec
from pdcore.server.process import (
    EXIT_USAGE,
    Bound,
    Child,
    Health,
    Progress,
    Ready,
    Report,
    describe_exit,
    spawn,
)

LEADER_MODULE: Final = "pdcore.server.leader_main"
#: Beyond the time a member itself takes to drain and to end what does not.
STOP_MARGIN_S: Final = 5.0


class ClusterFailed(PdcoreError):
    """A member could not start or ended by itself; the message says which, why, and where
    its log is."""


@attrs.frozen
class ClusterConfig:
    """``instance`` is the configuration of every member; role and ports are set here.
    Raises ConfigError for counts below 1."""

    instance: InstanceConfig = attrs.field(factory=InstanceConfig)
    host: str = "127.0.0.1"
    port: int = 0
    num_prefill: int = 1
    num_decode: int = 1

    def __attrs_post_init__(self) -> None:
        for name in ("num_prefill", "num_decode"):
            count = attrs.asdict(self, recurse=False)[name]
            if not 1 <= count <= 64:
                raise ConfigError(f"{name.replace('num_', '--')}: must be 1 to 64, got {count}")


class Member:
    """One process of the cluster, as far as its parent knows."""

    def __init__(self, name: str, role: str, child: Child) -> None:
        self.name = name
        self.role = role
        self.child = child
        self.bound: Bound | None = None
        self.is_ready = False
        self.problems: list[str] = []
        self.progress = "starting"

    @property
    def has_ended(self) -> bool:
        return self.child.exited is not None and self.child.exited.done()

    @property
    def status(self) -> str:
        """One short line for a person."""
        if self.child.exited is not None and self.child.exited.done():
            return f"ended: {self.child.failure or describe_exit(self.child.exited.result())}"
        if self.problems and self.is_ready:
            return f"not ready any more: {'; '.join(self.problems)}"
        return "ready" if self.is_ready else self.progress

    def __repr__(self) -> str:
        return f"Member({self.name}, {self.status})"


class Cluster:
    """``on_change`` is called after every report of a member. ``start`` once, ``stop`` once."""

    def __init__(
        self,
        config: ClusterConfig,
        cache_dir: Path,
        run_dir: Path,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.members: list[Member] = []
        self._cache_dir = cache_dir
        self._run_dir = run_dir
        self._on_change = on_change or (lambda: None)
        self._news = asyncio.Event()
        self._is_stopping = False

    @property
    def url(self) -> str:
        """Of the router. Raises RuntimeError before it is known."""
        for member in self.members:
            if member.role == "router" and member.bound is not None:
                return f"http://{member.bound.http}"
        raise RuntimeError("the cluster was not started")

    async def start(self) -> None:
        """Return when every member is ready. Raises ConfigError for a mistake in the
        configuration, ClusterFailed for anything else that keeps one from starting; call
        ``stop`` in both cases."""
        config = self.config
        self._run_dir.mkdir(parents=True, exist_ok=True)
        for role, count in (("prefill", config.num_prefill), ("decode", config.num_decode)):
            for index in range(count):
                self._start_leader(role, index)
        await self._until(lambda: all(member.bound is not None for member in self.members))
        prefills = [m.bound for m in self.members if m.role == "prefill" and m.bound]
        decodes = [m.bound for m in self.members if m.role == "decode" and m.bound]
        router = RouterConfig(
            host=config.host,
            port=config.port,
            prefill_addrs=tuple(bound.http for bound in prefills),
            decode_addrs=tuple(bound.http for bound in decodes),
            bootstrap_ports=tuple(int(b.bootstrap.rpartition(":")[2]) for b in prefills),
            request_timeout_s=config.instance.server.request_timeout_s,
            drain_s=config.instance.server.drain_s,
            log_level=config.instance.server.log_level,
        )
        self._add("router", "router", RouterSpec(router))
        await self._until(lambda: all(member.is_ready for member in self.members))

    async def failed(self) -> str:
        """Wait until a member ends by itself; says which and why."""
        await self._until_true(lambda: self._ended() is not None)
        return self._ended() or ""

    async def stop(self) -> None:
        """Drain: the router finishes what clients wait for, then the instances; each is
        ended when that takes too long. Idempotent."""
        self._is_stopping = True
        server = self.config.instance.server
        timeout_s = server.drain_s + server.stop_timeout_s + STOP_MARGIN_S
        for chosen in (True, False):
            members = [m for m in self.members if (m.role == "router") is chosen]
            await asyncio.gather(*(m.child.stop(timeout_s) for m in members))

    def kill(self) -> None:
        """End every member now; their workers go with them."""
        self._is_stopping = True
        for member in self.members:
            member.child.kill()

    def _start_leader(self, role: str, index: int) -> None:
        base = self.config.instance
        disagg = attrs.evolve(
            base.disagg, role=role, http_port=0, bootstrap_port=0, link_port=0, node_index=0
        )
        name = f"{role}-{index}"
        folder = self._run_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        spec = LeaderSpec(attrs.evolve(base, disagg=disagg), str(self._cache_dir), str(folder))
        self._add(name, role, spec)

    def _add(self, name: str, role: str, spec: Spec) -> None:
        log = self._run_dir / f"{name}.log"
        child = spawn(name, LEADER_MODULE, msgspec.json.encode(spec), log=log)
        member = Member(name, role, child)
        self.members.append(member)
        child.watch(lambda report: self._on_report(member, report)).add_done_callback(
            lambda _: self._changed()
        )
        self._changed()

    def _on_report(self, member: Member, report: Report) -> None:
        match report:
            case Bound():
                member.bound = report
            case Progress():
                member.progress = report.text
            case Ready():
                member.is_ready = True
            case Health():
                member.problems = report.problems
        self._changed()

    def _changed(self) -> None:
        self._news.set()
        self._on_change()

    def _ended(self) -> str | None:
        for member in self.members:
            exited = member.child.exited
            if exited is not None and exited.done() and not self._is_stopping:
                return f"{member.name} {member.status} (log: {member.child.log})"
        return None

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._until_true(lambda: condition() or self._ended() is not None)
        for member in self.members:
            exited = member.child.exited
            if exited is not None and exited.done():
                if exited.result() == EXIT_USAGE and member.child.failure:
                    raise ConfigError(f"{member.name}: {member.child.failure}")
                raise ClusterFailed(self._ended() or member.status)

    async def _until_true(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()
