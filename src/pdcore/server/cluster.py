"""A whole cluster on one machine: prefill and decode leaders and a router, each a process.

For ``pdcore up``, ``pdcore demo`` and tests. Leaders take free ports and report them; the
router starts when all are known. Members die with this process, however it ends
(:mod:`pdcore.server.process`). One event loop, and it must run in the thread that starts it.

Once the cluster has been ready, a member that dies does not end the others: it is started
again at its former addresses, after a pause that doubles, like a worker
(:mod:`pdcore.server.launch`). It ends the cluster when it says that its configuration is
wrong, or after ``max_restarts`` starts in a row that never served (D45).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import msgspec

from pdcore.config import InstanceConfig, RouterConfig
from pdcore.errors import ConfigError, PdcoreError
from pdcore.server.launch import restart_pause_s
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

_log: Final = logging.getLogger(__name__)
LEADER_MODULE: Final = "pdcore.server.leader_main"
#: Beyond the time a member itself takes to drain and to end what does not.
STOP_MARGIN_S: Final = 5.0


class ClusterFailed(PdcoreError):
    """A member could not start or ended by itself; the message says which, why, and where
    its log is."""


@attrs.frozen
class ClusterConfig:
    """``instance`` is the configuration of every member; role and ports are set here.
    Raises ConfigError for counts and a port out of range."""

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
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port: must be 0 to 65535, got {self.port}")


class Member:
    """One place in the cluster and the process that fills it, as far as the parent knows."""

    def __init__(self, name: str, role: str, child: Child) -> None:
        self.name = name
        self.role = role
        self.child = child
        self.bound: Bound | None = None
        #: It said that it serves; of a router that is not all there is to being ready.
        self.has_started = False
        self.is_ready = False
        self.problems: list[str] = []
        self.progress = "starting"
        #: Starts in a row that never served.
        self.failures = 0
        #: It has ended and is not started again.
        self.is_over = False

    @property
    def has_ended(self) -> bool:
        return self.child.exited is not None and self.child.exited.done()

    @property
    def end(self) -> str:
        """How its process ended."""
        exited = self.child.exited
        status = exited.result() if exited is not None and exited.done() else 0
        return self.child.failure or describe_exit(status)

    @property
    def status(self) -> str:
        """One short line for a person."""
        if self.has_ended:
            return f"ended: {self.end}" + ("" if self.is_over else "; it is started again")
        if self.problems and self.is_ready:
            return f"not ready any more: {'; '.join(self.problems)}"
        return "ready" if self.is_ready else self.progress

    def replace(self, child: Child) -> None:
        """Another process takes the place; whoever knows its addresses still does."""
        self.child = child
        self.has_started = False
        self.is_ready = False
        self.problems = []
        self.progress = "starting again"

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
        #: Deaths before everything was ready once are not survived: a person is watching.
        self._has_started = False
        self._restarts: set[asyncio.Task[None]] = set()

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
        self._has_started = True

    async def failed(self) -> str:
        """Wait until a member ends by itself and is not started again; says which and why."""
        await self._until_true(lambda: self._ended() is not None)
        return self._ended() or ""

    async def stop(self) -> None:
        """Drain: the router finishes what clients wait for, then the instances; each is
        ended when that takes too long. Idempotent."""
        self._is_stopping = True
        self._cancel_restarts()
        server = self.config.instance.server
        timeout_s = server.drain_s + server.stop_timeout_s + STOP_MARGIN_S
        for chosen in (True, False):
            members = [m for m in self.members if (m.role == "router") is chosen]
            await asyncio.gather(*(m.child.stop(timeout_s) for m in members))

    def kill(self) -> None:
        """End every member now; their workers go with them."""
        self._is_stopping = True
        self._cancel_restarts()
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
        member = Member(name, role, self._spawn(name, spec))
        self.members.append(member)
        self._watch(member, spec)

    def _spawn(self, name: str, spec: Spec) -> Child:
        log = self._run_dir / f"{name}.log"
        return spawn(name, LEADER_MODULE, msgspec.json.encode(spec), log=log)

    def _watch(self, member: Member, spec: Spec) -> None:
        exited = member.child.watch(lambda report: self._on_report(member, report))
        exited.add_done_callback(lambda _: self._on_exit(member, spec))
        self._changed()

    def _on_exit(self, member: Member, spec: Spec) -> None:
        if not self._is_stopping:
            if self._has_started:
                task = asyncio.get_running_loop().create_task(self._restart(member, spec))
                self._restarts.add(task)
                task.add_done_callback(self._restarts.discard)
                return
            member.is_over = True
        self._changed()

    async def _restart(self, member: Member, spec: Spec) -> None:
        """Start it again at its former addresses, within bounds."""
        server = self.config.instance.server
        exited = member.child.exited
        member.failures = 0 if member.is_ready else member.failures + 1
        member.is_ready = False
        while True:
            is_usage = exited is not None and exited.result() == EXIT_USAGE
            member.is_over = is_usage or member.failures > server.max_restarts
            self._changed()
            if member.is_over:
                return
            _log.error("%s %s (log: %s)", member.name, member.status, member.child.log)
            await asyncio.sleep(restart_pause_s(server, member.failures))
            try:
                child = self._spawn(member.name, at_former_addresses(spec, member.bound))
            except OSError as error:
                member.child.failure = f"cannot be started: {error.strerror or error}"
                member.failures += 1
                continue
            member.replace(child)
            self._watch(member, spec)
            return

    def _cancel_restarts(self) -> None:
        for task in self._restarts:
            task.cancel()

    def _on_report(self, member: Member, report: Report) -> None:
        match report:
            case Bound():
                member.bound = report
            case Progress():
                member.progress = report.text
            case Ready():
                member.has_started = True
                member.progress = "waiting for the instances"
            case Health():
                member.problems = report.problems
        # A router listens at once, but what it would answer is 503 until instances serve.
        for one in sorted(self.members, key=lambda m: m.role == "router"):
            one.is_ready = one.is_ready or (
                one.has_started and (one.role != "router" or self._instances_are_ready)
            )
        self._changed()

    @property
    def _instances_are_ready(self) -> bool:
        return all(member.is_ready for member in self.members if member.role != "router")

    def _changed(self) -> None:
        self._news.set()
        self._on_change()

    def _ended(self) -> str | None:
        if not self._is_stopping:
            for member in self.members:
                if member.is_over:
                    return f"{member.name} {member.status} (log: {member.child.log})"
        return None

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._until_true(lambda: condition() or self._ended() is not None)
        for member in self.members:
            exited = member.child.exited
            if member.is_over and exited is not None:
                if exited.result() == EXIT_USAGE and member.child.failure:
                    raise ConfigError(f"{member.name}: {member.child.failure}")
                raise ClusterFailed(self._ended() or member.status)

    async def _until_true(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()


def at_former_addresses(spec: Spec, bound: Bound | None) -> Spec:
    """A member that starts again takes the ports that the others know it by."""
    if bound is None:
        return spec
    port = int(bound.http.rpartition(":")[2])
    if isinstance(spec, RouterSpec):
        return RouterSpec(attrs.evolve(spec.config, port=port))
    disagg = attrs.evolve(spec.config.disagg, http_port=port)
    if bound.bootstrap:
        disagg = attrs.evolve(disagg, bootstrap_port=int(bound.bootstrap.rpartition(":")[2]))
    return msgspec.structs.replace(spec, config=attrs.evolve(spec.config, disagg=disagg))
