"""The model across two hosts, KV over sockets and over NIXL: what transformers says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdcore.transports import registry
from tests.oracle.test_cluster import GOLDENS, run
from tests.scenarios.hosts import WHY_NOT, Deployment, two_hosts
from tests.scenarios.processes import fetch, until

pytestmark = [pytest.mark.oracle, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


#: UCX would copy from process to process here, past the cable.
ENV = {"socket": {}, "nixl": {"UCX_TLS": "tcp"}}


@pytest.mark.parametrize("transport", ENV)
def test_prompts_across_two_hosts(tmp_path: Path, transport: str) -> None:
    why_not = registry.presence(transport).reason
    if why_not is not None:
        pytest.skip(f"{transport}: {why_not}")
    with two_hosts() as (a, b):
        pair = Deployment(a, b, tmp_path, transport=transport, env=ENV[transport])
        try:

            def is_up() -> bool:
                status, _ = b.run(lambda: asyncio.run(fetch(pair.origin, "/health")))
                return status == 200

            until(is_up, pair.router.pid, 60.0, "the router sees both instances")
            b.run(lambda: asyncio.run(run(pair.origin, GOLDENS[:4], 4, 24)))
        finally:
            pair.close()
