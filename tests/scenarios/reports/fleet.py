"""Several prefill and decode ranks in one world, and the questions the reports ask of it.

:func:`make_fleet` is :func:`pdcore.testing.world.make_world` with more than one instance of
each role; everything else of the world (clock, network, fabric, ``run``) is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.config import CoreLimits
from pdcore.control.codec import pack_token_ids
from pdcore.control.messages import Finished, Submit, SubmitSampling, WorkerMessage
from pdcore.engine.simulated import SimulatedConfig, SimulatedRunner, simulated_tokens
from pdcore.errors import failure
from pdcore.fsm.events import TopologyFetched
from pdcore.local import LocalPort
from pdcore.scheduler.route import route_of
from pdcore.testing.world import InlineBackground, Rank, RankOptions, TcpNamed, World, make_world
from pdcore.transports.base import Revocation
from pdcore.transports.loopback import LoopbackTransport
from pdcore.types import Incarnation, Role, RoomKey, SamplingParams

PROMPT = list(range(10, 30))
FIVE = SamplingParams(max_tokens=5)


@attrs.define(eq=False)
class Fleet:
    """A world of several instances; ``asked`` counts route fetches by (decode, bootstrap)."""

    world: World
    asked: Counter[tuple[str, str]] = attrs.field(factory=Counter)

    def start(self, role: Role, name: str, limits: CoreLimits, num_blocks: int) -> Rank:
        """A process of this instance, also in place of a former one."""
        world = self.world
        said: list[WorkerMessage] = []
        port = LocalPort(said.append)
        incarnation = Incarnation(world.rng.randbytes(16))

        def fetch(bootstrap: str) -> TopologyFetched:
            self.asked[name, bootstrap] += 1
            rank = world.ranks.get(bootstrap.removesuffix(":1"))
            if rank is None:
                return TopologyFetched(bootstrap, None, failure("unreachable", "nobody is there"))
            return TopologyFetched(bootstrap, route_of([rank.worker.core.setup]))

        worker = build_worker(
            SimulatedRunner(world.model),
            LoopbackTransport(incarnation, world.fabric, address=name),
            TcpNamed(world.network.channel(name), name),
            port,
            WorkerOptions(
                role=role,
                instance=name,
                num_blocks=num_blocks,
                limits=limits,
                clock=world.clock,
                fetch_route=fetch,
                wait=lambda timeout_s: None,
            ),
            background=InlineBackground(),
        )
        options = RankOptions(role, num_blocks, limits, Revocation.SENDER_ACK)
        rank = Rank(options, worker, port, said)
        world.ranks[name] = rank
        return rank

    def kill(self, name: str, *, late: bool = False) -> Rank:
        """Its process is gone; nobody takes its place."""
        former = self.world.ranks.pop(name)
        former.worker.ports.channel.close()
        self.world.fabric.die(former.worker.core.setup.me.incarnation, late=late)
        return former

    def restart(self, name: str) -> Rank:
        options = self.kill(name).options
        return self.start(options.role, name, options.limits, options.num_blocks)

    def cut(self, one: str, other: str) -> None:
        """The control path of this pair, and of no other, is broken."""
        self.world.network.partition(f"mem://{one}", f"mem://{other}")

    def submit(
        self,
        prefill: str,
        decode: str,
        prompt: Sequence[int] = PROMPT,
        sampling: SamplingParams = FIVE,
        timeout_s: float = 60.0,
    ) -> RoomKey:
        """Both legs of one dispatch to the named pair."""
        world = self.world
        key = RoomKey(world.rng.getrandbits(62) + 1, world.rng.getrandbits(62) + 1)
        message = Submit(
            key=key,
            request_id=f"r{key.room}",
            prompt=pack_token_ids(prompt),
            sampling=SubmitSampling(**attrs.asdict(sampling)),
            expires_at_s=world.clock.unix() + timeout_s,
            remaining_s=timeout_s,
            bootstrap=f"{prefill}:1",
            prefill=prefill,
            decode=decode,
            prefill_dp_rank=0,
            replaces=None,
        )
        for name in (prefill, decode):
            if name in world.ranks:
                world.ranks[name].port.put(message)
        return key

    def finish(self, decode: str, key: RoomKey) -> Finished:
        rank = self.world.ranks[decode]
        self.world.run(lambda: rank.result(key) is not None)
        result = rank.result(key)
        assert result is not None
        return result


def make_fleet(
    num_prefill: int,
    num_decode: int,
    *,
    limits: CoreLimits | None = None,
    num_blocks: int = 64,
    stepped: bool = False,
) -> Fleet:
    """Instances prefill-0.. and decode-0.., one rank each."""
    world = make_world(stepped=stepped)
    for rank in world.ranks.values():
        rank.worker.close()
    world.ranks.clear()
    fleet = Fleet(world)
    for role, count in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
        for i in range(count):
            fleet.start(role, f"{role.value}-{i}", limits or CoreLimits(), num_blocks)
    return fleet


# --- questions --------------------------------------------------------------------------------


def let_bytes_move(world: World) -> None:
    """Everything a stepped fabric has pending happens."""
    while world.fabric.step() is not None:
        pass


def is_posted(world: World) -> bool:
    return any(action.kind == "move" for action in world.fabric.pending())


def check_nothing_leaked(world: World) -> None:
    """Every block of every rank is free again, every metadata slot too."""
    for name, rank in world.ranks.items():
        ledger = rank.worker.core.blocks.audit()["full"]
        assert ledger.free == ledger.total, (name, ledger)
        slots = getattr(rank.worker.core.rooms, "slots", None)
        if slots is not None:
            slots.audit()
            assert slots.available == slots.capacity, (name, slots)


def check_failed_without_text(rank: Rank, key: RoomKey) -> str:
    """Exactly one end, an error, and no token; returns its code."""
    ends = [m for m in rank.said if isinstance(m, Finished) and m.key == key]
    assert len(ends) == 1, ends
    assert ends[0].failure is not None, "a failure was reported as a success"
    assert rank.tokens(key) == []
    return ends[0].failure.code


def check_right(
    rank: Rank, key: RoomKey, model: SimulatedConfig, prompt: Sequence[int], num_tokens: int
) -> None:
    """Finished well, with the tokens that a monolithic run gives."""
    result = rank.result(key)
    assert result is not None
    assert result.failure is None, result.failure
    assert rank.tokens(key) == simulated_tokens(model, list(prompt), num_tokens)
