"""The project as data for the meta tests: its modules as syntax trees, its committed files."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "pdcore"


@attrs.frozen
class Module:
    """One module of the package: dotted ``name`` ("pdcore.kv" for a package's own file)."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """The first folder below pdcore, or "" for a module at its top."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (len(parts) == 2 and self.is_package) else ""


def parse_quietly(text: str) -> ast.Module:
    """``ast.parse`` without a garbage collection in it: CPython 3.11 counts the recursion of
    the conversion in one place for the whole process, and whatever Python code a collection
    runs in the middle makes it raise SystemError."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()


def parse(text: str, name: str, path: Path | None = None) -> Module:
    return Module(
        name, path or Path(*name.split(".")).with_suffix(".py"), text, parse_quietly(text)
    )


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, by name."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(parse(path.read_text(encoding="utf-8"), name, path))
    return tuple(sorted(found, key=lambda module: module.name))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and (
        (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
        or (isinstance(node.test, ast.Attribute) and node.test.attr == "TYPE_CHECKING")
    )


def walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Like ast.walk, without what only a type checker sees."""
    yield node
    for child in ast.iter_child_nodes(node):
        if is_type_checking(node) and child in node.body:  # type: ignore[attr-defined]
            continue
        yield from walk_runtime(child)


def imports(module: Module, known: frozenset[str]) -> Iterator[tuple[str, int]]:
    """(imported module, line) of every import that runs, those inside functions included.

    ``from pdcore.kv import blocks`` is an import of pdcore.kv.blocks where ``known`` has one.
    """
    for node in walk_runtime(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in known else base), node.lineno


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    keep = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[:keep], *filter(None, [node.module])])


@functools.cache
def committed_files() -> tuple[Path, ...]:
    """The files git knows, or would if they were added; without git, what is not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
        return tuple(sorted({path for path in paths if path.is_file()}))
    hidden = {".nox", ".git", "__pycache__", ".venv", "venv", "build", "dist"}
    return tuple(
        sorted(
            path
            for path in ROOT.rglob("*")
            if path.is_file() and not hidden & set(path.relative_to(ROOT).parts)
        )
    )


def committed_text() -> Iterator[tuple[Path, str]]:
    """(path relative to the root, text) of every committed text file."""
    for path in committed_files():
        try:
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
