"""Tensor parallel ranks as real processes over TCP: equal answers, and no wait without an end."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed import FileStore

from pdcore.engine.base import GroupLost
from pdcore.engine.gloo import connect
from pdcore.engine.llama import LlamaRunner
from pdcore.engine.llama_model import weights_from_arrays
from pdcore.engine.load import load_runner
from pdcore.engine.shard import TensorParallel, TPRank
from pdcore.engine.weights import random_weights
from pdcore.errors import EngineError
from pdcore.testing.runner_rig import Rig
from tests.unit.engine.files import TINY, write_tiny_gguf
from tests.unit.engine.gloo_rank import NUM_TOKENS, PROMPTS, Part, make_rig, say, tensor_parallel

ROOT = Path(__file__).resolve().parents[3]
#: Sums of one step: the vote, two a layer, rank 0's word.
SUMS = 2 + 2 * TINY.num_layers


@contextlib.contextmanager
def process(part: Part) -> Iterator[subprocess.Popen[bytes]]:
    """The other rank. Killed at the end whatever became of it, stopped ones too."""
    argument = msgspec.json.encode(part).decode()
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.engine.gloo_rank", argument],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def meeting_place(kind: str, tmp_path: Path) -> str:
    return f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meet"


def check_tokens(said: list[list[int]]) -> None:
    weights = weights_from_arrays(random_weights(TINY, 1), "float32")
    whole = Rig(LlamaRunner(TINY, weights, fingerprint="tiny"), 32, random.Random(1))
    assert said[: len(PROMPTS)] == whole.generate(PROMPTS, NUM_TOKENS, chunk=16)


def test_two_processes_say_what_one_says(tmp_path: Path) -> None:
    """Greedy tokens are one rank's; drawn ones, without a seed, the same on both."""
    mine = Part(tp_rank=0, tp_size=2, rendezvous=meeting_place("tcp", tmp_path))
    with process(msgspec.structs.replace(mine, tp_rank=1)) as child:
        rig = make_rig(mine)
        said = say(rig)
        rig.runner.shutdown()
        theirs, _ = child.communicate(timeout=100.0)
    assert msgspec.json.decode(theirs, type=list[list[int]]) == said
    check_tokens(said)


def test_four_ranks_that_meet_in_a_file(tmp_path: Path) -> None:
    """The same sockets, in threads of one process; the first to finish leaves at once."""

    def one(tp_rank: int) -> list[list[int]]:
        at = meeting_place("file", tmp_path)
        rig = make_rig(Part(tp_rank=tp_rank, tp_size=4, rendezvous=at))
        said = say(rig)
        rig.runner.shutdown()
        return said

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(one, range(4)))
    assert all(each == said[0] for each in said)
    check_tokens(said[0])


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_rank_that_is_killed_in_the_middle_of_a_step(tp_rank: int, tmp_path: Path) -> None:
    """The other one hears of it from the closed socket, long before its timeout, whether the
    dead one served the rendezvous or not; and no later step runs."""
    at = meeting_place("tcp" if tp_rank == 1 else "file", tmp_path)
    mine = Part(tp_rank=1 - tp_rank, tp_size=2, rendezvous=at, step_timeout_s=3600.0)
    fatal = SUMS + 4
    doomed = msgspec.structs.replace(mine, tp_rank=tp_rank, fatal=fatal, signal=int(signal.SIGKILL))
    with process(doomed) as child:
        rig = make_rig(mine)
        (seq,) = rig.sequences([PROMPTS[0]], NUM_TOKENS)
        with pytest.raises(GroupLost, match=rf"tp_rank {1 - tp_rank} of 2 lost its group"):
            say(rig)
        assert child.wait(60.0) == -signal.SIGKILL
        for _ in range(2):
            with pytest.raises(GroupLost, match="restart all ranks of the instance: it is closed"):
                rig.prefill([seq])
        rig.runner.shutdown()
        rig.runner.shutdown()


def test_a_rank_that_leaves_ends_the_group_for_those_it_does_not_talk_to(tmp_path: Path) -> None:
    """In a ring of four one rank has no socket in use with the one that leaves: it hears of
    it from those that have, since each closes its own on the way out. No timeout is near."""

    def one(tp_rank: int) -> str:
        at = meeting_place("file", tmp_path)
        part = Part(tp_rank=tp_rank, tp_size=4, rendezvous=at, step_timeout_s=3600.0)
        end = connect(tensor_parallel(part), "x")
        values = torch.ones(1000)
        for _ in range(3):
            end.all_reduce(values)
        if tp_rank == 2:
            end.close()
            return ""
        with pytest.raises(GroupLost) as caught:
            end.all_reduce(values)
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        lost = list(pool.map(one, range(4)))
    assert all(f"tp_rank {rank} of 4 lost its group" in lost[rank] for rank in (0, 1, 3))


def test_a_rank_that_hangs_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    """Stopped in its first sum, so that nothing has to be quick here; its sockets stay open."""
    at = meeting_place("file", tmp_path)
    mine = Part(tp_rank=0, tp_size=2, rendezvous=at, step_timeout_s=0.2)
    hanging = msgspec.structs.replace(mine, tp_rank=1, fatal=1, signal=int(signal.SIGSTOP))
    with process(hanging) as child:
        rig = make_rig(mine)
        with pytest.raises(GroupLost, match="lost its group"):
            rig.runner.warm_up()
        assert child.poll() is None
        rig.runner.shutdown()


def test_sums_of_one_and_what_is_closed() -> None:
    """A group of one is a group, over a real socket on the loopback address only."""
    meeting = TensorParallel(rank=TPRank(), rendezvous=f"tcp://127.0.0.1:{free_port()}")
    end = connect(meeting, "x")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
        values = torch.tensor([1, 3], dtype=dtype)
        end.all_reduce(values)
        assert values.tolist() == [1, 3]
    end.close()
    end.close()
    with pytest.raises(GroupLost, match="it is closed"):
        end.all_reduce(torch.zeros(1))


def test_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            port = server.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 here")

    def one(tp_rank: int) -> list[float]:
        at = f"tcp://[::1]:{port}"
        end = connect(TensorParallel(rank=TPRank(2, tp_rank), rendezvous=at, bind_host="::1"), "x")
        values = torch.tensor([1.0, tp_rank])
        end.all_reduce(values)
        return values.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [[2.0, 1.0]] * 2


def test_a_pytorch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(EngineError, match="need a PyTorch that was built with gloo"):
        connect(TensorParallel(rank=TPRank(), rendezvous="tcp://127.0.0.1:1"), "x")


def test_the_rendezvous_listens_where_it_was_told_to() -> None:
    """Decision 5: torch's own store would listen on every address."""
    port = free_port()
    end = connect(TensorParallel(rank=TPRank(), rendezvous=f"tcp://127.0.0.1:{port}"), "x")
    assert f"0100007F:{port:04X}" in listening()
    assert not any(
        line.startswith("0" * 8) and line.endswith(f":{port:04X}") for line in listening()
    )
    end.close()


def listening() -> set[str]:
    """Local addresses of listening IPv4 sockets and of IPv6 ones, in the kernel's hex."""
    found = set()
    for name in ("tcp", "tcp6"):
        table = Path("/proc/net") / name
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        found |= {row.split()[1] for row in rows if row.split()[3] == "0A"}
    return found


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    part = Part(tp_rank=0, tp_size=3, rendezvous=f"file://{tmp_path}/m", rendezvous_timeout_s=0.2)
    with pytest.raises(GroupLost, match=r"tp_rank 1, 2 of 3 did not come within 0\.2 s"):
        connect(tensor_parallel(part), "x")


def test_a_rank_that_dies_between_meeting_and_connecting(tmp_path: Path) -> None:
    """It has said who it is, and never opens a socket."""
    mine = Part(tp_rank=0, tp_size=2, rendezvous=f"file://{tmp_path}/m", rendezvous_timeout_s=1.0)
    store = FileStore(f"{tmp_path}/m", 2)
    store.add("claims/1", 1)
    store.set("identities/1", "tp_size 2, x")
    with pytest.raises(GroupLost, match="tp_rank 0 of 2 could not meet its group at file:///"):
        connect(tensor_parallel(mine), "x")


def test_a_rendezvous_serves_one_start(tmp_path: Path) -> None:
    """A file of an earlier start, or two processes with one rank: never a wrong group."""
    part = Part(tp_rank=0, tp_size=2, rendezvous=f"file://{tmp_path}/m", rendezvous_timeout_s=0.2)
    with pytest.raises(GroupLost, match="did not come"):
        connect(tensor_parallel(part), "x")
    with pytest.raises(EngineError, match="another process has been tp_rank 0 here"):
        connect(tensor_parallel(part), "x")


@pytest.mark.parametrize("at", ["file:///dev/null/x", "tcp://127.0.0.1:{taken}"])
def test_a_place_that_does_not_work_is_named(at: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = at.format(taken=server.getsockname()[1])
        meeting = TensorParallel(rank=TPRank(2, 0), rendezvous=at, rendezvous_timeout_s=0.2)
        with pytest.raises(EngineError, match=rf"tp_rank 0 of 2 could not meet .* {at}"):
            connect(meeting, "x")


def test_nobody_serves_the_rendezvous() -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    meeting = TensorParallel(rank=TPRank(2, 1), rendezvous=at, rendezvous_timeout_s=0.2)
    with pytest.raises(EngineError, match=rf"tp_rank 1 of 2 could not meet .* {at}"):
        connect(meeting, "x")


def test_ranks_that_were_started_differently_refuse_each_other(tmp_path: Path) -> None:
    """Another model, dtype or block size on one rank: told before the first request."""

    def refusal(tp_rank: int) -> str:
        name = ("tiny", "other")[tp_rank]
        at = f"file://{tmp_path}/m"
        with pytest.raises(EngineError) as caught:
            make_rig(Part(tp_rank=tp_rank, tp_size=2, rendezvous=at, identity=name))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        zero, one = pool.map(refusal, range(2))
    assert "tp_rank 0 has tp_size 2, tiny; tp_rank 1 has tp_size 2, other" in zero
    assert "tp_rank 1 has tp_size 2, other; tp_rank 0 has tp_size 2, tiny" in one


def test_load_runner_refuses_before_it_waits_for_anybody(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", TINY, random_weights(TINY, 1))
    three = TensorParallel(rank=TPRank(3, 0), rendezvous=f"file://{tmp_path}/meet")
    with pytest.raises(EngineError, match="tp_size 3 does not divide num_heads 8"):
        load_runner(path, cache_dir=tmp_path / "cache", tensor_parallel=three)
    assert not (tmp_path / "cache" / "weights").exists()
    assert not (tmp_path / "meet").exists()


def test_load_runner_makes_one_rank(tmp_path: Path) -> None:
    """A group of one over a real rendezvous is the whole model."""
    path = write_tiny_gguf(tmp_path / "m.gguf", TINY, random_weights(TINY, 1))
    alone = TensorParallel(rank=TPRank(), rendezvous=f"file://{tmp_path}/meet")
    runner = load_runner(path, cache_dir=tmp_path / "cache", tensor_parallel=alone)
    whole = load_runner(path, cache_dir=tmp_path / "cache")
    assert runner.fingerprint == whole.fingerprint
    assert runner.caps.collectives
    found, expected = (
        Rig(one, 32, random.Random(1)).generate(PROMPTS, 4) for one in (runner, whole)
    )
    assert found == expected
    runner.shutdown()
