"""Public reports about which byte belongs where, and about ranks that must move together."""

from __future__ import annotations

import asyncio
import itertools
import random

import attrs
import msgspec
import numpy as np
import pytest

from pdcore.cli.serve import NodeFlags, disagg_flags
from pdcore.config import DisaggConfig
from pdcore.config.deploy import normalise_address
from pdcore.control.bootstrap_client import RouteReply, split_host_port
from pdcore.control.messages import Claim, Route, Status, StatusKind, Submit
from pdcore.control.rank_table import RankTable, RankTableConfig
from pdcore.control.zmq import ZmqChannel
from pdcore.errors import ConfigError, IncompatibleError, InvalidRequest, failure
from pdcore.fsm.commit import commit_receiver
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.states import ReceiverState
from pdcore.fsm.targets import Admission, ClaimFrom, StatusFrom
from pdcore.kv.layout import place_entries, resharded
from pdcore.kv.metadata import MetadataRecord, encode_record
from pdcore.kv.plan import plan_blocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.scheduler.route import registration_of
from pdcore.scheduler.topologies import Topologies, bracket
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.server.routes import RouteFetcher
from pdcore.testing.world import make_world
from pdcore.topology import check_divisible
from pdcore.types import Incarnation, LeaseId, Nonce, Role, RoomKey
from tests.scenarios.reports.kit import FIVE, PROMPT, finish
from tests.unit.kv.test_plan import execute, gqa, view
from tests.unit.scheduler.kit import (
    PREFILL,
    handshake_of,
    make_decode,
    make_request,
    make_setup,
    start,
)
from tests.unit.server.kit import TEXT, Call, World, run

SIZES = (1, 2, 3, 4, 6, 8, 16)
BLOCKS = ([5, 6, 2], [3, 9, 8])


def ranks_that_write(prefill: int, decode: int, rank: int) -> range:
    first = rank * prefill // decode
    return range(first, first + max(1, prefill // decode))


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("prefill", SIZES)
def test_every_pair_of_sizes_moves_the_right_heads_or_is_refused(heads: int, prefill: int) -> None:
    """SGLang PR19086, I23746, 31968: with fewer heads than ranks, heads were counted per rank
    and chosen by modulo instead of division, and the output was garbage. For every number of
    heads and every pair of TP sizes, each head of each token arrives where it belongs, from
    exactly one rank; what does not divide is refused before a byte moves."""
    spec = gqa(heads)
    entries = range(len(spec.entries))
    content = np.random.default_rng(heads).integers(
        0, 256, (len(spec.entries), 3, 4, heads, 16), dtype=np.uint8
    )
    for decode in SIZES:
        if any(tp % heads and heads % tp for tp in (prefill, decode)):
            with pytest.raises(ConfigError, match="do not divide"):
                resharded(resharded(spec, prefill, 0), decode, 0)
            continue
        if prefill % decode and decode % prefill:
            with pytest.raises(IncompatibleError, match="one must be a multiple"):
                check_divisible("tp_size", decode, prefill)
            continue
        for rank in range(decode):
            to_spec = resharded(spec, decode, rank)
            to_place, size = place_entries(to_spec, 10)
            target = np.zeros(size, np.uint8)
            for writer in ranks_that_write(prefill, decode, rank):
                from_spec = resharded(spec, prefill, writer)
                from_place, size = place_entries(from_spec, 10)
                source = np.zeros(size, np.uint8)
                mine = slice(
                    writer * heads // prefill,
                    writer * heads // prefill + from_spec.entries[0].num_heads,
                )
                for i, (n, block) in itertools.product(entries, enumerate(BLOCKS[0])):
                    view(source, from_spec, from_place, i, block)[:] = content[i, n, :, mine]
                batches = plan_blocks(
                    from_spec, from_place, {"full": BLOCKS[0]},
                    to_spec, to_place, {"full": BLOCKS[1]},
                )  # fmt: skip
                execute(batches, {0: source}, {0: target})
            held = slice(
                rank * heads // decode,
                rank * heads // decode + to_spec.entries[0].num_heads,
            )
            for i, (n, block) in itertools.product(entries, enumerate(BLOCKS[1])):
                assert (view(target, to_spec, to_place, i, block) == content[i, n, :, held]).all()


# --- layers that only one side has --------------------------------------------------------


def drafted(spec: KVCacheSpec) -> KVCacheSpec:
    """The same model with one more layer, as a draft model has it."""
    return KVCacheSpec(
        (*spec.entries, *(attrs.evolve(e, name=f"draft.{e.name}") for e in spec.entries[:2]))
    )


def test_draft_layers_on_one_side_are_refused_by_name() -> None:
    """SGLang PR17212: where only decode had draft layers, V was looked for at K's offset plus
    the wrong number of layers. Entries are matched by name; one without a partner is an
    error that names it, on either side."""
    spec = gqa(2)
    more = drafted(spec)
    place, _ = place_entries(spec, 10)
    wide, _ = place_entries(more, 10)
    for one, here, other, there in ((spec, place, more, wide), (more, wide, spec, place)):
        with pytest.raises(IncompatibleError, match=r"draft\.k\.0"):
            plan_blocks(one, here, {"full": [1]}, other, there, {"full": [2]})


def test_draft_layers_on_both_sides_arrive_whatever_their_order() -> None:
    """SGLang PR17212: K and V of each layer, the draft's too, byte for byte."""
    spec = drafted(gqa(2))
    turned = KVCacheSpec(spec.entries[4:] + spec.entries[:4][::-1])
    place, size = place_entries(spec, 10)
    there, there_size = place_entries(turned, 10)
    source = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros(there_size, np.uint8)
    batches = plan_blocks(spec, place, {"full": [1, 7]}, turned, there, {"full": [4, 2]})
    execute(batches, {0: source}, {0: target})
    where = {entry.name: i for i, entry in enumerate(turned.entries)}
    for i, entry in enumerate(spec.entries):
        for s, d in ((1, 4), (7, 2)):
            moved = view(target, turned, there, where[entry.name], d)
            assert (moved == view(source, spec, place, i, s)).all()


def test_a_decode_with_other_layers_fails_its_requests_before_a_byte_moves() -> None:
    """SGLang PR17212, PR19398, 19407: layout and dtype are compared through the digest when the
    route is read; the request ends with 502 that names both."""
    world = make_world()
    setup = world.decode.worker.core.setup
    entries = (*setup.spec.entries, KVCacheEntry("draft.k", "full", "uint8", 4, 2, 2, 16))
    object.__setattr__(setup, "spec", KVCacheSpec(entries))
    key = world.submit(PROMPT, sampling=FIVE)
    assert finish(world, key) == "incompatible"
    assert world.fabric._links == []
    result = world.decode.result(key)
    assert result is not None
    assert result.failure is not None
    assert result.failure.http_status == 502


# --- positions, not ids -------------------------------------------------------------------


def test_what_is_sent_is_chosen_by_position_never_by_block_id() -> None:
    """SGLang PR28718: pages were chosen by their global number where the position in the
    request was meant; right only while pages lay side by side. Random tables, in parts."""
    rng = random.Random(3)
    spec = gqa(2)
    place, size = place_entries(spec, 64)
    for _ in range(50):
        count = rng.randrange(1, 12)
        here, there = (rng.sample(range(1, 64), count) for _ in range(2))
        source = np.random.default_rng(count).integers(0, 256, size, dtype=np.uint8)
        target = np.zeros(size, np.uint8)
        cuts = sorted({0, count, *(rng.randrange(count + 1) for _ in range(3))})
        for first, last in itertools.pairwise(cuts):
            batches = plan_blocks(
                spec, place, {"full": here[first:last]}, spec, place, {"full": there[first:last]}
            )
            execute(batches, {0: source}, {0: target})
        for i in range(len(spec.entries)):
            for s, d in zip(here, there, strict=True):
                assert (view(target, spec, place, i, d) == view(source, spec, place, i, s)).all()
        untouched = set(range(64)) - set(there)
        assert not any(view(target, spec, place, 0, block).any() for block in untouched)


# --- ranks that move together -------------------------------------------------------------

KEY = RoomKey(5, 6)
NUM_RANKS = 4


class Rank:
    """One of four ranks of a group: its receiver, which has published its lease."""

    def __init__(self, rank: int) -> None:
        me = Incarnation(bytes([rank]) * 16)
        lease = LeaseId(me, 1)
        request = make_request(key=KEY)
        handshake = handshake_of(start(make_decode(), request))
        prefill = PREFILL._replace(rank=rank)
        self.nonce = Nonce(prefill.incarnation, 100 + rank)
        self.peer = prefill
        self.lease = lease
        self.receiver = Receiver(KEY, lease, 8, handshake.ids_hash, 0.0)
        self.ids_hash = handshake.ids_hash
        self.receiver.topology_mapped([prefill])
        self.receiver.advanced(None)
        self.receiver.advanced(Admission(handshake, ranges={}))
        self.receiver.claim_received(ClaimFrom(prefill, Claim(KEY, lease, self.nonce)))

    def hear_done(self) -> None:
        record = MetadataRecord(
            room=KEY.room,
            attempt=KEY.attempt,
            nonce=self.nonce,
            output_token_id=7,
            logprob=None,
            num_tokens=8,
            ids_hash=self.ids_hash,
            spec_token_ids=(),
        )
        status = Status(KEY, self.lease, StatusKind.DONE, self.nonce, None, encode_record(record))
        self.receiver.status_received(StatusFrom(self.peer, status))


def one_tick(ranks: list[Rank]) -> list[ReceiverState]:
    """Every rank votes, the minimum binds all of them."""
    outcome = min(rank.receiver.vote() for rank in ranks)
    for rank in ranks:
        commit_receiver(rank.receiver, outcome, lambda: None)
    return [rank.receiver.state for rank in ranks]


def check_same_tick(ranks: list[Rank], arrivals: list[int], fails: int | None) -> None:
    for tick in range(12):
        for number, rank in enumerate(ranks):
            if number == fails and tick == 2:
                rank.receiver.failed_locally(failure("internal", "x"))
            elif arrivals[number] == tick:
                rank.hear_done()
        states = one_tick(ranks)
        assert len(set(states)) == 1, f"tick {tick}: {states}"
    if fails is None or max(arrivals) < 2:
        assert states[0] is ReceiverState.DONE
    else:
        assert states[0] in (ReceiverState.DRAINING, ReceiverState.FAILED)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("fails", [None, 1])
def test_ranks_of_a_group_commit_in_one_tick_whenever_their_metadata_comes(
    seed: int, fails: int | None
) -> None:
    """SGLang PR26394: whether the metadata was there was looked at after the reduction, and
    ranks that had it committed before the others. Readiness is the vote; what comes later
    counts in the next tick, for all of them. (Groups in real processes come later.)"""
    rng = random.Random(seed)
    ranks = [Rank(number) for number in range(NUM_RANKS)]
    check_same_tick(ranks, [rng.randrange(8) for _ in ranks], fails)


def test_a_rank_that_looks_for_its_metadata_after_the_vote_is_caught() -> None:
    """SGLang PR26394: the mutant votes on the transfer alone and commits on what it has."""
    ranks = [Rank(number) for number in range(NUM_RANKS)]

    def commit_by_oneself(ranks: list[Rank]) -> list[ReceiverState]:
        for rank in ranks:
            commit_receiver(rank.receiver, rank.receiver.vote(), lambda: None)
        return [rank.receiver.state for rank in ranks]

    ranks[0].hear_done()
    with pytest.raises(AssertionError):
        assert len(set(commit_by_oneself(ranks))) == 1


# --- where a rank is ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["10.0.0.7", "127.0.0.1", "::1", "fe80::1", "2001:db8::7", "node-7", "node-7.example.org"],
)
@pytest.mark.parametrize("is_bracketed", [False, True])
def test_decode_finds_a_rank_under_every_spelling_of_its_host(
    host: str, is_bracketed: bool
) -> None:
    """SGLang PR10389, 27608, 29459: an IPv6 literal lost or doubled its brackets on the way
    through the registration. From a rank's address to what decode connects to, unchanged."""
    shown = f"[{host}]" if ":" in host else host
    address = f"tcp://{shown}:40123"
    setup = make_setup(PREFILL._replace(address=address))
    told = registration_of(setup)
    assert (told.rank_ip, told.rank_port) == (host, 40123)
    if is_bracketed:
        told = msgspec.structs.replace(told, rank_ip=shown)
    table = RankTable(RankTableConfig("prefill", setup.layout))
    table.register(told, 0.0)
    encoded = table.route(0.0)
    assert encoded is not None
    route = msgspec.json.decode(encoded.body, type=Route)
    decode = Topologies(make_setup())
    assert decode.record("here", route, None, 0.0).refusal is None
    found = decode.targets(route, 1, 0)
    assert isinstance(found, tuple)
    assert [peer.address for peer in found[0]] == [address]
    assert split_host_port(f"{shown}:40123") == (host, 40123)
    assert normalise_address(f"{shown}:40123") == f"http://{shown}:40123"


class Asked:
    """A bootstrap client that only notes who was asked."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def fetch_route(self, address: str, etag: str = "") -> RouteReply:
        self.addresses.append(address)
        return RouteReply(failure=failure("unreachable", "nobody there"))


@pytest.mark.parametrize("given", ["10.0.0.7", "2001:db8::7", "[2001:db8::7]", "node-7"])
@pytest.mark.parametrize("is_named", [False, True])
def test_decode_may_ask_the_prefill_it_was_given_under_every_spelling(
    given: str, is_named: bool
) -> None:
    """SGLang PR10389, 27608, 29459: the router names the bootstrap server without brackets, the
    flags may have them; what is allowed is the same host to the leader and to its worker,
    whether --prefill-ips names it or it is decode's own (--ips)."""
    bare = given.strip("[]")
    node = NodeFlags(host="0.0.0.0", ips=(given,), prefill_ips=(given,) if is_named else ())
    config = DisaggConfig(**disagg_flags("decode", node))
    assert config.local_ip == bare
    options = LegOptions(
        Role.DECODE,
        "here:1",
        allowed_bootstraps=frozenset(config.allowed_bootstraps),
        local_hosts=frozenset({config.local_ip}),
    )
    world = World()
    app = create_instance_app(InstanceOptions(options), TEXT, world.dispatcher, clock=world.clock)

    async def scene() -> Submit:
        body = {"prompt": "hi", "bootstrap_room": 5, "attempt": 7, "bootstrap_host": bare}
        one = Call(app, "POST", "/generate", {**body, "bootstrap_port": 18800})
        while not world.link.of(Submit) and not one.task.done():
            await asyncio.sleep(0)
        (submit,) = world.link.of(Submit)
        one.leave()
        await one.done()
        return submit

    bootstrap = run(scene()).bootstrap
    client = Asked()
    fetch = RouteFetcher(client, config.allowed_bootstraps or (config.local_ip,))
    assert fetch(bootstrap).failure == failure("unreachable", "nobody there")
    assert client.addresses == [bootstrap] == [f"{bracket(bare)}:18800"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", ""])
def test_a_wildcard_is_bound_and_never_registered(host: str) -> None:
    """SGLang PR10389, 27608, 29459: with 0.0.0.0 in the route every decode connected to itself.
    Refused where the rank is configured, where its socket is opened and where it registers."""
    told = registration_of(make_setup(PREFILL))
    with pytest.raises(InvalidRequest, match="nobody can connect to"):
        RankTable(RankTableConfig("prefill", make_setup().layout)).register(
            msgspec.structs.replace(told, rank_ip=host), 0.0
        )
    if host.strip("[]"):
        with pytest.raises(ConfigError):
            ZmqChannel(host)
        with pytest.raises(ValueError, match="nobody can connect to"):
            DisaggConfig(local_ip=host.strip("[]"))
