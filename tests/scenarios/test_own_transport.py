"""The transport of docs/your-transport.md, installed by its own metadata: the whole suite, and
a worker pair that serves over it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcore.cli import main
from pdcore.errors import TransportError
from pdcore.testing.conformance import CHECKS, run_conformance
from pdcore.testing.transport_checks_growth import Footprint
from pdcore.testing.transport_harness import RegistryHarness
from pdcore.transports import registry
from tests.unit.transports.exhaustion import descriptors_left

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_transport"
NAME = "files"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its peers need Linux")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As `pip install` does it: the module and its metadata on sys.path. The folder where its
    files go."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / "site" / "files_transport-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = project["entry-points"][registry.ENTRY_POINT_GROUP]
    rows = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{rows}")
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(info.parent)
    importlib.invalidate_caches()
    # Workers of a cluster are started anew, and look where their environment says.
    source = EXAMPLE.parents[1] / "src"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (info.parent, EXAMPLE, source))))
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setenv("TMPDIR", str(files))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield files
    sys.modules.pop("files_transport", None)


def test_without_descriptors_it_says_so_and_leaves_none_open(installed: Path) -> None:
    """What a guide shows is copied: nothing but TransportError, and nothing left open (G7)."""
    harness = RegistryHarness(NAME)
    for count in range(8):
        sender, receiver = harness.create(), harness.create()
        receiver.allocate(4096)
        descriptor = receiver.descriptor()
        with descriptors_left(count):
            for call in (
                lambda: harness.create().close(),
                lambda sender=sender, known=descriptor: sender.connect(known),
                lambda sender=sender: sender.allocate(4096),
                receiver.poll,
            ):
                with contextlib.suppress(TransportError):
                    call()
        sender.allocate(4096)
        sender.connect(descriptor)
        assert sender.close() == receiver.close() == []
        harness.create().close()
        if not count:
            before = Footprint.now()
        assert Footprint.now().fds == before.fds
    assert not list(installed.iterdir())


def test_it_passes_the_whole_suite_and_leaves_nothing(installed: Path) -> None:
    report = run_conformance(RegistryHarness(NAME, cycles=30))
    assert report.failed == {}
    assert report.skipped == {"doorbell_rings": "declares no doorbell"}
    assert len(report.passed) == len(CHECKS) - 1
    # What killed processes left is swept by the next that starts.
    RegistryHarness(NAME).create().close()
    assert list(installed.iterdir()) == []


def test_the_page_shows_what_the_command_prints() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "your-transport.md").read_text(encoding="utf-8")
    assert f"files          {len(CHECKS) - 1}       0        1 " in page


@pytest.mark.usefixtures("installed")
def test_the_commands_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    """What the page says: doctor and verify, by its name."""
    assert main(["verify", "transport", NAME, "--only", "writes_arrive", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["transports"][NAME]
    assert printed["checks"]["passed"] == ["writes_arrive"]
    assert printed["capabilities"]["submit_blocks"] is True
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["transports"][NAME]["available"] is True


@pytest.mark.usefixtures("installed")
def test_a_cluster_serves_over_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Router, prefill and decode as processes; the simulated engine proves every KV block."""
    assert main(["demo", "--simulated", "--transport", NAME]) == 0
    assert "where the time went" in capfd.readouterr().out
