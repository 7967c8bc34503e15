"""The vendor's real wheel, where it is installed: that the stand-in has its interface, and what
it really does on a machine without an NPU. In processes of their own: it starts threads that
nothing ends, and logs to standard output."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pdcore.transports import memfabric
from pdcore.transports.memfabric_vendor import PACKAGES, find

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find() != "memfabric_hybrid", reason="needs the extra `memfabric` (memfabric-hybrid)"
    ),
]
no_driver = pytest.mark.skipif(
    Path("/dev/davinci_manager").exists(), reason="this machine has an Ascend driver"
)
STAND_IN = Path(__file__).resolve().parents[1] / "vendors" / "memfabric"

INTERFACE = """
kind = module.TransferEngine
found = {name: vars(kind)[name].__doc__.splitlines()[0] for name in names if name in vars(kind)}
found |= {name: getattr(module, name).__doc__.splitlines()[0] for name in functions}
found["op types"] = {name: int(value) for name, value in kind.TransDataOpType.__members__.items()}
"""
NAMES = (
    "initialize",
    "get_rpc_port",
    "register_memory",
    "batch_register_memory",
    "unregister_memory",
    "batch_transfer_sync_write",
    "destroy",
    "unInitialize",
)
FUNCTIONS = ("create_config_store", "set_conf_store_tls", "set_log_level")


def run(program: str, first: str = "") -> dict[str, object]:
    """``found`` of a program that has ``module``; from ``first`` on the path, if given."""
    paths = f"sys.path[:] = [{first!r}, *{sys.path!r}]" if first else f"sys.path[:] = {sys.path!r}"
    text = (
        f"import json, os, sys\n{paths}\nimport memfabric_hybrid as module\n"
        f"names, functions, found = {NAMES!r}, {FUNCTIONS!r}, {{}}\n{program}\n"
        "print('\\nfound', json.dumps(found), flush=True)\nos._exit(0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
        env={**os.environ, "FAKE_MEMFABRIC_VERSION": version("memfabric-hybrid")},
    )
    lines = ended.stdout.decode(errors="replace").splitlines()
    (found,) = [line for line in lines if line.startswith("found ")]
    answer: dict[str, object] = json.loads(found.removeprefix("found "))
    return answer


def test_the_stand_in_has_the_interface_of_the_wheel() -> None:
    """Signatures with their defaults, return types, and kinds of operation, of the installed
    version; a wheel whose interface moves on fails here and not on somebody's NPU."""
    real, fake = run(INTERFACE), run(INTERFACE, str(STAND_IN))
    assert real == fake
    assert set(real) == {*NAMES, *FUNCTIONS, "op types"}


def test_a_changed_interface_is_found() -> None:
    """The comparison itself: another version of the stand-in differs."""
    other = "1.0.0" if version("memfabric-hybrid") == "1.3.0" else "1.3.0"
    program = (
        "import importlib\n"
        f"os.environ['FAKE_MEMFABRIC_VERSION'] = {other!r}\n"
        "module = importlib.reload(module)\n" + INTERFACE
    )
    assert run(program, str(STAND_IN)) != run(INTERFACE)


def test_its_config_store_starts_for_real() -> None:
    """R14: our own start and our own wait, against the vendor's server; a visitor that says
    nothing does it no harm, and the same address twice is no error."""
    found = run(
        "from pdcore.transports.memfabric_vendor import await_store, load, start_store\n"
        "import socket\n"
        "with socket.create_server(('127.0.0.1', 0)) as one: port = one.getsockname()[1]\n"
        "url = f'tcp://127.0.0.1:{port}'\n"
        "start_store(load(), url)\n"
        "for _ in range(3): await_store(url, 10.0, lambda _: None)\n"
        "start_store(load(), url)\n"
        "await_store(url, 10.0, lambda _: None)\n"
        "try: start_store(load(), 'tcp://192.0.2.1:5555')\n"
        "except Exception as error: found['elsewhere'] = str(error)\n"
        "found['codes'] = [module.create_config_store(f'tcp://127.0.0.1:{port}'),\n"
        "                  module.create_config_store('http://x')]"
    )
    assert found["codes"] == [0, -2000]
    assert "cannot start a config store at tcp://192.0.2.1:5555 (code -1)" in str(
        found["elsewhere"]
    )


@no_driver
def test_it_does_not_start_without_an_npu_and_says_why() -> None:
    """R76: the reason in the library's own words, and a remedy."""
    reason = memfabric.why_unavailable()
    assert reason is not None
    assert f"memfabric_hybrid {version('memfabric-hybrid')} does not start here" in reason
    assert "initialize answered -1" in reason
    assert "the library says: the current version of ascend driver does not support mf" in reason
    assert "driver and CANN" in memfabric.REMEDY


@no_driver
def test_doctor_says_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pdcore.cli", "doctor", "--json"],
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert "the current version of ascend driver does not support mf" in ended.stdout.decode()


@no_driver
def test_what_the_real_engine_answers() -> None:
    """What pdcore works around, so that it is noticed when it is gone: memory taken by an engine
    that never started, a port 0, a write refused by -1, whatever its lists are."""
    found = run(
        "import ctypes\n"
        "engine = module.TransferEngine()\n"
        "found['port'] = engine.get_rpc_port()\n"
        "for role in 'Prefill', 'prefill', 'Decode':\n"
        "    found[role] = engine.initialize('tcp://127.0.0.1', '127.0.0.1', role, 0)\n"
        "memory = ctypes.create_string_buffer(4096)\n"
        "at = ctypes.addressof(memory)\n"
        "found['register'] = engine.register_memory(at, 4096)\n"
        "found['write'] = engine.batch_transfer_sync_write('127.0.0.1:1', [at], [at], [8])\n"
        "found['lists'] = engine.batch_transfer_sync_write('127.0.0.1:1', [at], [], [8])"
    )
    assert [found[role] for role in ("Prefill", "prefill", "Decode")] == [-1, -1, -1]
    assert [found["write"], found["lists"]] == [-1, -1]
    if version("memfabric-hybrid") == "1.3.0":
        assert found["port"] == 0
        assert found["register"] == 0


@no_driver
def test_an_engine_of_ours_is_refused() -> None:
    found = run(
        "from pdcore.errors import TransportError\n"
        "from pdcore.transports.memfabric import MemFabricEngine, MemFabricOptions\n"
        "with __import__('socket').create_server(('127.0.0.1', 0)) as one:\n"
        "    url = f'tcp://127.0.0.1:{one.getsockname()[1]}'\n"
        "try: MemFabricEngine(MemFabricOptions(store_url=url, creates_store=True))\n"
        "except TransportError as error: found['told'] = str(error)"
    )
    assert "initialize answered -1 for role Prefill, device 0, SDMA" in str(found["told"])
    assert "set_env.sh" in str(found["told"])


def test_the_names_are_those_of_the_registry() -> None:
    assert set(PACKAGES) == {"memfabric_hybrid", "mf_adapter"}
    assert importlib.util.find_spec("memfabric_hybrid") is not None
