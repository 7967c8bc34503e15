"""The wheel of NIXL: found without being imported, tamed, and an agent that sleeps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdcore.errors import TransportError
from pdcore.transports import nixl_vendor

MISSING = nixl_vendor.why_unavailable()
needs_wheel = pytest.mark.skipif(MISSING is not None, reason=f"nixl: {MISSING}")
LIMIT_S = 30.0


def test_a_missing_wheel_is_said_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """R76: with what to install beside it (the plugin's remedy)."""
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    assert nixl_vendor.why_unavailable() == "nixl_cu12 is not installed"
    with pytest.raises(TransportError, match="nixl_cu12 cannot be imported"):
        nixl_vendor.Vendor()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('no driver')", "nixl_cu12 cannot be imported: no driver"),
        ("", "nixl_cu12 is not the package that pdcore knows .*install nixl-cu12"),
    ],
)
def test_a_wheel_that_is_broken(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R76: an error that helps, whatever is found under that name."""
    monkeypatch.delitem(sys.modules, "nixl_cu12", raising=False)
    (tmp_path / "nixl_cu12.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TransportError, match=message):
        nixl_vendor.Vendor()
    sys.modules.pop("nixl_cu12", None)


def test_to_look_for_the_wheel_does_not_import_it() -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from pdcore.transports import nixl_vendor; "
        "nixl_vendor.why_unavailable(); assert 'nixl_cu12' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize("value", ["tcp,cma", "", "tcp;rm", "TLS=tcp"])
def test_several_ways_belong_into_the_environment(value: str) -> None:
    with pytest.raises(TransportError, match=r"ucx_tls: .* set UCX_TLS in the environment"):
        nixl_vendor.ucx_options(value, None)


def test_options_for_ucx() -> None:
    assert nixl_vendor.ucx_options(None, None) == {}
    assert nixl_vendor.ucx_options("tcp", "eth0.7") == {
        "engine_config": "TLS=tcp,NET_DEVICES=eth0.7"
    }


@needs_wheel
def test_what_the_wheel_says_does_not_go_to_standard_output() -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import logging; "
        "from pdcore.transports.nixl import NixlEngine; NixlEngine(bytes(16)).close(); "
        "logging.getLogger('nixl.api').error('seen'); assert logging.raiseExceptions"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert run.stdout == ""
    assert "seen" in run.stderr


@needs_wheel
def test_an_idle_agent_sleeps() -> None:
    """As its own wrapper makes it, one of its threads looks without end."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from pdcore.transports.nixl_vendor import Vendor; agent = Vendor().agent('a', {}); "
        "print('there', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        until(lambda: not states(child.pid).strip("S"))
    finally:
        child.communicate(timeout=LIMIT_S)


def states(pid: int) -> str:
    """One letter for each thread: R runs or wants to, S sleeps."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    stats = ((task / "stat").read_text() for task in tasks)
    return "".join(stat.rpartition(")")[2].split()[0] for stat in stats)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        os.sched_yield()
