"""Every module with code has its test file in tests/unit, and every unit test its module."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.meta.source import ROOT, Module, imports, modules, parse

UNIT = ROOT / "tests" / "unit"

#: Modules without a test file of their own, each with the reason.
EXEMPT: dict[str, str] = {
    "pdcore.engine.base": "a Protocol: its check is the contract suite in pdcore.testing",
    "pdcore.control.base": "a Protocol: its check is the conformance suite in pdcore.testing",
}


#: The public kit consists of checks: transports and engines under test exercise it, so each of
#: its modules must be used by a test, directly or through the kit.
KIT = "pdcore.testing."


def has_code(module: Module) -> bool:
    """Whether a module does more than re-export: it defines a function, a class or a value."""
    return any(
        isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "__all__")
        for node in module.tree.body
    )


def mirror(module: Module) -> Path:
    """pdcore.kv.blocks -> kv/test_blocks.py; a package's own file -> test_init.py in it."""
    if module.name == "pdcore":
        return UNIT / "test_import.py"
    parts = module.name.split(".")[1:]
    if module.is_package:
        return UNIT.joinpath(*parts, "test_init.py")
    return UNIT.joinpath(*parts[:-1], f"test_{parts[-1]}.py")


def test_every_module_has_its_test_file() -> None:
    missing = [
        f"{module.name}: {mirror(module).relative_to(ROOT)}"
        for module in modules()
        if has_code(module)
        and module.name not in EXEMPT
        and not module.name.startswith(KIT)
        and not mirror(module).exists()
    ]
    assert not missing, "modules without a test file:\n" + "\n".join(missing)


def test_every_module_of_the_kit_is_used() -> None:
    known = frozenset(module.name for module in modules())
    users = [module for module in modules() if module.name.startswith("pdcore.testing")]
    users += [
        parse(path.read_text(encoding="utf-8"), f"tests.{path.stem}", path)
        for path in (ROOT / "tests").rglob("*.py")
    ]
    used = {name for module in users for name, _ in imports(module, known) if name != module.name}
    unused = [name for name in known if name.startswith(KIT) and name not in used]
    assert not unused, f"no test uses {sorted(unused)}"


def test_every_unit_test_has_its_module() -> None:
    """A second file of one module is called test_<module>_<subject>.py."""
    mirrors = [mirror(module) for module in modules()]
    stale = [
        path.relative_to(ROOT)
        for path in UNIT.rglob("test_*.py")
        if path not in mirrors
        and not any(
            path.parent == one.parent and path.stem.startswith(f"{one.stem}_") for one in mirrors
        )
    ]
    assert not stale, f"unit tests of no module: {sorted(map(str, stale))}"


def test_every_test_file_tests() -> None:
    """Counted are functions, and hypothesis' state machines turned into TestCase."""
    empty = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "def test_" not in (text := path.read_text(encoding="utf-8")) and ".TestCase" not in text
    ]
    assert not empty, f"test files without a test: {sorted(map(str, empty))}"


def test_exemptions_are_few_and_not_stale() -> None:
    named = {module.name: module for module in modules()}
    stale = [name for name in EXEMPT if name in named and mirror(named[name]).exists()]
    gone = [name for name in EXEMPT if name not in named]
    assert not stale, f"no exemption needed: {stale}"
    assert not gone, f"no such module: {gone}"
    assert len(EXEMPT) <= 5
