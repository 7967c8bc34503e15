"""The processes of a cluster: started, watched, started again within bounds.

What happens to one is no matter of the others. A member that ends is started again at its
former addresses after a pause that doubles; it is over after ``max_restarts`` starts in a row
that never served (D45). That it then calls its configuration wrong is no reason to give up at
once: it has served with it, and somebody may have its port for a while.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import msgspec

from pdcore.config import ServerConfig
from pdcore.server.launch import Deaths
from pdcore.server.leader_main import RouterSpec, Spec
from pdcore.server.process import (
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
_log: Final = logging.getLogger(__name__)


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
        self.deaths = Deaths()
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


class Keeper:
    """Owned by the loop and the thread that start the members (see
    :mod:`pdcore.server.process`). ``on_change`` is called after every report and end."""

    def __init__(self, run_dir: Path, config: ServerConfig, on_change: Callable[[], None]) -> None:
        self.members: list[Member] = []
        #: False: whoever ends is over; a person is watching the start.
        self.is_restarting = False
        self._run_dir = run_dir
        self._config = config
        self._on_change = on_change
        self._is_leaving = False
        self._restarts: set[asyncio.Task[None]] = set()

    def add(self, name: str, role: str, spec: Spec) -> None:
        """Start a member. Raises OSError."""
        member = Member(name, role, self.spawn(name, spec))
        self.members.append(member)
        self._watch(member, spec)

    def leave(self) -> None:
        """Nobody is started again from now on; ends are what was asked for."""
        self._is_leaving = True
        for task in self._restarts:
            task.cancel()

    def ended(self) -> str | None:
        """Which member is over by itself, why, and where its log is."""
        if not self._is_leaving:
            for member in self.members:
                if member.is_over:
                    return f"{member.name} {member.status} (log: {member.child.log})"
        return None

    def spawn(self, name: str, spec: Spec) -> Child:
        log = self._run_dir / f"{name}.log"
        return spawn(name, LEADER_MODULE, msgspec.json.encode(spec), log=log)

    def _watch(self, member: Member, spec: Spec) -> None:
        exited = member.child.watch(lambda report: self._on_report(member, report))
        exited.add_done_callback(lambda _: self._on_exit(member, spec))
        self._on_change()

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
            instances_are_ready = all(m.is_ready for m in self.members if m.role != "router")
            may_be_ready = one.role != "router" or instances_are_ready
            if one.has_started and may_be_ready and not one.is_ready:
                one.is_ready = True
                one.deaths.served(asyncio.get_running_loop().time())
        self._on_change()

    def _on_exit(self, member: Member, spec: Spec) -> None:
        if not self._is_leaving:
            if self.is_restarting:
                task = asyncio.get_running_loop().create_task(self._restart(member, spec))
                self._restarts.add(task)
                task.add_done_callback(functools.partial(self._on_restarted, member))
                return
            member.is_over = True
        self._on_change()

    def _on_restarted(self, member: Member, task: asyncio.Task[None]) -> None:
        self._restarts.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # By a bug of ours: it is over, and says so, instead of never coming back.
            member.child.failure = f"cannot be started: {type(error).__name__}: {error}"
            member.is_over = True
            self._on_change()

    async def _restart(self, member: Member, spec: Spec) -> None:
        """Start it again at its former addresses, within bounds."""
        loop = asyncio.get_running_loop()
        member.deaths.died(loop.time())
        member.is_ready = False
        while True:
            member.is_over = member.deaths.failures > self._config.max_restarts
            self._on_change()
            if member.is_over:
                return
            _log.error("%s %s (log: %s)", member.name, member.status, member.child.log)
            await asyncio.sleep(member.deaths.pause_s(self._config))
            try:
                child = self.spawn(member.name, at_former_addresses(spec, member.bound))
            except OSError as error:
                member.child.failure = f"cannot be started: {error.strerror or error}"
                member.deaths.died(loop.time())
                continue
            member.replace(child)
            self._watch(member, spec)
            return


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
