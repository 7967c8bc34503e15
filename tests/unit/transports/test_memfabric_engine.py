"""The engine over each version of the vendor's stand-in, which moves real bytes. What the real
wheel does, where it is installed, is in tests/conformance/test_memfabric_wheel.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest

from pdcore.errors import TransportError
from pdcore.transports import memfabric_engine
from pdcore.transports.engines import WriteFailed
from pdcore.transports.memfabric_engine import (
    MAX_BATCH,
    PAGE_BYTES,
    MemFabricEngine,
    MemFabricOptions,
)
from tests.unit.transports.memfabric_rig import VERSIONS, Memory, Pair, free_port, options, vendor


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with vendor("1.3.0", monkeypatch) as module:
        yield module


@pytest.fixture(params=["mf_adapter", *VERSIONS])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with vendor(request.param, monkeypatch):
        yield request.param


def test_bytes_arrive_with_every_version(version: str) -> None:
    """R76: the same engine over all wheels so far; ranges go where they are meant to, and
    nowhere else."""
    with Pair(version) as pair:
        assert pair.sender.limits.max_batch == MAX_BATCH
        assert pair.sender.limits.target_page == PAGE_BYTES
        pair.write((0, 4096, 100), (200, 5000, 1), (8192, 0, 4096))
        assert (pair.target.bytes[4096:4196] == pair.source.bytes[:100]).all()
        assert pair.target.bytes[5000] == pair.source.bytes[200]
        assert (pair.target.bytes[:4096] == pair.source.bytes[8192:12288]).all()
        assert not pair.target.bytes[5001:].any()
        assert not pair.target.bytes[4196:5000].any()


def named_before(engine_type: Callable[[], object], host: str) -> str:
    """The seed's rule, and SGLang's: the session is named before ``initialize``."""
    port = engine_type().get_rpc_port()  # type: ignore[attr-defined]
    return f"{host}:{port}"


def named_by_pdcore(engine_type: Callable[[], object], host: str) -> str:
    engine = MemFabricEngine(MemFabricOptions(host=host))
    try:
        return engine.address().decode().split(" ")[1]
    finally:
        engine.close()


def reaches_somebody(session: str) -> None:
    assert not session.endswith(":0"), "a session of port 0 reaches nobody"


def test_a_session_is_named_when_its_port_is_known(fake: ModuleType) -> None:
    """R75: since 1.1.3 ``get_rpc_port`` is 0 until ``initialize`` returned."""
    reaches_somebody(named_by_pdcore(fake.TransferEngine, "127.0.0.1"))
    with pytest.raises(AssertionError):
        reaches_somebody(named_before(fake.TransferEngine, "127.0.0.1"))


@pytest.mark.parametrize("port", [0, "0_1", -5, "", 70000, "12x"])
@pytest.mark.parametrize("which", ["1.0.5", "1.3.0"])
def test_a_port_that_is_none_is_refused(
    which: str, port: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with vendor(which, monkeypatch) as module:
        engine = None
        module.FAULTS.port = port
        with pytest.raises(TransportError, match="port of 1 to 65535"):
            engine = MemFabricEngine(options(which))
        assert engine is None


def test_port_and_process_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.0.4 to 1.1.2 say "port_pid", and take another port at each call: it is asked once."""
    with vendor("1.0.5", monkeypatch), Pair("1.0.5") as pair:
        session = pair.receiver.address().decode().split(" ")[1]
        assert session.endswith(f"_{os.getpid()}")
        assert pair.receiver.address().decode().split(" ")[1] == session


def test_optional_arguments_only_where_the_version_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``nic`` came with 1.3.0; ``store_server_role`` with 1.1.3, as the engine needs it."""
    with vendor("1.3.0", monkeypatch), Pair("1.3.0", nic="eth0") as pair:
        pair.write((0, 0, 8))
    with (
        vendor("1.2.1", monkeypatch),
        pytest.raises(TransportError, match=r"nic: memfabric_hybrid takes none"),
    ):
        MemFabricEngine(options("1.2.1", nic="eth0"))


def test_kinds_of_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    for which, has in (("1.0.0", "DEVICE_RDMA"), ("1.2.1", "DEVICE_URMA"), ("1.3.0", "HOST_RDMA")):
        with vendor(which, monkeypatch), Pair(which, data_op_type=has) as pair:
            pair.write((0, 0, 8))
    with (
        vendor("1.2.1", monkeypatch),
        pytest.raises(TransportError, match=r"'HOST_RDMA'; choose one of DEVICE_RDMA.*SDMA"),
    ):
        MemFabricEngine(options("1.2.1", data_op_type="HOST_RDMA"))


def test_roles_are_spelled_as_the_vendor_wants_them(fake: ModuleType) -> None:
    """ "Prefill" and "Decode", to the letter; anything else is -1."""
    engine = fake.TransferEngine()
    assert engine.initialize("tcp://127.0.0.1", "127.0.0.1", "prefill", 0) == -1
    assert engine.initialize("tcp://127.0.0.1", "127.0.0.1", "Prefill", 0) == 0
    engine.destroy()


def register_decides(fake: ModuleType) -> None:
    """The mutant: an engine counts as started when it takes memory, whatever it said."""
    engine = fake.TransferEngine()
    engine.initialize("tcp://127.0.0.1", "127.0.0.1", "Decode", 0)
    if engine.register_memory(PAGE_BYTES, 4096) != 0:
        raise TransportError("register_memory failed")


def initialize_decides(fake: ModuleType) -> None:
    MemFabricEngine(MemFabricOptions()).close()


def is_refused(start: Callable[[ModuleType], None], fake: ModuleType) -> None:
    with pytest.raises(TransportError, match=r"initialize answered -1 .* CANN, .*\[memfabric\]"):
        start(fake)


def test_initialize_decides(fake: ModuleType) -> None:
    """``register_memory`` says 0 after an ``initialize`` that failed; what is told names the
    remedy."""
    fake.FAULTS.start_code = -1
    is_refused(initialize_decides, fake)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        is_refused(register_decides, fake)


def test_lists_of_different_length_never_get_there(fake: ModuleType) -> None:
    """The vendor answers -1, which could mean anything; nothing was written."""
    engine = fake.TransferEngine()
    assert engine.batch_transfer_sync_write("127.0.0.1:1", [1], [], [8]) == -1
    with Pair("1.3.0") as pair:
        one = np.array([pair.source.base], np.int64)
        with pytest.raises(WriteFailed, match="1 sources, 0 targets, 1 sizes") as failed:
            pair.sender.write(pair.peer, one, one[:0], one, lambda: False)
        assert not failed.value.may_land
        assert not fake.FAULTS.batches


def test_a_code_is_a_failure_that_may_still_land(fake: ModuleType) -> None:
    """D58, G4: some ranges are in place, all inside what was named, and more may come."""
    with Pair("1.3.0") as pair:
        fake.FAULTS.codes.append(-3)
        fake.FAULTS.lands_first = 1
        with pytest.raises(WriteFailed, match=r"2 ranges .* answered -3") as failed:
            pair.write((0, 0, 100), (100, 200, 100))
        assert failed.value.may_land
        assert pair.target.bytes[:100].any()
        assert not pair.target.bytes[100:].any()
        pair.write((0, 0, 100))


def test_what_lands_late_is_within_the_declared_time(fake: ModuleType) -> None:
    with Pair("1.3.0", lands_late_s=7.0) as pair:
        fake.FAULTS.codes.append(-1)
        fake.FAULTS.late = threading.Event()
        with pytest.raises(WriteFailed) as failed:
            pair.write((0, 0, 64))
        assert failed.value.may_land
        assert pair.sender.limits.lands_late_s == 7.0
        assert not pair.target.bytes.any()
        fake.FAULTS.late.set()
        assert fake.FAULTS.landed_late.wait(10.0)
        assert pair.target.bytes[:64].any()


def test_a_sender_that_has_not_heard_of_the_memory_tries_again(fake: ModuleType) -> None:
    """The vendor's senders look every 3 s for what receivers registered, and until then refuse a
    write whole: the first requests after a start would all fail."""
    with Pair("1.3.0", settle_timeout_s=60.0) as pair:
        pauses: list[float] = []
        pair.sender._pause = pauses.append
        fake.FAULTS.unknown_for = 4
        pair.write((0, 0, 100))
        assert len(pauses) == 4
        assert (pair.target.bytes[:100] == pair.source.bytes[:100]).all()


def test_it_does_not_try_for_ever(fake: ModuleType) -> None:
    with Pair("1.3.0", settle_timeout_s=0.0) as pair:
        fake.FAULTS.unknown_for = 1
        with pytest.raises(WriteFailed, match="no such memory") as failed:
            pair.write((0, 0, 100))
        assert not failed.value.may_land
    with Pair("1.3.0", settle_timeout_s=60.0) as pair:
        fake.FAULTS.unknown_for = 1
        with pytest.raises(WriteFailed):
            pair.write((0, 0, 100), is_stopping=True)


def test_memory_that_is_not_registered_is_not_written(version: str) -> None:
    """D58: the vendor looks at what the receiver registered, too; unregistered is gone."""
    with Pair(version) as pair:
        pair.receiver.unregister(pair.target.base, pair.target.size)
        with pytest.raises(WriteFailed):
            pair.write((0, 0, 8))
        assert not pair.target.bytes.any()


def registered(fake: ModuleType, engine: MemFabricEngine) -> dict[int, int]:
    slices: dict[int, int] = engine._sides["Decode"].engine._slices  # type: ignore[attr-defined]
    return slices


def opens_whole_pages_only(fake: ModuleType) -> None:
    """What the receiver's engine is given for peers is what was meant for them, whatever else
    is registered."""
    engine = MemFabricEngine(MemFabricOptions())
    whole, short, odd = Memory(4096), Memory(4096), Memory(PAGE_BYTES, off=4096)
    others = [(short.base, 4096), (odd.base, PAGE_BYTES)]
    try:
        engine.register(whole.base, whole.size)
        engine.register(*others[0])
        engine.address()
        engine.register(*others[1])
        assert registered(fake, engine) == {whole.base: PAGE_BYTES}
        for base, size in others:
            engine.unregister(base, size)
        assert registered(fake, engine) == {whole.base: PAGE_BYTES}
    finally:
        engine.close()


def test_only_whole_pages_are_opened_to_peers(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D58: the vendor rounds out to 2 MiB, and a neighbour's bytes would be writable with it.
    Memory elsewhere is a source and no more. The mutant registers all, as the seed does."""
    opens_whole_pages_only(fake)
    monkeypatch.setattr(
        memfabric_engine, "_is_target", lambda base, size_bytes: not base % PAGE_BYTES
    )
    with pytest.raises(AssertionError):
        opens_whole_pages_only(fake)


def test_the_vendor_refuses_what_does_not_begin_at_a_page(fake: ModuleType) -> None:
    engine = fake.TransferEngine()
    assert engine.initialize("tcp://127.0.0.1", "127.0.0.1", "Decode", 0) == 0
    assert engine.register_memory(PAGE_BYTES + 64, 4096) == -1
    engine.destroy()


def test_memory_that_is_registered_twice(fake: ModuleType) -> None:
    """It is open to peers until both are over; another size at one place is refused."""
    with Pair("1.3.0") as pair:
        base, size = pair.target.base, pair.target.size
        pair.receiver.register(base, size)
        with pytest.raises(TransportError, match="is registered with 2097152 bytes"):
            pair.receiver.register(base, 2 * size)
        pair.receiver.unregister(base, size)
        pair.write((0, 0, 8))
        pair.receiver.unregister(base, size)
        with pytest.raises(WriteFailed):
            pair.write((0, 0, 8))


def test_a_source_may_lie_anywhere(fake: ModuleType) -> None:
    with Pair("1.3.0") as pair:
        odd = Memory(4096, off=12345)
        odd.bytes[:] = 7
        pair.sender.register(odd.base, 4096)
        target = np.array([pair.target.base + 3], np.int64)
        one = np.array([odd.base + 1], np.int64)
        pair.sender.write(pair.peer, one, target, np.array([4000], np.int64), lambda: False)
        assert (pair.target.bytes[3:4003] == 7).all()
        assert not pair.target.bytes[4003:].any()


def test_memory_that_the_vendor_refuses(fake: ModuleType) -> None:
    with Pair("1.3.0") as pair:
        fake.FAULTS.register_code = -9
        more = Memory(4096)
        with pytest.raises(TransportError, match="register_memory of 2097152 bytes answered -9"):
            pair.receiver.register(more.base, more.size)
        fake.FAULTS.register_code = 0
        with pytest.raises(TransportError, match="unregister_memory"):
            pair.receiver.unregister(more.base, more.size)


def test_memory_that_one_side_refuses_neither_has(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may free it: the vendor must not know a place that is somebody else's then."""
    with Pair("1.3.0") as pair:
        sides, more = pair.receiver._sides, Memory(4096)
        assert list(sides) == ["Prefill", "Decode"]
        said: list[tuple[str, int]] = []
        prefill, decode = (side.engine for side in sides.values())
        monkeypatch.setattr(decode, "register_memory", lambda base, size: -9)
        for role, engine in (("Prefill", prefill), ("Decode", decode)):
            monkeypatch.setattr(
                engine, "unregister_memory", lambda base, role=role: said.append((role, base)) or 0
            )
        with pytest.raises(TransportError, match=r"answered -9 \(Decode\)"):
            pair.receiver.register(more.base, more.size)
        assert said == [("Prefill", more.base)]


def test_memory_refused_when_a_peer_asks_leaves_no_engine(fake: ModuleType) -> None:
    engine = MemFabricEngine(MemFabricOptions())
    memory = Memory(4096)
    engine.register(memory.base, memory.size)
    fake.FAULTS.register_code = -9
    with pytest.raises(TransportError):
        engine.address()
    fake.FAULTS.register_code = 0
    assert b" 127.0.0.1:" in engine.address()
    engine.close()


@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"memfabric/own-store/SDMA",
        b"memfabric/own-store/SDMA 127.0.0.1:0",
        b"memfabric/own-store/SDMA 127.0.0.1:70000",
        b"memfabric/own-store/SDMA 127.0.0.1:5_",
        b"memfabric/own-store/SDMA host:5",
        b"memfabric/own-store/SDMA 1.2.3.4:5 6",
        b"memfabric/own-store/DEVICE_RDMA 127.0.0.1:5",
        b"memfabric/shared-store/SDMA 127.0.0.1:5",
        b"\xff" * 70000,
    ],
)
def test_a_foreign_address_is_refused(fake: ModuleType, address: bytes) -> None:
    """D58: what comes from outside is checked, and a peer of another kind is told apart."""
    with Pair("1.3.0") as pair, pytest.raises(TransportError, match="memfabric"):
        pair.sender.open(address)


def test_a_peer_that_was_shut_is_not_written_to(fake: ModuleType) -> None:
    with Pair("1.3.0") as pair:
        pair.sender.shut(pair.peer)
        pair.sender.shut(pair.peer)
        with pytest.raises(WriteFailed, match="not open"):
            pair.write((0, 0, 8))


def test_a_receiver_that_closed_is_not_written_to(version: str) -> None:
    with Pair(version) as pair:
        pair.write((0, 0, 8))
        pair.receiver.close()
        pair.target.bytes[:] = 0
        with pytest.raises(WriteFailed):
            pair.write((0, 0, 8))
        assert not pair.target.bytes.any()


def test_engines_of_one_process_outlive_each_other(fake: ModuleType) -> None:
    """``unInitialize`` is of the whole process: the last engine calls it, no other."""
    with Pair("1.3.0") as pair:
        MemFabricEngine(MemFabricOptions()).close()
        pair.write((0, 0, 8))
        assert fake._PLACE.is_up
    assert not fake._PLACE.is_up


def test_no_engine_is_destroyed_around_a_call(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that hangs keeps its engine; close is bounded and tells no lie later."""
    monkeypatch.setattr("pdcore.transports.memfabric_engine.END_TIMEOUT_S", 0.05)
    ended: list[str] = []
    with Pair("1.3.0") as pair:
        engine = pair.sender._sides["Prefill"].engine
        fake.FAULTS.hold = threading.Event()
        thread = threading.Thread(target=pair.write, args=((0, 0, 8),))
        thread.start()
        assert fake.FAULTS.began.wait(10.0)
        monkeypatch.setattr(engine, "destroy", lambda: ended.append("destroyed"), raising=False)
        pair.sender.close()
        assert not ended
        fake.FAULTS.hold.set()
        thread.join(10.0)
        assert pair.target.bytes[:8].any()
        with pytest.raises(WriteFailed, match="not open"):
            pair.write((0, 0, 8))
        monkeypatch.delattr(engine, "destroy")
        memfabric_engine._end(pair.sender._vendor, engine)


def test_close_is_bounded_where_the_vendor_is_not(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdcore.transports.memfabric_engine.END_TIMEOUT_S", 0.05)
    engine = MemFabricEngine(MemFabricOptions())
    fake.FAULTS.hold_destroy = threading.Event()
    with pytest.raises(TransportError, match="did not end within"):
        engine.close()
    engine.close()
    fake.FAULTS.hold_destroy.set()
    for thread in threading.enumerate():
        if thread.name == "memfabric end":
            thread.join(10.0)
    with pytest.raises(TransportError, match="closed"):
        engine.register(PAGE_BYTES, 4096)
    with pytest.raises(TransportError, match="closed"):
        engine.address()


def test_the_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: one worker starts the store, and the others may be there before it."""
    with vendor("1.0.5", monkeypatch) as module:
        url = f"tcp://127.0.0.1:{free_port()}"
        tries: list[float] = []

        def pause(seconds: float) -> None:
            tries.append(seconds)
            if len(tries) == 3:
                assert module.create_config_store(url) == 0

        engine = MemFabricEngine(MemFabricOptions(store_url=url), pause)
        assert len(tries) == 3
        engine.close()


def test_a_store_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with vendor("1.0.5", monkeypatch):
        url = f"tcp://127.0.0.1:{free_port()}"
        chosen = MemFabricOptions(store_url=url, start_timeout_s=0.01)
        with pytest.raises(TransportError, match=r"exactly one worker .*creates_store"):
            MemFabricEngine(chosen)


def test_the_store_of_newer_versions_is_their_own(fake: ModuleType) -> None:
    """R14: ignored where none is needed; nobody waits for it."""
    engine = MemFabricEngine(MemFabricOptions(store_url=f"tcp://127.0.0.1:{free_port()}"))
    assert not fake._PLACE.stores
    engine.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"host": "localhost"}, "host: 'localhost' is not a numeric IPv4 address"),
        ({"host": "::1"}, "host: '::1' is not a numeric IPv4"),
        ({"creates_store": True}, "creates_store: store_url is missing"),
    ],
)
def test_options_that_cannot_be(fake: ModuleType, more: dict[str, object], message: str) -> None:
    with pytest.raises(TransportError, match=message):
        MemFabricEngine(MemFabricOptions(**more))  # type: ignore[arg-type]
