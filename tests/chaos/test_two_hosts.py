"""Prefill and decode on two hosts: KV over TCP, and a cable that is pulled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ALLOWED = "ip link add va type veth peer name vb && command -v nsenter"


def on_two_hosts(case: str) -> dict[str, object]:
    """What the case found. Skips where namespaces of our own are not allowed."""
    probe = subprocess.run(["unshare", "-rn", "sh", "-c", ALLOWED], capture_output=True)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.decode().strip()}")
    run = ["unshare", "-rn", sys.executable, "-m", "tests.chaos.two_hosts", case]
    done = subprocess.run(run, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux")
def test_prefill_and_decode_on_two_hosts() -> None:
    assert on_two_hosts("serve") == {"tokens": 6, "same": True}


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux")
def test_a_cable_that_is_pulled_in_mid_transfer() -> None:
    """D3, G2: a broken way is no death and frees nothing by itself."""
    wanted = {"failed": True, "unsettled": True, "done": True, "same": True, "deaths": 0}
    assert on_two_hosts("cut") == wanted
