"""Words the project does not use, and things that must not be committed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.source import ROOT, Module, committed_text, modules, parse, parse_quietly

#: Names that say nothing about what a thing is (docs/architecture.md, section 6).
BANNED = {"manager", "managers", "helper", "helpers", "util", "utils", "mixin", "mixins"}
#: A field of the block tables, named so by everything that exchanges KV layouts (R94, R110).
FIELD_WORDS = re.compile(r"manager_keys?", re.IGNORECASE)

VENDORS = re.compile(r"mooncake|nixl|memfabric|hccl|hixl", re.IGNORECASE)
#: A transport's name is its user's word, so these may print it; the table of deployment
#: defaults records what the system before this one used; checks cite where a failure was seen.
NAMES_VENDORS = (
    "pdcore.transports",
    "pdcore.cli.doctor",
    "pdcore.config.deploy",
    "pdcore.testing.transport",
)

# Spelled in pieces so that this file passes its own check.
OUT_OF_REPOSITORY = re.compile(
    "|".join(
        [
            r"\.\./" + r"shared\b",
            r"/work/" + r"\w",
            r"(?<![\w.])shared" + r"/(requirements|design|tools|cases|seeds|hooks)\b",
            r"/tmp/" + r"(v|brief)\b",
            r"/opt/" + r"(wheels|pypi)",
            r"/root" + r"/",
            r"/home" + r"/\w",
        ]
    )
)
REGISTRY = re.compile(
    "|".join(
        [
            r"py" + r"pi\.org",
            r"python" + r"hosted\.org",
            r"npm" + r"js\.(org|com)",
            r"(extra-)?index" + r"-url",
            r"find" + r"-links",
            r"trusted" + r"-host",
        ]
    )
)


def identifiers(module: Module) -> Iterator[tuple[str, int]]:
    """Every name a module gives: classes, functions, arguments, variables, attributes."""
    yield module.name.rsplit(".", 1)[-1], 1
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words(identifier: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    spaced = re.sub(
        r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", FIELD_WORDS.sub("", identifier)
    )
    return {word.lower() for word in spaced.split()}


def banned_names(module: Module) -> list[str]:
    return [
        f"{module.name}:{line} {name}" for name, line in identifiers(module) if words(name) & BANNED
    ]


def test_names_say_what_a_thing_is() -> None:
    found = [line for module in modules() for line in banned_names(module)]
    assert not found, f"banned words in names: {found}"


@pytest.mark.parametrize("text", ["class KVManager: ...", "def f(io_utils): ...", "a.helper = 1"])
def test_a_banned_name_is_found(text: str) -> None:
    assert banned_names(parse(text, "pdcore.example"))


def test_the_words_of_the_field_pass() -> None:
    assert not banned_names(parse("manager_key = 1\nutilisation = 2", "pdcore.example"))


def test_vendor_names_stay_in_transports() -> None:
    found = [
        f"{module.name}:{number} {line.strip()}"
        for module in modules()
        if not module.name.startswith(NAMES_VENDORS)
        for number, line in enumerate(module.text.splitlines(), 1)
        if VENDORS.search(line)
    ]
    assert not found, "vendor names outside transports:\n" + "\n".join(found)


def found_in_files(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path}:{number} {line.strip()[:100]}"
        for path, text in committed_text()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_outside_the_repository_is_referenced() -> None:
    """A clone elsewhere has neither this machine's folders nor its neighbours."""
    found = found_in_files(OUT_OF_REPOSITORY)
    assert not found, "paths outside the repository:\n" + "\n".join(found)


def test_no_package_registry_is_named() -> None:
    """Where packages come from is the user's configuration of pip."""
    found = found_in_files(REGISTRY)
    assert not found, "registries:\n" + "\n".join(found)


SLEEPS = {"time.sleep", "asyncio.sleep", "anyio.sleep", "trio.sleep"}


def sleeps(tree: ast.AST) -> list[int]:
    """Lines of real sleeps; a sleep of literally 0 only yields to the loop."""
    bare = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in {"time", "asyncio", "anyio", "trio"}
        for alias in node.names
        if alias.name == "sleep"
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in SLEEPS | bare
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
    ]


def test_no_test_sleeps() -> None:
    """Tests wait for events, file descriptors or a manual clock, never for time to pass."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in sleeps(parse_quietly(path.read_text(encoding="utf-8")))
    ]
    assert not found, f"sleeps in tests: {found}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import time\ntime.sleep(1)", [2]),
        ("from time import sleep\nsleep(0.1)", [2]),
        ("import asyncio\nasyncio.sleep(delay)", [2]),
        ("import asyncio\nasyncio.sleep(0)", []),
        ("clock.sleep(1)", []),
    ],
)
def test_a_sleep_is_found(text: str, expected: list[int]) -> None:
    assert sleeps(parse_quietly(text)) == expected


def test_the_patterns_have_teeth() -> None:
    assert OUT_OF_REPOSITORY.search("see ../shar" + "ed/design")
    assert OUT_OF_REPOSITORY.search("cd /work" + "/main")
    assert not OUT_OF_REPOSITORY.search("transports/shm keeps shared memory, shared/ or not")
    assert REGISTRY.search("--extra-index" + "-url")
    assert VENDORS.search("MooncakeTransport")
    assert Path(__file__).is_file()
