"""Whole clusters whose KV moves through memfabric's interface, by a stand-in of the vendor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from pdcore.server.client import Origin
from tests.meta.source import ROOT
from tests.scenarios.processes import Program
from tests.scenarios.test_socket import ask
from tests.unit.transports.memfabric_rig import why_unmoved

pytestmark = pytest.mark.skipif(why_unmoved() is not None, reason=str(why_unmoved()))


@pytest.fixture
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    secret = tmp_path_factory.mktemp("cluster") / "secret"
    secret.write_text("a secret of enough bytes\n")
    paths = (str(ROOT / "tests" / "vendors" / "memfabric"), os.environ.get("PYTHONPATH", ""))
    where = ("--transport", "memfabric", "--transport-secret-file", str(secret))
    program = Program(
        "up",
        *("--port", "0", "--simulated"),
        *where,
        env={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    try:
        ready = program.wait_for(r"ready: http://([\d.]+):(\d+)")
        yield Origin(ready[1], int(ready[2]))
        assert program.stop() == 0
    finally:
        program.close()


def test_a_cluster_serves_over_memfabric(origin: Origin) -> None:
    """R75, R76: chosen by name; the simulated engine proves every KV block, and a vendor without
    notification, cancel or liveness changes nothing for the caller."""
    asyncio.run(ask(origin))
