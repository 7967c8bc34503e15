"""Both legs over HTTP, several dp ranks on either side, and nobody names one: who meets whom.

Leaders, links, workers, cores and bytes are the product's own. Each leg gets the same body, as
from a router that knows nothing of dp ranks or from a client that calls the instances itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import attrs
import msgspec
import pytest

from pdcore.assembly import WorkerOptions, build_worker
from pdcore.control.codec import decode_leader_message, encode_link
from pdcore.control.messages import Accepted, LeaderMessage, Submit, WorkerMessage, WorkerReady
from pdcore.engine.simulated import SimulatedRunner, simulated_tokens
from pdcore.fsm.events import TopologyFetched
from pdcore.local import LocalPort
from pdcore.scheduler.route import route_of
from pdcore.server.dispatcher import Dispatcher
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.server.text import IdDetokenizer, IdTokenizer, TextModel
from pdcore.server.workers import WorkerRegistry
from pdcore.testing.world import InlineBackground, Rank, TcpNamed, World, make_world
from pdcore.topology import ParallelLayout
from pdcore.transports.loopback import LoopbackTransport
from pdcore.types import Incarnation, Role
from tests.scenarios.reports.fleet import check_nothing_leaked
from tests.unit.server.kit import App, Call, Reply, run, settle

TEXT = TextModel("simulated", IdTokenizer(), IdDetokenizer)
PROMPT = list(range(10, 30))
NUM_TOKENS = 5

#: What happens to a leader's message on its way to a worker.
OnTheWay = Callable[[LeaderMessage], LeaderMessage]


def unchanged(message: LeaderMessage) -> LeaderMessage:
    return message


@attrs.define(eq=False)
class Instance:
    """A leader and its dp ranks, one worker each; the link carries encoded messages."""

    world: World
    role: Role
    dp_size: int
    on_the_way: OnTheWay = unchanged
    ranks: list[Rank] = attrs.field(factory=list, init=False)

    def send(self, rank: int, message: LeaderMessage) -> bool:
        data = encode_link(self.on_the_way(message))
        self.ranks[rank].port.put(decode_leader_message(data))
        return True

    def start(self, prefill: Instance | None = None) -> App:
        """Its ranks, which are ready, and its HTTP app."""
        dispatcher = Dispatcher(
            self, WorkerRegistry(self.dp_size, self.dp_size), clock=self.world.clock
        )
        for number in range(self.dp_size):
            rank = self._start_rank(number, dispatcher, prefill)
            setup = rank.worker.core.setup
            ready = WorkerReady(
                rank=number,
                dp_rank=setup.layout.coordinates(number).dp,
                incarnation=setup.me.incarnation,
                control_address=setup.me.address,
                max_model_len=setup.max_model_len,
                max_prefill_tokens=setup.limits.max_prefill_tokens,
                vocab_size=setup.vocab_size,
                num_blocks=setup.placement.num_blocks,
                transport=setup.transport,
            )
            dispatcher.on_message(number, ready)
        options = InstanceOptions(LegOptions(self.role, self.role.value))
        return create_instance_app(options, TEXT, dispatcher, clock=self.world.clock)

    def _start_rank(self, number: int, dispatcher: Dispatcher, prefill: Instance | None) -> Rank:
        world, name = self.world, f"{self.role.value}-{number}"
        said: list[WorkerMessage] = []

        def on_message(message: WorkerMessage) -> None:
            said.append(message)
            dispatcher.on_message(number, message)

        def fetch(bootstrap: str) -> TopologyFetched:
            assert prefill is not None
            ranks = prefill.ranks
            return TopologyFetched(bootstrap, route_of([r.worker.core.setup for r in ranks]))

        port = LocalPort(on_message)
        worker = build_worker(
            SimulatedRunner(world.model),
            LoopbackTransport(Incarnation(world.rng.randbytes(16)), world.fabric, address=name),
            TcpNamed(world.network.channel(name), name),
            port,
            WorkerOptions(
                role=self.role,
                instance=self.role.value,
                num_blocks=128,
                rank=number,
                layout=ParallelLayout(self.dp_size),
                clock=world.clock,
                fetch_route=fetch,
                wait=lambda timeout_s: None,
            ),
            background=InlineBackground(),
        )
        options = world.ranks[self.role.value].options
        rank = world.ranks[name] = Rank(options, worker, port, said)
        self.ranks.append(rank)
        return rank


@attrs.frozen
class Outcome:
    """Answers by room, and which rank of each instance took the room."""

    prefill: dict[int, Reply]
    decode: dict[int, Reply]
    at_prefill: dict[int, int]
    at_decode: dict[int, int]


def serve(
    dp_sizes: tuple[int, int],
    rooms: range,
    to_decode: OnTheWay = unchanged,
    **more: object,
) -> Outcome:
    """One request per room, both legs of it at once; ``more`` is in every body."""
    world = make_world()
    former = dict(world.ranks)
    prefill = Instance(world, Role.PREFILL, dp_sizes[0])
    decode = Instance(world, Role.DECODE, dp_sizes[1], to_decode)
    apps = prefill.start(), decode.start(prefill)
    for name, rank in former.items():
        rank.worker.close()
        del world.ranks[name]

    async def play() -> list[dict[int, Reply]]:
        calls = [{room: ask(app, room, more) for room in rooms} for app in apps]
        every = [one for leg in calls for one in leg.values()]
        for _ in range(2):  # admission is answered first, and decode may not wait for it
            await settle()
            world.run(lambda: not any(r.worker.core.live_keys() for r in world.ranks.values()))
        await asyncio.gather(*(one.task for one in every))
        return [{room: one.reply for room, one in leg.items()} for leg in calls]

    replies = run(play())
    check_nothing_leaked(world)
    return Outcome(*replies, taken(prefill), taken(decode))


def ask(app: App, room: int, more: dict[str, object]) -> Call:
    body = {
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "return_token_ids": True,
        "bootstrap_room": room,
        "attempt": 1000 + room,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 18800,
        "timeout": 5.0,
    }
    return Call(app, "POST", "/v1/completions", {**body, **more})


def taken(instance: Instance) -> dict[int, int]:
    return {
        message.key.room: number
        for number, rank in enumerate(instance.ranks)
        for message in rank.said
        if isinstance(message, Accepted)
    }


def check_both_legs_meet(
    dp_sizes: tuple[int, int], to_decode: OnTheWay = unchanged, named: int | None = None
) -> None:
    """Every room's tokens are right, wherever the room says that prefill is."""
    rooms = range(1, 10)
    more = {} if named is None else {"disagg_prefill_dp_rank": named}
    found = serve(dp_sizes, rooms, to_decode, **more)
    expected = simulated_tokens(make_world().model, PROMPT, NUM_TOKENS)
    assert {r: one.status for r, one in found.prefill.items()} == dict.fromkeys(rooms, 202)
    assert {r: one.status for r, one in found.decode.items()} == dict.fromkeys(rooms, 200)
    for room in rooms:
        assert found.decode[room].json()["choices"][0]["token_ids"] == expected
        assert found.at_prefill[room] == (room % dp_sizes[0] if named is None else named)
    assert set(found.at_decode.values()) == set(range(dp_sizes[1])), "by load"


def first_if_unnamed(message: LeaderMessage) -> LeaderMessage:
    """Mutant: decode takes prefill's first dp rank where none was named."""
    if isinstance(message, Submit) and message.prefill_dp_rank is None:
        return msgspec.structs.replace(message, prefill_dp_rank=0)
    return message


@pytest.mark.parametrize("dp_sizes", [(1, 1), (2, 1), (3, 1), (3, 2), (2, 3), (1, 2)])
def test_both_legs_find_the_dp_rank_that_nobody_named(dp_sizes: tuple[int, int]) -> None:
    """R60, D21: prefill takes the room's from its own dp_size, decode from the route's, whatever
    the number of its own ranks, which share the requests by load."""
    check_both_legs_meet(dp_sizes)


@pytest.mark.parametrize("dp_sizes", [(2, 1), (3, 2)])
def test_a_decode_that_takes_the_first_rank_waits_for_another_than_prefill(
    dp_sizes: tuple[int, int],
) -> None:
    """D21: the mutant's rooms time out, as those of dp_size 3 and room 8 once did."""
    with pytest.raises(AssertionError, match="504"):
        check_both_legs_meet(dp_sizes, first_if_unnamed)


@pytest.mark.parametrize("named", [0, 2])
def test_a_named_dp_rank_is_taken_on_both_sides(named: int) -> None:
    """D21: also the first one, which is not the same as none."""
    check_both_legs_meet((3, 2), named=named)


def test_a_named_dp_rank_that_prefill_lacks_is_said_by_both_legs() -> None:
    """D21: by prefill at once, by decode when it has the route, which is before any time-out."""
    found = serve((3, 2), range(5, 6), disagg_prefill_dp_rank=3)
    says = "disagg_prefill_dp_rank: 3 is outside 0..2 of the prefill instance; leave it out"
    for reply, status, code in (
        (found.prefill[5], 400, "invalid_request"),
        (found.decode[5], 502, "incompatible"),
    ):
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (status, code)
        assert says in error["message"]
