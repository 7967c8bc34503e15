"""`import pdcore` is cheap and exports what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pdcore

SOURCE = str(Path(pdcore.__file__).parents[1])
#: Nothing here may be loaded by `import pdcore`: the weight, and what pulls it in.
HEAVY = ("torch", "zmq", "starlette", "uvicorn", "numpy", "msgspec", "transitions", "attrs")


def python(code: str, cache: Path, *flags: str) -> str:
    """Run code in a fresh interpreter with its own bytecode cache; return what it prints."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": SOURCE, "PYTHONPYCACHEPREFIX": str(cache)}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    code = f"import sys, pdcore\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    assert python(code, tmp_path) == "[]"


def test_import_costs_no_more_than_its_small_dependencies(tmp_path: Path) -> None:
    """At most 2.5 times the CPU of importing attrs, msgspec and transitions.

    Runs are interleaved and the least user CPU of each counts, because the machine is shared.
    The first run of each fills the bytecode cache and does not count.
    """
    measure = (
        "import resource\n"
        "def used(): return resource.getrusage(resource.RUSAGE_SELF).ru_utime\n"
        "before = used()\nimport {}\nprint(used() - before)"
    )
    ours, theirs = measure.format("pdcore"), measure.format("attrs, msgspec, transitions")
    costs: dict[str, list[float]] = {ours: [], theirs: []}
    for round_ in range(6):
        for code, seen in costs.items():
            cost = float(python(code, tmp_path))
            if round_:
                seen.append(cost)
    assert min(costs[ours]) <= 2.5 * min(costs[theirs])


def test_every_export_resolves_to_what_its_table_says() -> None:
    assert set(pdcore.__all__) == {"__version__", *pdcore._EXPORTS}
    for name, (module, attribute) in pdcore._EXPORTS.items():
        value = getattr(pdcore, name)
        home = sys.modules[module]
        assert value is (vars(home)[attribute] if attribute else home)


def test_exports_are_listed_and_kept() -> None:
    assert set(pdcore.__all__) <= set(dir(pdcore))
    assert pdcore.types is vars(pdcore)["types"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        pdcore.Manager  # noqa: B018


def test_type_checkers_see_every_export() -> None:
    """The TYPE_CHECKING block and the table of exports name the same things."""
    import ast

    tree = ast.parse(Path(pdcore.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(pdcore._EXPORTS)
