"""The layers of docs/architecture.md, checked from the imports.

A module may import only from rows above its own, or from its own row within its package.
Inside row 1 the packages themselves stand in an order (config, topology, kv, control, fsm),
because an effect carries a message and a message carries a placement.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.meta.source import ROOT, Module, imports, modules, parse, walk_runtime

#: row -> what belongs to it; an exact name wins over a pattern, so a new module of a package
#: starts in the row of its pattern and moves to a lower one by being named there. A package's
#: own __init__ runs whenever one of its modules is imported: it belongs to their lowest row.
LAYERS: dict[int, tuple[str, ...]] = {
    0: ("pdcore", "pdcore.errors", "pdcore.types", "pdcore.clock"),
    1: (
        "pdcore.config",
        "pdcore.config.*",
        "pdcore.topology",
        "pdcore.kv",
        "pdcore.kv.*",
        "pdcore.control",
        "pdcore.control.messages",
        "pdcore.control.codec",
        "pdcore.control.ballots",
        "pdcore.fsm",
        "pdcore.fsm.states",
        "pdcore.fsm.events",
        "pdcore.fsm.effects",
        "pdcore.fsm.table",
    ),
    2: (
        "pdcore.fsm.*",
        "pdcore.scheduler",
        "pdcore.scheduler.admission",
        "pdcore.scheduler.retraction",
        "pdcore.scheduler.batch",
        "pdcore.scheduler.chunks",
        "pdcore.scheduler.columns",
        "pdcore.scheduler.sequence",
        "pdcore.scheduler.phase",
        "pdcore.router",
        "pdcore.router.policies",
        "pdcore.control.rank_table",
    ),
    3: ("pdcore.scheduler.*", "pdcore.router.*"),
    4: (
        "pdcore.transports",
        "pdcore.transports.base",
        "pdcore.control.base",
        "pdcore.scheduler.consensus",
        "pdcore.engine",
        "pdcore.engine.base",
    ),
    5: ("pdcore.transports.*", "pdcore.control.*", "pdcore.engine.*"),
    6: (
        "pdcore.worker",
        "pdcore.group_worker",
        "pdcore.executor",
        "pdcore.background",
        "pdcore.summing",
        "pdcore.assembly",
        "pdcore.local",
        "pdcore.system_clock",
        "pdcore.config_loader",
    ),
    7: ("pdcore.server", "pdcore.server.*"),
    8: ("pdcore.fsm.diagram", "pdcore.sim", "pdcore.sim.*", "pdcore.testing", "pdcore.testing.*"),
    9: ("pdcore.cli", "pdcore.cli.*"),
}

PACKAGES = {
    pattern.split(".")[1] for row in LAYERS.values() for pattern in row if pattern.endswith(".*")
}

#: Inside these rows a package may also import from the packages before it in the list.
ORDER_WITHIN_ROW: dict[int, tuple[str, ...]] = {
    1: ("config", "topology", "kv", "control", "fsm"),
    # The rank table drives the rank-registration lifecycle.
    2: ("fsm", "control"),
    # The kit hands the simulator out, which needs nothing of it.
    8: ("fsm", "sim", "testing"),
}

#: Distributions from outside: the first row that may use one, and where.
OUTSIDE: dict[str, tuple[int, str]] = {
    "attr": (0, "*"),
    "attrs": (0, "*"),
    "msgspec": (1, "*"),
    "numpy": (1, "*"),
    "transitions": (2, "pdcore.fsm.*"),
    "torch": (5, "*"),
    "torch_npu": (5, "*"),
    "tokenizers": (5, "pdcore.engine.*"),
    "jinja2": (5, "pdcore.engine.*"),
    "zmq": (5, "*"),
    "mooncake": (5, "pdcore.transports.mooncake"),
    "nixl_cu12": (5, "pdcore.transports.nixl_vendor"),
    "memfabric_hybrid": (5, "pdcore.transports.memfabric_vendor"),
    "mf_adapter": (5, "pdcore.transports.memfabric_vendor"),
    "ruamel": (6, "pdcore.config_loader"),
    "starlette": (7, "*"),
    "uvicorn": (7, "*"),
    "httptools": (7, "*"),
    "prometheus_client": (7, "*"),
    "hypothesis": (8, "pdcore.testing*"),
    "cyclopts": (9, "*"),
    "rich": (9, "*"),
}

#: What would make a core do I/O, read a clock or draw its own randomness, by the first row
#: that may import it. Adapters talk to the operating system and may time themselves or hold a
#: thread a vendor's blocking call needs (the simulator replaces them whole).
STDLIB_BY_ROW: dict[int, str] = {
    5: """asyncio ctypes datetime fcntl http mmap multiprocessing os pathlib secrets select
    selectors shutil signal socket ssl subprocess tempfile threading _thread time urllib uuid""",
    6: "concurrent logging",
}
#: Parts of those that only compute.
PURE = {"urllib.parse"}
STDLIB_FROM = {name: row for row, names in STDLIB_BY_ROW.items() for name in names.split()}

#: Calls that no core makes.
BUILTIN_IO = {"open", "input", "print", "breakpoint", "exec", "eval"}
#: fsm.machine compiles the transition tables into methods (docs/architecture.md, section 3).
MAY_EXEC = {"pdcore.fsm.machine"}


def layer_of(name: str) -> int:
    """The row of a module: an exact name wins over a pattern. Raises LookupError.

    A module at the top of the package that no row names is part of the shell (row 6).
    """
    for row, patterns in LAYERS.items():
        if name in patterns:
            return row
    for row, patterns in LAYERS.items():
        if any("*" in pattern and fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return row
    if name.count(".") == 1 and name.split(".")[1] not in PACKAGES:
        return 6
    raise LookupError(f"{name} belongs to no layer: add it to LAYERS, or rename it")


def package_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def may_import(importer: str, imported: str) -> bool:
    """Whether the table of layers allows one module of the package to import another."""
    row, other = layer_of(importer), layer_of(imported)
    if row != other:
        return other < row
    mine, theirs = package_of(importer), package_of(imported)
    order = ORDER_WITHIN_ROW.get(row, ())
    if mine in order and theirs in order:
        return order.index(theirs) <= order.index(mine)
    return mine == theirs or not {mine, theirs} & PACKAGES


def outside_violation(module: Module, imported: str) -> str | None:
    row = layer_of(module.name)
    root = imported.split(".")[0]
    if root in sys.stdlib_module_names:
        first = 0 if imported in PURE else STDLIB_FROM.get(root, 0)
        return None if row >= first else f"{root} is for rows {first} and below"
    if root not in OUTSIDE:
        return f"{root} is not a dependency that any layer may use"
    first, where = OUTSIDE[root]
    if row < first:
        return f"{root} is for rows {first} and below"
    if not fnmatch.fnmatchcase(module.name, where) and row < 8:
        return f"{root} is for {where} only"
    return None


def violations(module: Module, known: frozenset[str]) -> Iterator[str]:
    row = layer_of(module.name)
    for imported, line in imports(module, known):
        where = f"{module.name}:{line} (row {row}) imports {imported}"
        if imported.split(".")[0] == "pdcore":
            if not may_import(module.name, imported):
                yield f"{where} (row {layer_of(imported)})"
        elif reason := outside_violation(module, imported):
            yield f"{where}: {reason}"
    if row > 3:
        return
    for node in walk_runtime(module.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in BUILTIN_IO
            and not (node.func.id == "exec" and module.name in MAY_EXEC)
        ):
            yield f"{module.name}:{node.lineno} calls {node.func.id}() in row {row}"


def known_names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


def test_imports_follow_the_layers() -> None:
    found = {line: None for module in modules() for line in violations(module, known_names())}
    assert not found, "\n" + "\n".join(found)


def test_dynamic_imports_live_where_the_tables_of_names_are() -> None:
    """An import by string escapes the check above, so only tables of names may do it."""
    allowed = (
        "pdcore",
        "pdcore.testing",
        "pdcore.transports.registry",
        "pdcore.engine.registry",
        "pdcore.cli*",
    )
    found = [
        f"{module.name}:{line}"
        for module in modules()
        if not any(fnmatch.fnmatchcase(module.name, pattern) for pattern in allowed)
        for imported, line in imports(module, known_names())
        if imported == "importlib"
    ]
    assert not found, f"imports by name outside {allowed}: {found}"


CORE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = {"torch", "zmq", "starlette", "uvicorn", "asyncio", "hypothesis", "rich", "cyclopts"}
print(" ".join(sorted(heavy & set(sys.modules))))
"""


def test_cores_load_without_torch_zmq_or_a_web_server() -> None:
    """What the imports say is also what happens: rows 0-4 in a fresh interpreter."""
    names = [module.name for module in modules() if layer_of(module.name) <= 4]
    done = subprocess.run(
        [sys.executable, "-c", CORE, *names],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), f"the cores pulled in {done.stdout}"


@pytest.mark.parametrize(
    ("name", "text", "culprit"),
    [
        ("pdcore.kv.blocks", "import time", "time"),
        ("pdcore.kv.blocks", "def f():\n    import socket", "socket"),
        ("pdcore.kv.blocks", "from pdcore.fsm import sender", "pdcore.fsm.sender"),
        ("pdcore.scheduler.prefill", "from pdcore.worker import Worker", "pdcore.worker"),
        ("pdcore.scheduler.prefill", "from ..worker import Worker", "pdcore.worker"),
        ("pdcore.scheduler.admission", "from transitions import Machine", "transitions"),
        ("pdcore.transports.shm", "from pdcore.engine.gguf import read", "pdcore.engine.gguf"),
        ("pdcore.control.zmq", "import starlette.responses", "starlette"),
        ("pdcore.worker", "import requests", "requests"),
        ("pdcore.fsm.sender", "def f():\n    open('x')", "open()"),
    ],
)
def test_a_violation_is_found(name: str, text: str, culprit: str) -> None:
    """The check has teeth: each line here breaks one rule of the table."""
    known = known_names() | {"pdcore.fsm.sender", "pdcore.worker", "pdcore.engine.gguf"}
    (found,) = violations(parse(text, name), known)
    assert culprit in found


def test_type_checking_imports_do_not_count() -> None:
    text = "if TYPE_CHECKING:\n    from pdcore.worker import Worker\nelse:\n    import json"
    module = parse(text, "pdcore.kv.blocks")
    assert not list(violations(module, known_names() | {"pdcore.worker"}))


def test_every_module_has_a_layer() -> None:
    for module in modules():
        layer_of(module.name)
