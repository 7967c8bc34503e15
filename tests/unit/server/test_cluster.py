"""A whole cluster of real processes over shared memory, with the simulated engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from pdcore.config import InstanceConfig, ModelConfig, SchedulerConfig, ServerConfig
from pdcore.control.bootstrap_client import split_host_port
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.errors import ConfigError
from pdcore.server.client import HttpClient, Origin
from pdcore.server.cluster import Cluster, ClusterConfig, ClusterFailed

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


@pytest.mark.parametrize("count", [0, 65])
def test_counts_are_bounded(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--decode: must be 1 to 64, got {count}"):
        ClusterConfig(num_decode=count)


def test_the_url_is_not_known_before_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="not started"):
            _ = Cluster(ClusterConfig(INSTANCE), tmp_path, tmp_path).url

    run(main)
