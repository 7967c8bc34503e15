"""The model across two hosts, KV over sockets: what transformers says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.oracle.test_cluster import GOLDENS, run
from tests.scenarios.hosts import WHY_NOT, Deployment, two_hosts
from tests.scenarios.processes import fetch, until

pytestmark = [pytest.mark.oracle, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def test_prompts_across_two_hosts(tmp_path: Path) -> None:
    with two_hosts() as (a, b):
        pair = Deployment(a, b, tmp_path)
        try:

            def is_up() -> bool:
                status, _ = b.run(lambda: asyncio.run(fetch(pair.origin, "/health")))
                return status == 200

            until(is_up, pair.router.pid, 60.0, "the router sees both instances")
            b.run(lambda: asyncio.run(run(pair.origin, GOLDENS[:4], 4, 24)))
        finally:
            pair.close()
