"""Instances of several ranks, the whole way, against transformers.

Prefill in three tensor parallel processes, decode in one: KV of one head a rank becomes KV of
three heads, and the other way round.
"""

from __future__ import annotations

import asyncio

import pytest

from pdcore.server.client import Origin
from tests.oracle.test_cluster import GOLDENS, run
from tests.scenarios.processes import Program

pytestmark = pytest.mark.oracle


def serve(*flags: str, goldens: list[dict]) -> None:
    program = Program("up", "--port", "0", *flags)
    try:
        ready = program.wait_for(r"ready: http://([\d.]+):(\d+)", timeout_s=110)
        asyncio.run(run(Origin(ready[1], int(ready[2])), goldens, at_once=4))
        assert program.stop() == 0
    finally:
        program.close()


def test_three_prefill_ranks_feed_one_decode_rank() -> None:
    """Issue: SmolLM2 prefill TP3 to decode TP1 says what transformers says."""
    serve("--prefill-tp", "3", goldens=GOLDENS[:8])


def test_one_prefill_rank_feeds_three_decode_ranks() -> None:
    serve("--decode-tp", "3", goldens=GOLDENS[:4])
