"""Public reports, group C: a wait that nothing ends.

TensorRT-LLM, vLLM, vllm-ascend, LMCache, Dynamo, NIXL. Every test drops, delays or kills one
thing, and asks the same: does everybody still get one end, within the bound, with the cause?
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from pdcore.background import Background
from pdcore.clock import ManualClock
from pdcore.config import CoreLimits
from pdcore.control.bootstrap_client import BootstrapClient
from pdcore.control.messages import Finished
from pdcore.engine.simulated import SimulatedRunner
from pdcore.errors import failure
from pdcore.fsm.events import TopologyFetched
from pdcore.server.routes import RouteFetcher
from pdcore.testing.transport_checks_process import receiver_stopped
from pdcore.testing.transport_harness import LoopbackHarness
from pdcore.testing.world import World, make_world
from pdcore.types import RoomKey
from tests.scenarios.reports.fleet import (
    FIVE,
    PROMPT,
    check_failed_without_text,
    check_nothing_leaked,
    check_right,
    is_posted,
    let_bytes_move,
    make_fleet,
)

#: Longest wait for a real thread or socket; never a measure of anything.
PATIENCE_S = 20.0
#: What decode may say of a prefill that failed.
CAUSES = {"cancelled", "transfer_failed", "internal", "peer_lost", "unavailable", "unreachable"}


def drop_nth_frame(world: World, number: int) -> list[bytes]:
    """The n-th frame that anybody sends is lost; returns where it is kept."""
    counter = itertools.count()
    lost: list[bytes] = []
    for rank in world.ranks.values():
        channel = rank.worker.ports.channel
        send = channel.send

        def losing(to: str, frame: bytes, send=send) -> bool:
            if next(counter) == number:
                lost.append(frame)
                return True
            return send(to, frame)

        channel.send = losing
    return lost


@pytest.mark.parametrize("number", range(8))
def test_any_one_frame_may_be_lost(number: int) -> None:
    """TRT-LLM #17665: whichever single frame is lost, be it the one that says that the
    transfer is complete, the request is served; it is asked for again within seconds."""
    world = make_world(seed=2)
    lost = drop_nth_frame(world, number)
    start_s = world.clock.monotonic()
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    check_right(world.decode, key, world.model, PROMPT, 5)
    assert world.clock.monotonic() - start_s < 2.0
    world.settle()
    check_nothing_leaked(world)
    assert lost or number > 4, "a request needs at least five frames"


def fail_prefill(world: World, key: RoomKey, how: str) -> None:
    """Something goes wrong at prefill, now."""
    prefill = world.prefill
    if how == "abort":
        world.abort(key, at="prefill")
    elif how == "transfer":
        faults = world.fabric.faults(prefill.worker.core.setup.me.incarnation)
        faults.fail_after_chunks = 0
    elif how == "engine":
        runner = prefill.worker.runner
        assert isinstance(runner, SimulatedRunner)

        def broken(batch: object) -> object:
            raise RuntimeError("the device is gone")

        runner.execute_model = broken
    else:
        world.fabric.die(prefill.worker.core.setup.me.incarnation)
        prefill.worker.ports.channel.close()
        del world.ranks["prefill"]


@pytest.mark.parametrize("how", ["abort", "transfer", "engine", "death"])
@pytest.mark.parametrize("step", range(9))
def test_decode_hears_of_a_failure_at_any_step_of_prefill(how: str, step: int) -> None:
    """TRT-LLM #12988: prefill fails after so many turns of the loop. Decode has one end in
    bounded time: the failure, or all tokens where the failure came too late to matter."""
    world = make_world(stepped=True, seed=step, limits=CoreLimits(topology_ttl_s=5.0))
    key = world.submit(PROMPT, sampling=FIVE)
    for _ in range(step):
        world.step()
        world.fabric.step()
    start_s = world.clock.monotonic()
    fail_prefill(world, key, how)

    def is_over() -> bool:
        let_bytes_move(world)
        return world.decode.result(key) is not None

    world.run(is_over)
    assert world.clock.monotonic() - start_s < 10.0
    result = world.decode.result(key)
    assert result is not None
    if result.failure is None:
        check_right(world.decode, key, world.model, PROMPT, 5)
    else:
        code = check_failed_without_text(world.decode, key)
        assert code in CAUSES
        assert result.failure.detail
    world.run(lambda: (let_bytes_move(world) or True) and not world.decode.worker.core.live_keys())
    check_nothing_leaked(world)


# --- discovery ----------------------------------------------------------------------------------


@contextmanager
def bad_server(answer: bytes | None) -> Iterator[str]:
    """Answers every request with these bytes; None: accepts and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if answer is None:
            yield address  # the kernel accepts, nobody reads
            return

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if not connection.recv(65536):
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield address
        finally:
            # A connection without a request is the end.
            socket.create_connection(listener.getsockname()).close()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def http(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("500", http("500 oops", b"{}"), "500"),
        ("404", http("404 no", b"not here"), "404"),
        ("garbage", b"\x00\xff not http at all\r\n\r\n", ""),
        ("another service", http("200 OK", b'{"hello": "world"}'), "sent no route"),
        ("half a body", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", ""),
        ("silent", None, "timed out"),
        ("nobody", b"", ""),
    ],
)
def test_a_bad_bootstrap_server_is_an_error_with_its_cause(
    name: str, answer: bytes | None, says: str
) -> None:
    """vllm #55870: whatever discovery answers or does not answer, the request ends before its
    client gives up, and the failure names the address and what was wrong there."""
    world = make_world(limits=CoreLimits(topology_ttl_s=1.2, topology_retry_s=0.5))
    with bad_server(http("200 OK", b"") if name == "nobody" else answer) as address:
        if name == "nobody":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
        client = BootstrapClient(ManualClock(), timeout_s=0.2 if answer is None else PATIENCE_S)
        fetch = RouteFetcher(client)
        world.decode.worker.executor.fetch_route = lambda bootstrap: attrs_named(
            fetch(address), bootstrap
        )
        key = world.submit(PROMPT, sampling=FIVE)
        world.run(lambda: world.decode.result(key) is not None)
    assert check_failed_without_text(world.decode, key) == "unreachable"
    result = world.decode.result(key)
    assert result is not None
    assert address in result.failure.detail
    assert says in result.failure.detail
    assert result.timeline["finished"] < 5.0


def attrs_named(event: TopologyFetched, bootstrap: str) -> TopologyFetched:
    """The world calls every bootstrap server by its instance's name."""
    return TopologyFetched(bootstrap, event.route, event.failure)


def test_a_server_that_accepts_and_never_answers_holds_nobody_else() -> None:
    """vllm-ascend layerwise connector: no time-out and a bounded pool. Ten addresses that say
    nothing hold ten calls; the request to a healthy one is served meanwhile, and theirs end
    at their deadline."""
    fleet = make_fleet(1, 1)
    world, rank = fleet.world, fleet.world.ranks["decode-0"]
    gate = threading.Event()
    good = rank.worker.executor.fetch_route

    def fetch(bootstrap: str) -> TopologyFetched:
        if bootstrap.startswith("hung"):
            gate.wait(PATIENCE_S)
            return TopologyFetched(bootstrap, None, failure("unreachable", "timed out"))
        return good(bootstrap)

    background = Background()
    rank.worker.background = rank.worker.executor.background = background
    rank.worker.executor.fetch_route = fetch
    try:
        hung = [fleet.submit(f"hung-{i}", "decode-0", timeout_s=20.0) for i in range(10)]
        world.step()
        key = fleet.submit("prefill-0", "decode-0")
        world.step()
        poll = select.poll()
        poll.register(background.fileno(), select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), "the healthy address waits behind the others"
        assert fleet.finish("decode-0", key).failure is None
        world.run(lambda: all(rank.result(k) for k in hung))
        assert {check_failed_without_text(rank, k) for k in hung} <= {
            "deadline_exceeded",
            "unreachable",
        }
    finally:
        gate.set()
        background.close()


# --- identity -------------------------------------------------------------------------------------


def test_each_side_may_call_the_request_what_it_likes() -> None:
    """vllm #42839: the two halves meet by room and attempt, which came from outside, never
    by an id that an engine made up for itself."""
    world = make_world()
    for name in ("prefill", "decode"):
        port = world.ranks[name].port
        put = port.put

        def renamed(message, put=put, name=name) -> None:
            put(msgspec.structs.replace(message, request_id=f"{name}-only-knows"))

        port.put = renamed
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    check_right(world.decode, key, world.model, PROMPT, 5)


# --- more than one of each ------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 2), (2, 1), (2, 2)])
def test_other_numbers_of_instances_than_one_of_each(num_prefill: int, num_decode: int) -> None:
    """LMCache #2144: what is counted before a request goes on is counted per pair."""
    fleet = make_fleet(num_prefill, num_decode)
    sent = [
        (f"decode-{d}", fleet.submit(f"prefill-{p}", f"decode-{d}", [p * 10 + d + 5] * n))
        for p in range(num_prefill)
        for d in range(num_decode)
        for n in (3, 17)
    ]
    for decode, key in sent:
        assert fleet.finish(decode, key).failure is None
    fleet.world.settle()
    check_nothing_leaked(fleet.world)


def test_a_burst_of_first_contacts() -> None:
    """dynamo #739: many first requests at once between four prefill and four decode
    instances that have never met. All are served; each pair asked for its route once."""
    fleet = make_fleet(4, 4)
    sent = [
        (f"decode-{d}", fleet.submit(f"prefill-{p}", f"decode-{d}", [5 + p, 6 + d, 7 + i]))
        for i in range(3)
        for p in range(4)
        for d in range(4)
    ]
    for decode, key in sent:
        assert fleet.finish(decode, key).failure is None
    assert len(fleet.asked) == 16
    assert set(fleet.asked.values()) == {1}
    fleet.world.settle()
    check_nothing_leaked(fleet.world)


def test_whoever_held_a_queued_request_dies() -> None:
    """dynamo #1074: a prefill dies with requests in its queue and another life takes its
    place; they end with a reason at once, and what comes after is served."""
    world = make_world(limits=CoreLimits(max_prefill_tokens=24, prefill_chunk_tokens=8))
    keys = [world.submit([n] * 20, sampling=FIVE) for n in range(5, 13)]
    world.run(lambda: world.prefill.worker.counters.steps > 0)
    former = world.restart("prefill")
    start_s = world.clock.monotonic()
    world.run(lambda: all(world.decode.result(key) for key in keys))
    assert world.clock.monotonic() - start_s < 10.0
    ends = {world.decode.result(key).failure for key in keys}
    # Which of the two depends on whether its Queued or its claim was out already.
    assert {why.code for why in ends if why is not None} == {"peer_lost", "stale_route"}
    assert former is not world.prefill
    assert len(world.run_request(PROMPT, FIVE)) == 5
    world.settle()
    check_nothing_leaked(world)


# --- a peer that stands still ---------------------------------------------------------------------


def test_a_peer_that_stands_still_and_goes_on_later() -> None:
    """nixl #2047: nothing moves for longer than the request's time; it fails at its deadline.
    When the peer goes on there is no second end, and its blocks come back."""
    world = make_world(num_blocks=16, prefill_blocks=64, stepped=True, seed=3)
    key = world.submit(PROMPT, sampling=FIVE, timeout_s=5.0)
    world.run(lambda: is_posted(world))
    stopped = world.ranks.pop("prefill")  # SIGSTOP: no turn of its loop, no byte moves
    faults = world.fabric.faults(stopped.worker.core.setup.me.incarnation)
    faults.stopped = True
    world.run(lambda: world.decode.result(key) is not None)
    assert check_failed_without_text(world.decode, key) == "deadline_exceeded"
    until_s = world.clock.monotonic() + 60.0
    world.run(lambda: world.clock.monotonic() > until_s)
    assert world.decode.worker.core.blocks.audit()["full"].quarantined == 6
    world.ranks["prefill"] = stopped  # SIGCONT
    faults.stopped = False
    world.run(lambda: (let_bytes_move(world) or True) and not _live(world))
    check_failed_without_text(world.decode, key)
    assert len([m for m in stopped.said if isinstance(m, Finished)]) == 1
    check_nothing_leaked(world)


def _live(world: World) -> bool:
    return any(rank.worker.core.live_keys() for rank in world.ranks.values())


def test_a_stopped_receiver_is_neither_success_nor_a_hang() -> None:
    """nixl #2047: the same question to a transport, where its receiver is stopped."""
    receiver_stopped(LoopbackHarness())
