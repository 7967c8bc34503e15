"""What is declared is what is pinned, and every install is held to the pins."""

from __future__ import annotations

import ast
import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.meta.source import PACKAGE, ROOT, parse_quietly

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Only where its hardware is; never installed by a session of noxfile.py.
UNPINNED = {"torch-npu"}


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) not in found, f"{name} is pinned twice"
            found[canonicalize_name(name)] = Version(version)
    return found


def requirements() -> list[Requirement]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def test_every_dependency_is_pinned_inside_its_range() -> None:
    pinned = pins()
    for one in requirements():
        name = canonicalize_name(one.name)
        if name not in UNPINNED:
            assert name in pinned, f"{name} has no pin in constraints.txt"
            assert pinned[name] in one.specifier, f"{one} does not admit {pinned[name]}"


def test_every_dependency_has_a_lower_bound() -> None:
    for one in requirements():
        assert any(part.operator == ">=" for part in one.specifier), f"{one}: no lower bound"


def test_every_install_of_a_session_is_held_to_the_pins() -> None:
    tree = parse_quietly((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    calls = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "session.install"
    ]
    assert calls
    for call in calls:
        assert "CONSTRAINTS" in call or "--no-deps" in call, call


def test_the_package_is_typed_and_its_build_reads_one_version() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert PROJECT["dynamic"] == ["version"]
    text = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    assert len(re.findall(r'^__version__ = "\d+\.\d+\.\d+"$', text, re.MULTILINE)) == 1


def test_the_command_is_declared() -> None:
    assert PROJECT["scripts"] == {"pdcore": "pdcore.cli:main"}


#: Modules of transports whose tests above a wheel are skipped where there is none.
VENDORS = {"mooncake", "nixl", "nixl_vendor", "memfabric", "memfabric_vendor"}


def asks_for_a_wheel(source: str) -> bool:
    """Whether tests of a file are skipped where a vendor's wheel is missing: it is asked for
    when the file is imported, and not by one of its tests."""
    tree = parse_quietly(source)
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "why_unavailable"
        and ast.unparse(node.value) in VENDORS
        for statement in tree.body
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        for node in ast.walk(statement)
    )


def test_what_needs_a_wheel_runs_in_a_session_that_installs_it() -> None:
    """24 tests of nixl and 3 of mooncake ran nowhere: `tests` installs no vendor, and the session
    that does ran its own folder only."""
    tree = parse_quietly((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    (session,) = (
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "conformance"
    )
    assert "install_vendors(session)" in session
    gated = [
        path
        for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
        if asks_for_a_wheel(path.read_text(encoding="utf-8"))
    ]
    assert len(gated) >= 3
    for path in gated:
        assert f"{{unit}}/{path.name}" in session, f"{path.name} runs in no session"
    assert not asks_for_a_wheel("def test_it() -> None:\n    assert nixl.why_unavailable()\n")
    assert asks_for_a_wheel("real = skipif(mooncake.why_unavailable() is not None)\n")
