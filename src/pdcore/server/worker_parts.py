"""The parts of a worker process: what its configuration names, made in the right order."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.background import Background
from pdcore.config import SIMULATED, CoreLimits, WorkerConfig
from pdcore.config_loader import read_secret
from pdcore.control.bootstrap_client import BootstrapClient, CallReply, Registrar
from pdcore.control.group import ZmqGroupPort
from pdcore.control.link import WorkerId, WorkerLink
from pdcore.control.messages import WorkerReady
from pdcore.control.zmq import ZmqChannel, ZmqSource
from pdcore.engine.base import ModelRunner
from pdcore.engine.shard import TensorParallel, TPRank
from pdcore.errors import ConfigError
from pdcore.kv.layout import num_blocks_for, table_width
from pdcore.scheduler.route import registration_of
from pdcore.scheduler.setup import CoreSetup
from pdcore.server.registration import Registration
from pdcore.server.routes import LOOPBACK_HOSTS, RouteFetcher
from pdcore.system_clock import SystemClock
from pdcore.topology import ParallelLayout
from pdcore.transports import registry
from pdcore.transports.base import Transport
from pdcore.transports.shm_segment import available_bytes
from pdcore.types import Incarnation, Role
from pdcore.worker import LeaderPort, Worker

#: A first registration that works at all answers within this.
FIRST_REGISTRATION_S: Final = 6.0


@attrs.define(eq=False)
class WorkerParts:
    """Everything one worker process holds; :meth:`close` releases it in reverse order."""

    config: WorkerConfig
    runner: ModelRunner
    transport: Transport
    channel: ZmqChannel
    link: WorkerLink
    background: Background
    clock: SystemClock = attrs.field(factory=SystemClock)
    registration: Registration | None = None
    group: ZmqGroupPort | None = None
    worker: Worker | None = None

    def assemble(self, port: LeaderPort, is_told_to_stop: Callable[[], bool] = bool) -> Worker:
        """The worker around these parts. Raises ConfigError for a KV pool that is too
        small, TransportError where there is not enough memory, GroupBroken where another rank
        of its group does not come, or this one is told to stop while it waits."""
        config = self.config
        limits = effective_limits(config.limits, self.runner.max_model_len)
        sources: list[ZmqSource] = [self.channel, self.link]
        blocks = num_blocks(config, limits, self.runner)
        if self.group is not None:
            sources.append(self.group)
            # Ranks that decide alike need pools of one size.
            blocks = self.group.meet(blocks, config.ready_timeout_s, is_told_to_stop)
        options = WorkerOptions(
            role=Role(config.role),
            instance=config.instance,
            num_blocks=blocks,
            rank=config.rank,
            layout=layout_of(config),
            group=self.group,
            limits=limits,
            integrity=config.integrity,
            sources=sources,
            clock=self.clock,
            fetch_route=RouteFetcher(
                BootstrapClient(self.clock),
                config.allowed_bootstraps or (*LOOPBACK_HOSTS, config.advertise_host),
            ),
        )
        self.worker = build_worker(
            self.runner, self.transport, self.channel, port, options, background=self.background
        )
        return self.worker

    def announce(self, worker: Worker) -> None:
        """Register with the bootstrap server (prefill), then tell the leader."""
        config, setup = self.config, worker.core.setup
        if config.bootstrap:
            self.registration = self._register(setup)
            worker.problems = self.registration.problems
            self.registration.start(FIRST_REGISTRATION_S)
        self.link.send(worker.health())
        self.link.send(
            WorkerReady(
                rank=config.rank,
                dp_rank=config.dp_rank,
                incarnation=setup.me.incarnation,
                control_address=self.channel.address,
                max_model_len=setup.max_model_len,
                max_prefill_tokens=setup.limits.max_prefill_tokens,
                vocab_size=self.runner.vocab_size,
                num_blocks=setup.placement.num_blocks,
                transport=setup.transport,
            )
        )

    def close(self, linger_s: float) -> list[str]:
        """Say goodbye, then release. Returns what had to be left behind, usually nothing."""
        if self.registration is not None:
            self.registration.close()
        self.link.close(linger_s)
        if self.worker is not None:
            return self.worker.close()
        if self.group is not None:
            self.group.close()
        self.background.close()
        left = self.transport.close()
        self.channel.close()
        self.runner.shutdown()
        return left

    def _register(self, setup: CoreSetup) -> Registration:
        config = self.config
        client = BootstrapClient(self.clock, token=config.bootstrap_token or None)
        wanted = registration_of(setup)
        at = setup.layout.coordinates(config.rank)
        key = setup.layout.route_key(at)

        def register() -> CallReply:
            return client.register(config.bootstrap, wanted)

        def deregister() -> CallReply:
            return client.deregister(config.bootstrap, key, wanted.incarnation)

        return Registration(
            Registrar(config.bootstrap),
            register,
            deregister,
            self.clock,
            on_change=self.background.wake,
        )


def build(config: WorkerConfig, on_progress: Callable[[str], None]) -> WorkerParts:
    """Load the model, open transport and sockets. Raises ConfigError, EngineError,
    TransportError; what was opened before is closed again."""
    runner = load(config, on_progress)
    incarnation = Incarnation(os.urandom(16))
    advertised = numeric_host(config.advertise_host)
    place = place_of(config, advertised)
    transport = registry.create_for_worker(config.transport, incarnation, place)
    with contextlib.ExitStack() as opened:
        opened.callback(runner.shutdown)
        opened.callback(transport.close)
        channel = ZmqChannel(config.bind_host, advertised, thread_id=threading.get_ident)
        opened.callback(channel.close)
        worker = WorkerId(config.rank, incarnation)
        link = WorkerLink(config.link_address, worker, thread_id=threading.get_ident)
        opened.callback(link.close)
        group = open_group(config, incarnation)
        opened.pop_all()  # from here on the parts close themselves
        return WorkerParts(config, runner, transport, channel, link, Background(), group=group)


def layout_of(config: WorkerConfig) -> ParallelLayout:
    return ParallelLayout(config.world_size, config.attn_tp_size, config.cp_size)


def open_group(config: WorkerConfig, incarnation: Incarnation) -> ZmqGroupPort | None:
    """The link to the other ranks of its group; None for a rank that is alone."""
    size = layout_of(config).group_size
    if size == 1:
        return None
    member = WorkerId(config.rank % size, incarnation)
    return ZmqGroupPort(config.group_link, member, size, thread_id=threading.get_ident)


def place_of(config: WorkerConfig, advertised: str) -> registry.WorkerPlace:
    """Where the transport listens, and what its peers must know. Raises ConfigError."""
    host = config.bind_host
    bound = host if host in ("", "*") else numeric_host(host, "host")
    secret = read_secret(config.transport_secret_file)
    return registry.WorkerPlace(bound, advertised, secret)


def numeric_host(host: str, field: str = "local_ip") -> str:
    """The address behind a name, once, here: peers connect to numbers only. Raises
    ConfigError for a name that does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{field} {host!r} does not resolve ({error}): name an address of this machine"
        ) from None


def load(config: WorkerConfig, on_progress: Callable[[str], None]) -> ModelRunner:
    """The runner that ``model_path`` names. Raises EngineError or ConfigError."""
    if config.model_path == SIMULATED:
        from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner

        tp_size = config.attn_tp_size
        # Served to prove things: a row that another request's write hit is an error in the very
        # next step, wherever it is.
        simulated = SimulatedConfig(
            block_size=config.block_size,
            verify_all=True,
            tp_size=tp_size,
            tp_rank=config.rank % tp_size,
        )
        length = _model_len(config, lambda: simulated.max_model_len)
        if length is not None:
            simulated = attrs.evolve(simulated, max_model_len=length)
        return SimulatedRunner(simulated)
    from pdcore.engine.load import load_runner, resolve_model

    tensor_parallel = None
    if config.attn_tp_size > 1:
        tensor_parallel = TensorParallel(
            rank=TPRank(config.attn_tp_size, config.rank % config.attn_tp_size),
            rendezvous=config.group_rendezvous,
            rendezvous_timeout_s=config.ready_timeout_s,
        )
    path = Path(config.model_path) if config.model_path is not None else None
    cache_dir = Path(config.cache_dir)
    on_progress("loading the model (a first start converts its weights, once)")
    runner = load_runner(
        path,
        config.dtype,
        config.num_threads,
        cache_dir=cache_dir,
        block_size=config.block_size,
        max_model_len=_model_len(
            config, lambda: resolve_model(path, cache_dir).config.max_model_len
        ),
        tensor_parallel=tensor_parallel,
    )
    on_progress("taking KV memory")
    return runner


def _model_len(config: WorkerConfig, trained_len: Callable[[], int]) -> int | None:
    """What decode ever needs is its longest prompt and its longest output (R18). Prefill
    makes one token, whatever a request asks for. None: what the model was trained for."""
    if config.max_new_tokens is None or config.role != Role.DECODE.value:
        return config.max_model_len
    trained = trained_len()
    longest = config.limits.max_prefill_tokens + config.max_new_tokens
    return min(longest, config.max_model_len or trained, trained)


def effective_limits(limits: CoreLimits, max_model_len: int) -> CoreLimits:
    """No prompt is longer than the model allows, one output token included."""
    longest = min(limits.max_prefill_tokens, max_model_len - 1)
    chunk = min(limits.prefill_chunk_tokens, longest)
    return attrs.evolve(limits, max_prefill_tokens=longest, prefill_chunk_tokens=chunk)


def num_blocks(config: WorkerConfig, limits: CoreLimits, runner: ModelRunner) -> int:
    """Blocks of the KV pool, the null block included (R100).

    What memory allows, but never more than ``max_running`` sequences of full length could
    use. Raises ConfigError when one longest prompt does not fit.
    """
    spec = runner.kv_cache_spec
    if config.num_blocks is not None:
        chosen = config.num_blocks * sum(spec.block_bytes.values())
        return num_blocks_for(spec, chosen, limits.max_prefill_tokens)
    available = config.kv_cache_bytes
    if available is None:
        available = int(available_bytes() * (config.mem_fraction or 0.0))
    longest = table_width(runner.max_model_len, min(spec.block_sizes.values()))
    useful = limits.max_running * longest + 1
    return min(num_blocks_for(spec, available, limits.max_prefill_tokens), useful)
