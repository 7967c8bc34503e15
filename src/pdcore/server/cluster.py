"""A whole cluster on one machine: prefill and decode leaders and a router, each a process.

For ``pdcore up``, ``pdcore demo`` and tests. Leaders take free ports and report them; the
router starts when all are known. Members die with this process, however it ends
(:mod:`pdcore.server.process`). One event loop, and it must run in the thread that starts it.

Once the cluster has been ready, a member that dies does not end the others: it is started
again at its former addresses, after a pause that doubles, like a worker
(:mod:`pdcore.server.members`). It ends the cluster after ``max_restarts`` starts in a row that
never served (D45).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from pdcore.config import InstanceConfig, RouterConfig
from pdcore.errors import ConfigError, PdcoreError
from pdcore.server.leader_main import LeaderSpec, RouterSpec
from pdcore.server.members import Keeper
from pdcore.server.process import EXIT_USAGE
from pdcore.server.serve import bind

#: Beyond the time a member itself takes to drain and to end what does not.
STOP_MARGIN_S: Final = 5.0


#: Fields of :class:`ClusterConfig` that count something, and flags of the commands.
_COUNTS: Final = (
    "num_prefill",
    "num_decode",
    "prefill_tp",
    "decode_tp",
    "prefill_dp",
    "decode_dp",
)


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
    #: Tensor parallel ranks of each group, one process each, and groups of each instance.
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_dp: int = 1
    decode_dp: int = 1

    def __attrs_post_init__(self) -> None:
        for name in _COUNTS:
            count = attrs.asdict(self, recurse=False)[name]
            if not 1 <= count <= 64:
                flag = "--" + name.replace("num_", "").replace("_", "-")
                raise ConfigError(f"{flag}: must be 1 to 64, got {count}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port: must be 0 to 65535, got {self.port}")

    def sizes(self, role: str) -> tuple[int, int]:
        """(ranks of a group, groups) of each instance of this role."""
        if role == "prefill":
            return self.prefill_tp, self.prefill_dp
        return self.decode_tp, self.decode_dp


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
        self._cache_dir = cache_dir
        self._run_dir = run_dir
        self._on_change = on_change or (lambda: None)
        self._news = asyncio.Event()
        self._keeper = Keeper(run_dir, config.instance.server, self._changed)
        self.members = self._keeper.members

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
        # The router starts last: its address is tried before anybody waits for the others.
        bind(config.host, config.port).close()
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
        self._keeper.add("router", "router", RouterSpec(router))
        await self._until(lambda: all(member.is_ready for member in self.members))
        self._keeper.is_restarting = True

    async def failed(self) -> str:
        """Wait until a member ends by itself and is not started again; says which and why."""
        await self._until_true(lambda: self._keeper.ended() is not None)
        return self._keeper.ended() or ""

    async def stop(self) -> None:
        """Drain: the router finishes what clients wait for, then the instances; each is
        ended when that takes too long. Idempotent."""
        self._keeper.leave()
        server = self.config.instance.server
        timeout_s = server.drain_s + server.stop_timeout_s + STOP_MARGIN_S
        for chosen in (True, False):
            members = [m for m in self.members if (m.role == "router") is chosen]
            await asyncio.gather(*(m.child.stop(timeout_s) for m in members))

    def kill(self) -> None:
        """End every member now; their workers go with them."""
        self._keeper.leave()
        for member in self.members:
            member.child.kill()

    def _start_leader(self, role: str, index: int) -> None:
        base = self.config.instance
        tp_size, dp_size = self.config.sizes(role)
        size = tp_size * dp_size
        disagg = attrs.evolve(
            base.disagg, role=role, http_port=0, bootstrap_port=0, link_port=0, node_index=0
        )
        parallel = base.parallel
        if size > 1:
            parallel = attrs.evolve(parallel, world_size=size, attn_tp_size=tp_size)
            disagg = attrs.evolve(disagg, devices_per_node=max(size, disagg.devices_per_node))
        name = f"{role}-{index}"
        folder = self._run_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        instance = attrs.evolve(base, disagg=disagg, parallel=parallel)
        spec = LeaderSpec(instance, str(self._cache_dir), str(folder))
        self._keeper.add(name, role, spec)

    def _changed(self) -> None:
        self._news.set()
        self._on_change()

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._until_true(lambda: condition() or self._keeper.ended() is not None)
        for member in self.members:
            exited = member.child.exited
            if member.is_over and exited is not None:
                if exited.result() == EXIT_USAGE and member.child.failure:
                    raise ConfigError(f"{member.name}: {member.child.failure}")
                raise ClusterFailed(self._keeper.ended() or member.status)

    async def _until_true(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()
