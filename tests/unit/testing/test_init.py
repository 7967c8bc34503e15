"""The kit's public names, and that asking for one does not load the others."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pdcore.testing as kit

SOURCE = Path(kit.__file__)


def test_every_export_resolves_to_what_its_table_says() -> None:
    assert set(kit.__all__) == set(kit._EXPORTS) <= set(dir(kit))
    for name, module in kit._EXPORTS.items():
        assert getattr(kit, name) is vars(sys.modules[module])[name]


def test_type_checkers_see_every_export() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == kit._EXPORTS


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'pdcore\.testing' has no attribute 'nothing'"):
        kit.nothing  # noqa: B018


def test_importing_the_kit_loads_none_of_it() -> None:
    """A test's peer process imports one module of it, and starts often."""
    code = (
        "import sys, pdcore.testing\n"
        "print([m for m in ('zmq', 'numpy', 'hypothesis', 'pdcore.worker') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parents[2])},
    )
    assert done.stdout.strip() == "[]"
