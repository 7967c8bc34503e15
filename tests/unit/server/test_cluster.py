"""A whole cluster of real processes over shared memory, with the simulated engine."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path

import attrs
import pytest

from pdcore.config import InstanceConfig, ModelConfig, SchedulerConfig, ServerConfig
from pdcore.control.bootstrap_client import split_host_port
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.errors import ConfigError
from pdcore.server.client import HttpClient, Origin
from pdcore.server.cluster import Cluster, ClusterConfig, ClusterFailed
from pdcore.server.leader_main import Spec
from pdcore.server.process import Child
from pdcore.server.serve import bind, port_of

BOUND_S = 90.0
SERVER = ServerConfig(drain_s=2.0, log_level="error")
INSTANCE = InstanceConfig(model=ModelConfig(model_path="simulated"), server=SERVER)


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await main()

    asyncio.run(bounded())


async def complete(client: HttpClient, url: str, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    headers = [("content-type", "application/json")]
    origin = Origin(*split_host_port(url))
    reply = await client.request(
        "POST", origin, "/generate", json.dumps(body).encode(), headers=headers
    )
    answer = json.loads(await reply.read())
    assert reply.status == 200, answer
    tokens: list[int] = answer["token_ids"]
    return tokens


def test_answers_are_right_and_nothing_is_left(tmp_path: Path) -> None:
    """Prefill in one process, decode in another, KV between them over shared memory."""

    async def main() -> None:
        cluster = Cluster(ClusterConfig(INSTANCE), tmp_path, tmp_path / "run")
        client = HttpClient()
        try:
            await cluster.start()
            assert [m.status for m in cluster.members] == ["ready"] * 3
            prompts = [[3 + (i * j) % 900 for j in range(1, 5 + 60 * i)] for i in range(8)]
            answers = await asyncio.gather(*(complete(client, cluster.url, p) for p in prompts))
            expected = [simulated_tokens(SimulatedConfig(), p, 12) for p in prompts]
            assert answers == expected
        finally:
            await client.aclose()
            await cluster.stop()
        statuses = [m.child.exited.result() for m in cluster.members if m.child.exited]
        assert statuses == [0, 0, 0]
        logs = {path.relative_to(tmp_path / "run").as_posix() for path in tmp_path.rglob("*.log")}
        assert logs == {
            "router.log",
            "prefill-0.log",
            "decode-0.log",
            "prefill-0/log_0.log",
            "decode-0/log_0.log",
        }

    run(main)


def test_a_configuration_mistake_reaches_the_user(tmp_path: Path) -> None:
    async def main() -> None:
        small = InstanceConfig(
            model=INSTANCE.model, scheduler=SchedulerConfig(kv_cache_bytes=1), server=SERVER
        )
        cluster = Cluster(ClusterConfig(small), tmp_path, tmp_path / "run")
        with pytest.raises(ConfigError, match="the KV pool holds 0 tokens"):
            await cluster.start()
        await cluster.stop()

    run(main)


def test_a_taken_address_is_said_before_anything_starts(tmp_path: Path) -> None:
    """An instance may load for minutes, and the router, who needs the port, starts last."""

    async def scenario() -> None:
        with bind("127.0.0.1", 0) as taken:
            config = ClusterConfig(port=port_of(taken))
            cluster = Cluster(config, tmp_path / "cache", tmp_path / "run")
            with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:.*choose another"):
                await cluster.start()
            assert cluster.members == []

    asyncio.run(scenario())


def test_a_member_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Cluster(ClusterConfig(INSTANCE), tmp_path, tmp_path / "run")
        starting = asyncio.ensure_future(cluster.start())
        while not cluster.members:
            await asyncio.sleep(0)
        os.kill(cluster.members[1].child.pid, signal.SIGKILL)
        with pytest.raises(ClusterFailed, match=r"decode-0 ended: killed by SIGKILL \(log: .*"):
            await starting
        assert "decode-0" in await cluster.failed()
        cluster.kill()
        await cluster.stop()

    run(main)


async def until(cluster: Cluster, condition: Callable[[], bool]) -> None:
    """The cluster's own news wake us."""
    await cluster._until_true(condition)


QUICK = attrs.evolve(SERVER, restart_initial_s=0.01, restart_max_s=0.02)


def test_d45_a_member_that_dies_is_started_again_and_ends_nobody(tmp_path: Path) -> None:
    """D45: one leader's death is not the cluster's. It comes back at its former addresses,
    where the others look for it, and the next request is served; so does the router."""

    async def main() -> None:
        config = ClusterConfig(attrs.evolve(INSTANCE, server=QUICK))
        cluster = Cluster(config, tmp_path, tmp_path / "run")
        client = HttpClient()
        try:
            await cluster.start()
            url = cluster.url
            expected = simulated_tokens(SimulatedConfig(), [5, 6, 7], 12)
            for victim in cluster.members:
                pids = {m.name: m.child.pid for m in cluster.members}
                bound, former = victim.bound, pids.pop(victim.name)
                os.kill(former, signal.SIGKILL)
                await until(cluster, lambda v=victim, f=former: v.child.pid != f and v.is_ready)
                assert (victim.bound, cluster.url) == (bound, url)
                others = {m.name: m.child.pid for m in cluster.members if m is not victim}
                assert others == pids
                assert await until_served(client, url, [5, 6, 7]) == expected
        finally:
            await client.aclose()
            await cluster.stop()

    run(main)


async def until_served(client: HttpClient, url: str, prompt: list[int]) -> list[int]:
    """The router looks once a second; until it has seen the newcomer the answer is 503."""
    while True:
        try:
            return await complete(client, url, prompt)
        except AssertionError as error:
            if "unavailable" not in str(error) and "worker_lost" not in str(error):
                raise


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "prefill_dp", "decode_dp"), [(2, 1, 1, 2), (2, 2, 2, 1)]
)
def test_groups_of_ranks_serve_and_come_back_whole(
    tmp_path: Path, prefill_tp: int, decode_tp: int, prefill_dp: int, decode_dp: int
) -> None:
    """D1, D2, D45: a process for each rank; one that dies takes its group along, and another
    life of all of them serves the next request. The instance stays, and so do the others."""

    async def main() -> None:
        config = ClusterConfig(
            attrs.evolve(INSTANCE, server=QUICK),
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            prefill_dp=prefill_dp,
            decode_dp=decode_dp,
        )
        cluster = Cluster(config, tmp_path, tmp_path / "run")
        client = HttpClient()
        try:
            await cluster.start()
            leaders = {m.name: m.child.pid for m in cluster.members}
            prompts = [[3 + (i * j) % 900 for j in range(1, 5 + 60 * i)] for i in range(8)]
            answers = await asyncio.gather(*(complete(client, cluster.url, p) for p in prompts))
            assert answers == [simulated_tokens(SimulatedConfig(), p, 12) for p in prompts]
            prefill = cluster.members[0]
            former = children_of(prefill.child.pid)
            assert len(former) == prefill_tp * prefill_dp
            os.kill(former[-1], signal.SIGKILL)
            await until(cluster, lambda: bool(prefill.problems))
            await until(cluster, lambda: not prefill.problems)
            now = children_of(prefill.child.pid)
            # The group of the dead rank, and no other.
            assert len(now) == len(former)
            assert len(set(now) & set(former)) == prefill_tp * (prefill_dp - 1)
            expected = simulated_tokens(SimulatedConfig(), [5, 6, 7], 12)
            assert await until_served(client, cluster.url, [5, 6, 7]) == expected
            assert leaders == {m.name: m.child.pid for m in cluster.members}
        finally:
            await client.aclose()
            await cluster.stop()
        assert [m.child.exited.result() for m in cluster.members if m.child.exited] == [0, 0, 0]

    run(main)


def children_of(pid: int) -> list[int]:
    """Workers, in order of their start."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(c) for t in threads for c in (t / "children").read_text().split())


def test_d45_restarts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D45: a member that cannot be started any more ends the cluster, with the reason."""

    async def main() -> None:
        server = attrs.evolve(QUICK, max_restarts=2)
        cluster = Cluster(
            ClusterConfig(attrs.evolve(INSTANCE, server=server)), tmp_path, tmp_path / "run"
        )
        tries: list[str] = []

        def no_memory(name: str, spec: Spec) -> Child:
            tries.append(name)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        try:
            await cluster.start()
            monkeypatch.setattr(cluster._keeper, "spawn", no_memory)
            os.kill(cluster.members[1].child.pid, signal.SIGKILL)
            reason = await cluster.failed()
        finally:
            await cluster.stop()
        assert reason.startswith("decode-0 ended: cannot be started: Cannot allocate memory")
        assert tries == ["decode-0"] * 3

    run(main)


def test_the_router_is_ready_when_the_instances_are(tmp_path: Path) -> None:
    """It listens before; but until instances serve its answer is 503."""

    async def main() -> None:
        seen: list[list[bool]] = []

        def look() -> None:
            if len(cluster.members) == 3:
                seen.append([m.is_ready for m in cluster.members])

        cluster = Cluster(ClusterConfig(INSTANCE), tmp_path, tmp_path / "run", look)
        try:
            await cluster.start()
        finally:
            await cluster.stop()
        assert [True, True, True] in seen
        assert not [ready for ready in seen if ready[2] and not all(ready)]

    run(main)


@pytest.mark.parametrize("count", [0, 65])
def test_counts_are_bounded(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--decode: must be 1 to 64, got {count}"):
        ClusterConfig(num_decode=count)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_out_of_range_is_one_sentence(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port: must be 0 to 65535, got {port}"):
        ClusterConfig(port=port)


def test_the_url_is_not_known_before_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="not started"):
            _ = Cluster(ClusterConfig(INSTANCE), tmp_path, tmp_path).url

    run(main)
