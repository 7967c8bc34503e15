"""``pdcore doctor``: what works on this machine, and the remedy for what does not.

Nothing vendor-made is imported: a broken driver must not break its own diagnosis.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from cyclopts import Parameter

if TYPE_CHECKING:
    from pdcore.transports.base import TransportCaps

OK: Final = "ok"
#: Missing, but the demo runs without it.
NOTE: Final = "note"
#: The demo cannot run.
BAD: Final = "bad"

#: distribution -> what needs it; the base dependencies are there or nothing would run.
_EXTRAS: Final = {
    "torch": ("the model engine", "pip install 'pdcore[model]'"),
    "tokenizers": ("text in and out", "pip install 'pdcore[model]'"),
    "jinja2": ("chat templates", "pip install 'pdcore[model]'"),
    "hypothesis": ("pdcore.testing", "pip install 'pdcore[testing]'"),
}
_NEEDED_BY_DEMO: Final = ("torch", "tokenizers", "jinja2")
_BASE: Final = ("attrs", "msgspec", "numpy", "pyzmq", "starlette", "uvicorn", "transitions")
#: KV pools of the demo, both roles, and something to spare.
_DEMO_MEMORY_BYTES: Final = 2 << 30


class Finding(NamedTuple):
    area: str
    name: str
    status: str
    detail: str
    remedy: str = ""


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Say what is installed, which transports work here and what they can do, and why others
    do not. `pdcore verify transport --all` goes on from there and checks what they promise.

    Exit status 0: `pdcore demo` can run. 1: something it needs is missing; the remedy is
    printed.

    Examples: `pdcore doctor`, `pdcore doctor --json | jq '.findings[]'`

    Parameters
    ----------
    as_json
        One JSON object, for programs and bug reports: `works`, `findings`, and `transports` by
        name with `available`, `reason`, `remedy`, `capabilities` and, where they are not the
        same there, `capabilities_between_hosts`.
    """
    findings = list(examine())
    works = not any(f.status == BAD for f in findings)
    if as_json:
        rows = [f._asdict() for f in findings]
        report = {"works": works, "findings": rows, "transports": transports()}
        print(json.dumps(report, indent=2))
    else:
        _print(findings, works)
    return 0 if works else 1


def examine() -> Iterator[Finding]:
    """Every check, cheap ones first. Never raises for what it finds."""
    yield from _platform()
    yield from _packages()
    yield from _accelerators()
    yield from _model()
    yield from _memory()
    yield from _transports()
    yield from _ports()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _platform() -> Iterator[Finding]:
    from pdcore import __version__

    yield Finding("system", "pdcore", OK, __version__)
    yield Finding("system", "python", OK, f"{platform.python_version()} ({sys.executable})")
    machine = f"{platform.system()} {platform.machine()}"
    full = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    yield Finding(
        "system",
        "platform",
        OK if full else NOTE,
        machine,
        "" if full else "only Linux on x86-64 or aarch64 is supported fully",
    )
    yield Finding("system", "cores", OK, f"{_num_cores()} usable of {os.cpu_count()}")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _packages() -> Iterator[Finding]:
    for name in _BASE:
        version = _version(name)
        yield Finding("package", name, OK if version else BAD, version or "not installed")
    for name, (purpose, remedy) in _EXTRAS.items():
        version = _version(name)
        if version is not None:
            yield Finding("package", name, OK, version)
        else:
            status = BAD if name in _NEEDED_BY_DEMO else NOTE
            yield Finding("package", name, status, f"not installed: needed for {purpose}", remedy)


def _accelerators() -> Iterator[Finding]:
    """torch_npu without its driver breaks ``import torch`` itself; say so without trying."""
    from pdcore.config_loader import load_environment

    version = _version("torch_npu") or _version("torch-npu")
    if version is None:
        yield Finding("package", "torch_npu", NOTE, "not installed: NPU only")
        return
    if ctypes.util.find_library("ascendcl") is not None:
        yield Finding("package", "torch_npu", OK, version)
        return
    detail = f"{version} is installed, but libascendcl.so (CANN) is not found"
    if not load_environment().torch_autoload:
        yield Finding("package", "torch_npu", NOTE, f"{detail}; not loaded automatically")
        return
    yield Finding(
        "package",
        "torch_npu",
        NOTE,
        f"{detail}: `import torch` fails in your own programs (pdcore's workers are shielded)",
        "install CANN, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall torch_npu",
    )


def _model() -> Iterator[Finding]:
    from pdcore.config_loader import load_environment
    from pdcore.engine.load import EMBEDDED_REMEDY, EMBEDDED_SHA256, locate_embedded_model

    path = locate_embedded_model()
    if path is None:
        remedy = f"{EMBEDDED_REMEDY} (or name a model: pdcore up --model PATH)"
        yield Finding("model", "embedded model", BAD, "not installed", remedy)
        return
    size_mib = path.stat().st_size >> 20
    yield Finding("model", "embedded model", OK, f"{path} ({size_mib} MiB)")
    weights = load_environment().cache_dir / "weights"
    converted = (
        any(weights.glob(f"{EMBEDDED_SHA256[:32]}.*.safetensors")) if weights.is_dir() else False
    )
    yield Finding(
        "model",
        "converted weights",
        OK,
        f"in {weights}" if converted else f"will be made once in {weights} (513 MiB)",
    )


def _memory() -> Iterator[Finding]:
    if sys.platform != "linux":
        yield Finding("memory", "shared memory", NOTE, "sealed memory files are Linux's")
        return
    try:
        os.close(os.memfd_create("pdcore-doctor", os.MFD_ALLOW_SEALING))
        yield Finding("memory", "memfd_create", OK, "sealed memory files work")
    except OSError as error:
        yield Finding("memory", "memfd_create", NOTE, str(error), "shm cannot be used")
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding("memory", "pidfd_open", OK, "the death of a peer is noticed at once")
    except OSError as error:
        yield Finding("memory", "pidfd_open", NOTE, str(error), "shm cannot be used")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        yield Finding("memory", "/dev/shm", OK, f"{free >> 20} MiB free (pdcore does not use it)")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    enough = total >= _DEMO_MEMORY_BYTES
    yield Finding(
        "memory",
        "memory",
        OK if enough else NOTE,
        f"{total >> 20} MiB, {available >> 20} MiB of it unused",
        "" if enough else "use a smaller pool: pdcore up --kv-cache-bytes 67108864",
    )


def transports() -> dict[str, dict[str, object]]:
    """Name -> what ``--json`` says of a transport."""
    from pdcore.transports import registry

    return {
        found.name: {
            "available": found.reason is None,
            "reason": found.reason,
            "remedy": found.remedy,
            "capabilities": _as_json(found.caps),
            "capabilities_between_hosts": _as_json(found.caps_between_hosts),
        }
        for found in map(registry.presence, registry.names())
    }


def _as_json(caps: TransportCaps | None) -> dict[str, object] | None:
    return None if caps is None else caps.as_json()


def _transports() -> Iterator[Finding]:
    from pdcore.errors import ConfigError
    from pdcore.transports import registry

    for found in map(registry.presence, registry.names()):
        abilities = "" if found.caps is None else _abilities(found.caps, found.caps_between_hosts)
        if found.reason is None:
            detail = f"works here: {abilities}" if abilities else "works here"
            yield Finding("transport", found.name, OK, detail)
        else:
            yield Finding("transport", found.name, NOTE, found.reason, found.remedy)
    try:
        yield Finding("transport", "auto", OK, f"means {registry.resolve('auto')}")
    except ConfigError as error:
        yield Finding("transport", "auto", BAD, str(error))


def _abilities(caps: TransportCaps, between_hosts: TransportCaps | None = None) -> str:
    """The capabilities that decide where one is of use; all of them: docs/transports.md. A
    period of quarantine is said for both places, where they differ."""
    said = [
        "between hosts" if caps.cross_host else "within one host",
        f"{' and '.join(caps.device_kinds)} memory",
        f"revocation {caps.revocation.value}",
    ]
    if caps.quarantine_s:
        said[-1] += f" of {caps.quarantine_s:g} s"
        if between_hosts is not None and between_hosts.quarantine_s != caps.quarantine_s:
            said[-1] += f" ({between_hosts.quarantine_s:g} s between hosts)"
    if not caps.native_notify:
        said.append("no notifications of its own")
    if not caps.detects_peer_death:
        said.append("does not see a peer die")
    return ", ".join(said)


def _ports() -> Iterator[Finding]:
    from pdcore.config.deploy import BOOTSTRAP_PORT, HTTP_PORTS, LOOPBACK

    for name, number in {**HTTP_PORTS, "bootstrap": BOOTSTRAP_PORT}.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((LOOPBACK, number))
                yield Finding("port", name, OK, f"{number} is free")
            except OSError:
                remedy = "name another port, or 0 for a free one (`pdcore demo` takes free ones)"
                yield Finding("port", name, NOTE, f"{number} is in use", remedy)


def _print(findings: list[Finding], works: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {OK: "green", NOTE: "yellow", BAD: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for area in dict.fromkeys(f.area for f in findings):
        for row, f in enumerate(x for x in findings if x.area == area):
            detail = f"{f.detail}\n-> {f.remedy}" if f.remedy else f.detail
            title = area if row == 0 else ""
            table.add_row(title, f.name, Text(f.status, styles[f.status]), Text(detail))
    console = Console()
    console.print(table)
    if works:
        console.print("\nReady: `pdcore demo`", markup=False)
    else:
        console.print("\n`pdcore demo` cannot run yet: follow the arrows above.", markup=False)
