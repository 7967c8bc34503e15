from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torchdist needs the extra `torch`")

from pdcore.errors import TransportError
from pdcore.transports import torchdist_group
from pdcore.transports.torchdist_group import (
    GlooBackend,
    GroupFailed,
    HcclBackend,
    PairGroup,
    Staging,
    make_backend,
    relay_store,
)
from pdcore.transports.torchdist_wire import encode_key
from tests.unit.transports.torchdist_rig import HOST, SOON_S, warm_up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
KEY = b"k" * 16


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.fixture
def backend() -> Iterator[GlooBackend]:
    made = GlooBackend(HOST)
    made.build_timeout_s = SOON_S
    yield made
    made.close()


class Hearing:
    """What one side tells the other; ``hear`` waits for it."""

    def __init__(self) -> None:
        self._told: queue.Queue[bytes] = queue.Queue()

    def tell(self, key: str, value: bytes) -> None:
        self._told.put(encode_key(key, value))

    def hear(self) -> bytes:
        return self._told.get(timeout=SOON_S)


def build_pair(backend: GlooBackend) -> tuple[PairGroup, PairGroup]:
    """Both ends of a group, as two processes would build them."""
    forth, back = Hearing(), Hearing()
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(PairGroup, backend, 1, KEY, back.tell, forth.hear)
        sender = PairGroup(backend, 0, KEY, forth.tell, back.hear)
        return sender, receiver.result(SOON_S)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_bytes_go_from_staging_to_staging(backend: GlooBackend, device: str) -> None:
    """More messages than one, of several sizes, each posted for its own size. Named with an
    index, staging is a tensor of its own, filled and emptied as on an NPU."""
    sender, receiver = build_pair(backend)
    mine, theirs = Staging(1 << 16, device), Staging(1 << 16, device)
    rng = np.random.default_rng(3)
    for size in (1, 1 << 16, 1000):
        mine.host[:size] = rng.integers(0, 256, size, np.uint8)
        work = receiver.post(theirs, size)
        sender.send(mine, size, SOON_S)
        receiver.finish(work, theirs, size, SOON_S)
        assert np.array_equal(mine.host[:size], theirs.host[:size])


class Silence(Exception):
    """The connection is over."""


def test_whatever_ends_the_connection_ends_the_building(backend: GlooBackend) -> None:
    """gloo can hang: until both sides know each other, the wait is ours, and what it raises
    comes back out of torch's code."""

    def hear() -> bytes:
        raise Silence

    for rank in (0, 1):
        told = Hearing()
        with pytest.raises(Silence):
            PairGroup(backend, rank, KEY, told.tell, hear)


def test_a_peer_that_does_not_go_on_is_a_failure_in_time(
    backend: GlooBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It told its address, and nobody is there any more: bounded by time-outs of our own."""
    monkeypatch.setattr(torchdist_group, "GREETING_TIMEOUT_S", 0.2)
    backend.build_timeout_s = 0.2
    forth, back = Hearing(), Hearing()

    def build_and_die() -> None:
        def hear() -> bytes:
            raise Silence

        with pytest.raises(Silence):
            PairGroup(backend, 1, KEY, back.tell, hear)

    build_and_die()
    with pytest.raises(GroupFailed):
        PairGroup(backend, 0, KEY, forth.tell, back.hear)


def test_noise_instead_of_a_key_is_refused(backend: GlooBackend) -> None:
    with pytest.raises(TransportError, match="malformed KEY"):
        PairGroup(backend, 0, KEY, Hearing().tell, lambda: b"\xff")


@pytest.mark.parametrize("raised", [ValueError("basic_string::_M_create"), MemoryError("bad")])
def test_what_gloo_makes_of_a_damaged_address_is_a_failed_group(
    backend: GlooBackend, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    """It went through the link's thread, which ended with a traceback."""

    def group(store: object, rank: int) -> object:
        raise raised

    monkeypatch.setattr(backend, "group", group)
    one = Hearing()
    with pytest.raises(GroupFailed, match=str(raised)):
        PairGroup(backend, 0, KEY, one.tell, one.hear)


def test_the_store_asks_only_for_what_it_does_not_know() -> None:
    forth, back = Hearing(), Hearing()
    store = relay_store(forth.tell, back.hear)
    store.set("mine", "1")
    assert store.get("mine") == b"1"
    assert forth.hear() == encode_key("mine", b"1")
    for key in ("other", "theirs"):
        back.tell(key, b"2")
    store.wait(["theirs"])
    assert store.check(["mine", "other", "theirs"])
    assert not store.check(["mine", "never"])


def test_other_threads_see_the_store_and_wait_for_nothing() -> None:
    """hccl looks into it from threads of its own, while ours uses the connection."""
    forth, back = Hearing(), Hearing()
    store = relay_store(forth.tell, back.hear)
    store.set("known", "1")
    forth.hear()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(store.get, "known").result(SOON_S) == b"1"
        with pytest.raises(RuntimeError, match="nobody has set"):
            pool.submit(store.get, "never").result(SOON_S)
        pool.submit(store.set, "late", "2").result(SOON_S)
    assert store.get("late") == b"2"


def test_a_wait_that_timed_out_poisons_the_group(backend: GlooBackend) -> None:
    """A fact of gloo this transport is built around: a wait cannot be taken in slices. If
    this ever fails, the protocol may be simpler."""
    sender, receiver = build_pair(backend)
    staging = Staging(16, "cpu")
    with pytest.raises(GroupFailed, match="Timed out"):
        receiver.finish(receiver.post(staging, 16), staging, 16, 0.05)
    with pytest.raises(GroupFailed):
        receiver.finish(receiver.post(staging, 16), staging, 16, SOON_S)
    del sender


def test_a_peer_that_dropped_its_group_is_an_error_at_once(backend: GlooBackend) -> None:
    sender, receiver = build_pair(backend)
    staging = Staging(16, "cpu")
    work = receiver.post(staging, 16)
    del sender
    with pytest.raises(GroupFailed):
        receiver.finish(work, staging, 16, SOON_S)


def test_a_bad_address_is_named() -> None:
    with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
        GlooBackend("192.0.2.1")


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    """R76: an error that helps."""
    with pytest.raises(TransportError, match=r"nccl.*gloo, hccl"):
        make_backend("nccl", HOST, 0)
    gloo = make_backend("gloo", HOST, 0)
    assert gloo.device == "cpu"
    gloo.close()


def test_hccl_without_torch_npu_says_what_to_install() -> None:
    """R76: native modules are imported lazily, with an error that helps."""
    with pytest.raises(TransportError, match=r"pdcore\[npu\].*CANN"):
        make_backend("hccl", HOST, 0)


class SlowWork:
    """An operation on a stream: ``is_completed`` asks its event."""

    def __init__(self, polls: int, error: str = "") -> None:
        self._polls = polls
        self._error = error

    def is_completed(self) -> bool:
        self._polls -= 1
        return self._polls < 0

    def wait(self, timeout: timedelta) -> bool:
        if self._error:
            raise RuntimeError(self._error)
        return True


@pytest.fixture
def hccl(monkeypatch: pytest.MonkeyPatch) -> tuple[HcclBackend, list[object]]:
    """The backend over a stand-in with the signatures of torch_npu: ``ProcessGroupHCCL(store,
    rank, size, options)`` and ``torch_npu.npu.set_device``."""
    calls: list[object] = []

    class ProcessGroupHCCL:
        class Options: ...

        def __init__(self, store: object, rank: int, size: int, options: object) -> None:
            calls.append((rank, size, vars(options)))

    npu = ModuleType("torch_npu")
    bindings = SimpleNamespace(ProcessGroupHCCL=ProcessGroupHCCL)
    vars(npu)["npu"] = SimpleNamespace(set_device=calls.append)
    vars(npu)["_C"] = SimpleNamespace(_distributed_c10d=bindings)
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    return HcclBackend(3), calls


def test_hccl_builds_with_the_vendors_options(hccl: tuple[HcclBackend, list[object]]) -> None:
    backend, calls = hccl
    assert backend.device == "npu:3"
    backend.enter_thread()
    backend.group(relay_store(Hearing().tell, Hearing().hear), 1)
    timeout = timedelta(seconds=backend.build_timeout_s)
    assert calls == [
        3,
        (
            1,
            2,
            {"is_high_priority_stream": False, "_timeout": timeout, "global_ranks_in_group": []},
        ),
    ]


def test_hccl_waits_for_the_event_and_not_for_ever(
    hccl: tuple[HcclBackend, list[object]],
) -> None:
    """``wait()`` would block the stream only; a hung operation is given up."""
    backend, _ = hccl
    backend.wait(SlowWork(polls=3), SOON_S)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.01 s"):
        backend.wait(SlowWork(polls=1 << 30), 0.01)
    with pytest.raises(RuntimeError, match="link down"):
        backend.wait(SlowWork(polls=0, error="link down"), SOON_S)
