"""The demo, whole: a cluster of processes, answers as they stream, a table, nothing left."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from pdcore.cli.asking import Answered
from pdcore.cli.demo import size, timeline_table
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens

BOUND_S = 90.0


def test_the_demo_ends_by_itself(tmp_path: Path) -> None:
    """PDCORE_DEMO_EXIT=1 ends it even with --keep; the folder of its logs is gone."""
    env = {**os.environ, "PDCORE_DEMO_EXIT": "1", "TMPDIR": str(tmp_path)}
    env |= {"PDCORE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "pdcore.cli", "demo", "--simulated", "--keep", "--max-tokens=8"],
        env=env,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for count in (5, 64, 500):
        prompt = [3 + (7 * i + count) % 900 for i in range(count)]
        answer = " ".join(map(str, simulated_tokens(SimulatedConfig(), prompt, 8)))
        assert f"> {count} token ids\n{answer}" in done.stdout
    assert "where the time went" in done.stdout
    assert not list(tmp_path.glob("pdcore-*"))


def test_the_table_fits_a_terminal() -> None:
    timeline = {"prefill_queue": 0.002, "prefill_prefill": 1.2345, "prefill_transfer": 0.1}
    table = timeline_table([Answered("x", 8000, 190, 1.0, 2.0, timeline)], 46_080)
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    row = out.getvalue().splitlines()[-1]
    assert "8000+190" in row
    assert "1234.5" in row
    assert "351.6 MiB" in row
    assert "3.4 GiB/s" in row
    assert "…" not in out.getvalue()


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 1572864, 1 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.5 MiB",
        "1024.0 GiB",
    ]
