"""A leader with a real worker process: ready, unhealthy when it dies, ready again, drained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import attrs
import pytest

from pdcore.config import DisaggConfig, InstanceConfig, ModelConfig, SchedulerConfig, ServerConfig
from pdcore.config_loader import load_instance
from pdcore.errors import ConfigError
from pdcore.server.client import HttpClient, Origin
from pdcore.server.leader import Leader, Place
from pdcore.server.process import EXIT_FAILED, EXIT_USAGE, Bound, Failed, Health, Ready, Report
from pdcore.server.serve import AppServer

BOUND_S = 60.0
CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "configs"
CONFIG = InstanceConfig(
    model=ModelConfig(model_path="simulated"),
    disagg=DisaggConfig(role="prefill", http_port=0, bootstrap_port=0),
    server=ServerConfig(restart_initial_s=0.01, drain_s=1.0, log_level="error"),
)


class Rig:
    """One leader in this process, whose reports can be waited for."""

    def __init__(self, config: InstanceConfig, folder: Path) -> None:
        self.reports: list[Report] = []
        self._news = asyncio.Event()
        self.stopping = asyncio.Event()
        self.leader = Leader(config, Place(folder, folder), self._on_report)
        self.running = asyncio.ensure_future(self.leader.run(self.stopping))

    def _on_report(self, report: Report) -> None:
        self.reports.append(report)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def get(self, address: str, path: str) -> tuple[int, dict[str, Any]]:
        return await self.request("GET", address, path)

    async def request(
        self, method: str, address: str, path: str, body: object = None
    ) -> tuple[int, dict[str, Any]]:
        host, _, port = address.rpartition(":")
        data = b"" if body is None else json.dumps(body).encode()
        client = HttpClient()
        try:
            reply = await client.request(method, Origin(host, int(port)), path, data)
            return reply.status, json.loads(await reply.read())
        finally:
            await client.aclose()


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await main()

    asyncio.run(bounded())


async def health(rig: Rig) -> tuple[int, dict[str, object]]:
    return await rig.get(rig.leader.instance, "/health")


def test_the_life_of_an_instance(tmp_path: Path) -> None:
    """R8 (bootstrap listens first), R10 (ready when its ranks are), D45 (a dead worker is
    seen, and started again), D59 (drained), D44 (every port 0)."""

    async def main() -> None:
        rig = Rig(CONFIG, tmp_path)
        await rig.until(lambda: bool(rig.reports))
        assert rig.reports[0] == Bound(rig.leader.instance, rig.leader.bootstrap)
        await rig.until(lambda: Ready() in rig.reports)
        status, body = await health(rig)
        assert status == 200
        assert body["bootstrap"] == rig.leader.bootstrap
        status, route = await rig.get(rig.leader.bootstrap, "/bootstrap/route")
        assert status == 200
        assert list(route["ranks"]) == ["0,0,0"]

        (pid,) = rig.leader.supervisor.pids().values()
        num_reports = len(rig.reports)
        os.kill(pid, signal.SIGKILL)
        await rig.until(lambda: len(rig.reports) > num_reports)
        lost = rig.reports[num_reports]
        assert isinstance(lost, Health)
        assert "killed by SIGKILL" in lost.problems[0]
        # D48: no decode is sent to the dead any more, long before its lease runs out.
        gone, refusal = await rig.get(rig.leader.bootstrap, "/bootstrap/route")
        assert gone == 503 or refusal["ranks"] != route["ranks"]
        status, body = await health(rig)
        assert (status, body["status"]) == (503, "UnHealthy")
        await rig.until(lambda: rig.reports[-1] == Health([]))
        status, body = await health(rig)
        assert status == 200, body
        status, renewed = await rig.get(rig.leader.bootstrap, "/bootstrap/route")
        assert status == 200
        assert renewed["epoch"] > route["epoch"]
        assert renewed["ranks"]["0,0,0"]["incarnation"] != route["ranks"]["0,0,0"]["incarnation"]

        rig.stopping.set()
        assert await rig.running == 0
        assert rig.leader.supervisor.pids() == {}
        assert (tmp_path / "log_0.log").exists()

    run(main)


async def exited(pid_fd: int) -> None:
    """Returns when the process of a pidfd is gone."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    loop.add_reader(pid_fd, lambda: gone.done() or gone.set_result(None))
    try:
        await gone
    finally:
        loop.remove_reader(pid_fd)
        os.close(pid_fd)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_a_stuck_worker_is_killed_and_restarted(tmp_path: Path) -> None:
    """D45: a process that hangs is like one that died. What it had fails with worker_lost
    instead of waiting for its own deadline, and the next life serves."""

    async def main() -> None:
        server = attrs.evolve(CONFIG.server, worker_health_timeout_s=0.5)
        limits = attrs.evolve(CONFIG.limits, heartbeat_interval_s=0.05)
        rig = Rig(attrs.evolve(CONFIG, server=server, limits=limits), tmp_path)
        await rig.until(lambda: Ready() in rig.reports)
        (pid,) = rig.leader.supervisor.pids().values()
        pid_fd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGSTOP)
        body = {"prompt": [5], "bootstrap_room": 1, "attempt": 1, "max_tokens": 1}
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1}
        status, answer = await rig.request(
            "POST", rig.leader.instance, "/generate", {**body, **where}
        )
        assert (status, answer["error"]["code"]) == (503, "worker_lost")
        assert "no health report for 0.5 s" in answer["error"]["message"]
        await exited(pid_fd)
        await rig.until(lambda: rig.reports[-1] == Health([]))
        assert rig.leader.supervisor.pids()[0] != pid
        assert (await health(rig))[0] == 200
        rig.stopping.set()
        assert await rig.running == 0

    run(main)


def test_post_stop_drains_where_it_was_enabled(tmp_path: Path) -> None:
    """R34; D40: off unless the configuration says so."""

    async def main() -> None:
        server = attrs.evolve(CONFIG.server, enable_stop=True)
        rig = Rig(attrs.evolve(CONFIG, server=server), tmp_path)
        await rig.until(lambda: Ready() in rig.reports)
        status, _ = await rig.request("POST", rig.leader.instance, "/stop")
        assert status == 202
        assert await rig.running == 0
        off = Rig(CONFIG, tmp_path)
        await off.until(lambda: Ready() in off.reports)
        status, _ = await off.request("POST", off.leader.instance, "/stop")
        assert status == 404
        off.stopping.set()
        assert await off.running == 0

    run(main)


def test_a_worker_that_cannot_be_configured_ends_the_instance(tmp_path: Path) -> None:
    """D33: it does not look alive for ever; the message is the worker's own sentence."""

    async def main() -> None:
        small = SchedulerConfig(kv_cache_bytes=1)
        rig = Rig(attrs.evolve(CONFIG, scheduler=small), tmp_path)
        assert await rig.running == EXIT_USAGE
        failed = rig.reports[-1]
        assert isinstance(failed, Failed)
        assert failed.message.startswith("worker 0: the KV pool holds 0 tokens")
        assert not [r for r in rig.reports if isinstance(r, Ready)]

    run(main)


@pytest.mark.parametrize("name", ["prefill", "decode", "small"])
def test_the_example_configurations_start(name: str, tmp_path: Path) -> None:
    """With the simulated engine in the model's place, which is all that is different."""

    async def main() -> None:
        role = "prefill" if name == "prefill" else "decode"
        disagg = {"role": role, "http_port": 0, "bootstrap_port": 0}
        flags: dict[str, dict[str, object]] = {
            "disagg": {**disagg},
            "model_config": {"model_path": "simulated"},
            "server_config": {"log_level": "error"},
        }
        rig = Rig(load_instance(CONFIGS / f"{name}.yaml", flags), tmp_path)
        ready = asyncio.ensure_future(rig.until(lambda: Ready() in rig.reports))
        await asyncio.wait([ready, rig.running], return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), rig.reports
        rig.stopping.set()
        assert await rig.running == 0

    run(main)


def test_stop_before_ready_is_clean(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(CONFIG, tmp_path)
        await rig.until(lambda: bool(rig.reports))
        rig.stopping.set()
        assert await rig.running == 0
        assert rig.leader.supervisor.pids() == {}

    run(main)


def test_what_is_not_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async def main() -> None:
        config = attrs.evolve(CONFIG, model=ModelConfig(model_path="simulated", next_n=2))
        with pytest.raises(ConfigError, match=r"model_config\.next_n"):
            Leader(config, Place(tmp_path, tmp_path), lambda report: None)

    run(main)


def test_d45_a_leader_without_its_http_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D45: it would look alive to its parent and answer nobody."""

    async def main() -> None:
        gone = asyncio.Event()

        class Deaf(AppServer):
            async def ended(self) -> str:
                await gone.wait()
                return "the HTTP server on port 1 has ended"

        monkeypatch.setattr("pdcore.server.leader.AppServer", Deaf)
        rig = Rig(CONFIG, tmp_path)
        await rig.until(lambda: Ready() in rig.reports)
        gone.set()
        assert await rig.running == EXIT_FAILED
        assert rig.reports[-1] == Failed("the HTTP server on port 1 has ended")
        assert rig.leader.supervisor.pids() == {}

    run(main)
