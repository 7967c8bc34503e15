"""``pdcore up``: Ctrl-C drains, SIGKILL leaves nothing behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

BOUND_S = 60.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, uses pidfd")


class Running:
    """A ``pdcore up`` that has said it is ready."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "pdcore.cli", "up", "--simulated", "--port=0"]
        env = {**os.environ, "PDCORE_CACHE_DIR": str(folder), "PDCORE_RUN_DIR": str(folder)}
        self.process = subprocess.Popen(
            [*command, *arguments], env=env, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.lines: list[str] = []
        for line in self.output:
            self.lines.append(line)
            if line.startswith("ready: http"):
                break

    def descendants(self) -> list[int]:
        """Every process below it."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                parents[int(entry.name)] = int(fields[1])
        found, todo = [], [self.process.pid]
        while todo:
            above = todo.pop()
            below = [pid for pid, parent in parents.items() if parent == above]
            found += below
            todo += below
        return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    up = Running(tmp_path)
    yield up
    up.process.kill()
    up.process.wait()
    up.output.close()


def all_gone(pidfds: list[int]) -> bool:
    gone = []
    for pidfd in pidfds:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        gone.append(bool(poller.poll(BOUND_S * 1000)))
        os.close(pidfd)
    return all(gone)


def test_no_orphan_after_sigkill(running: Running) -> None:
    """Issue item 8: no orphan process after any exit, SIGKILL of the parent included."""
    pids = running.descendants()
    assert len(pids) == 5, "router, two leaders, two workers"
    pidfds = [os.pidfd_open(pid) for pid in pids]
    running.process.kill()
    running.process.wait()
    assert all_gone(pidfds)


def test_ctrl_c_drains(running: Running, tmp_path: Path) -> None:
    pidfds = [os.pidfd_open(pid) for pid in running.descendants()]
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(BOUND_S) == 0
    assert all_gone(pidfds)
    for name in ("prefill-0", "decode-0"):
        assert "drained" in (tmp_path / name / "log_0.log").read_text()


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """A request that would run for long does not hold it up."""
    up = Running(tmp_path, "--set=server_config.drain_s=600")
    pidfds = [os.pidfd_open(pid) for pid in up.descendants()]
    url = up.lines[-1].split()[1]
    body = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
        assert answer.readline().startswith(b"data: ")
        os.kill(up.process.pid, signal.SIGSTOP)  # both signals are pending when it goes on
        up.process.send_signal(signal.SIGINT)
        up.process.send_signal(signal.SIGTERM)
        os.kill(up.process.pid, signal.SIGCONT)
        assert up.process.wait(BOUND_S) == 130
        assert all_gone(pidfds)
    up.output.close()
