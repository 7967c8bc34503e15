"""Leader and router processes: what they read, how they end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from pathlib import Path

import attrs
import msgspec
import pytest

from pdcore.config import DisaggConfig, InstanceConfig, ModelConfig, RouterConfig
from pdcore.errors import ConfigError
from pdcore.server.leader_main import (
    EXIT_FORCED,
    LeaderSpec,
    RouterSpec,
    _until_forced,
    decode_spec,
    log_level_of,
    run_process,
)
from pdcore.server.process import EXIT_USAGE, Failed, Report, spawn

ROUTER = RouterSpec(RouterConfig(port=0, prefill_addrs=("p:1",), decode_addrs=("d:1",)))
LEADER = LeaderSpec(
    InstanceConfig(
        model=ModelConfig(model_path="simulated"),
        disagg=DisaggConfig(http_port=0, bootstrap_port=0),
    ),
    "/cache",
    "/run",
)


@pytest.mark.parametrize("spec", [ROUTER, LEADER])
def test_specs_round_trip(spec: RouterSpec | LeaderSpec) -> None:
    assert decode_spec(msgspec.json.encode(spec)) == spec
    assert log_level_of(spec) == "info"


@pytest.mark.parametrize("data", [b"", b"{}", b'{"type": "router"}', b'{"type": "leader"}'])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="process configuration"):
        decode_spec(data)


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = attrs.evolve(ROUTER.config, port=taken.getsockname()[1])
        reports: list[Report] = []
        assert run_process(RouterSpec(config), reports.append) == EXIT_USAGE
    (failed,) = reports
    assert isinstance(failed, Failed)
    assert "cannot listen on 127.0.0.1:" in failed.message


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    model = ModelConfig(model_path=str(tmp_path / "absent.gguf"))
    config = attrs.evolve(LEADER.config, model=model)
    reports: list[Report] = []
    spec = LeaderSpec(config, str(tmp_path), str(tmp_path))
    assert run_process(spec, reports.append) == EXIT_USAGE
    assert isinstance(reports[-1], Failed)
    assert "absent.gguf" in reports[-1].message


def test_a_router_process_drains_on_sigterm() -> None:
    async def main() -> None:
        child = spawn("router", "pdcore.server.leader_main", msgspec.json.encode(ROUTER))
        is_ready = asyncio.Event()
        child.watch(lambda report: is_ready.set())
        async with asyncio.timeout(60):
            await is_ready.wait()
            assert await child.stop(30) == 0

    asyncio.run(main())


def test_the_second_signal_forces() -> None:
    """Issue item 8: Ctrl-C drains, a second one ends it."""

    async def main() -> None:
        import os
        import signal

        killed: list[bool] = []
        stopping = asyncio.Event()

        async def never_drains() -> int:
            await stopping.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
            return 0

        running: Awaitable[int] = _until_forced(
            never_drains(), stopping, lambda: killed.append(True)
        )
        forced = asyncio.ensure_future(running)
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await forced == EXIT_FORCED
        assert killed == [True]

    asyncio.run(main())
