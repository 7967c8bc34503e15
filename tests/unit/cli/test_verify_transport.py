"""``pdcore verify transport``: on pdcore's own, and on packages that register one by name."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from pdcore.cli import main
from pdcore.testing.conformance import CHECKS
from pdcore.testing.transport_verify import variants_of
from pdcore.transports import registry
from pdcore.transports.shm import CAPS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the packages build on shm")

#: What a stranger's package might hold: `shm` under names of its own, each with one fault.
PACKAGE = '''
from __future__ import annotations

import os
import threading

from pdcore.errors import TransportError
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.registry import TransportPlugin
from pdcore.transports.shm import CAPS, ShmTransport


class Careless(ShmTransport):
    """Gives memory back while others write to it."""

    name = "careless"

    def descriptor(self):
        mine = decode(super().descriptor(), "shm")
        return EndpointDescriptor(self.name, mine.incarnation, mine.regions, mine.blob).encode()

    def connect(self, descriptor):
        peer = decode(descriptor, self.name)
        translated = EndpointDescriptor("shm", peer.incarnation, peer.regions, peer.blob)
        return super().connect(translated.encode())

    def deregister(self, region):
        try:
            super().deregister(region)
        except TransportError:
            pass


class Crashing(ShmTransport):
    """Dies of a transfer of nothing."""

    name = "crashing"

    def submit(self, session, batches, lease, notify=None):
        if not sum(batch.num_bytes for batch in batches):
            print("the driver says: no such luck", flush=True)
            os.abort()
        return super().submit(session, batches, lease, notify)


class Hanging(ShmTransport):
    """Never comes back from a transfer of nothing."""

    name = "hanging"

    def submit(self, session, batches, lease, notify=None):
        if not sum(batch.num_bytes for batch in batches):
            with open(os.path.join(os.path.dirname(__file__), "pid"), "w") as file:
                file.write(str(os.getpid()))
            threading.Event().wait()
        return super().submit(session, batches, lease, notify)


def never(incarnation, **options):
    raise TransportError("the card is on fire")


def works():
    return None


CARELESS = TransportPlugin(Careless, works, caps=CAPS, cycles=30)
CRASHING = TransportPlugin(Crashing, works)
HANGING = TransportPlugin(Hanging, works)
BURNING = TransportPlugin(never, works)
ABSENT = TransportPlugin(never, lambda: "no card is plugged in", remedy="buy a card", caps=CAPS)
'''

ENTRY_POINTS = """
[pdcore.transports]
careless = strangers_transport:CARELESS
crashing = strangers_transport:CRASHING
hanging = strangers_transport:HANGING
burning = strangers_transport:BURNING
absent = strangers_transport:ABSENT
missing = strangers_missing:PLUGIN
"""


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution, installed as pip does it: a module and its metadata on sys.path."""
    (tmp_path / "strangers_transport.py").write_text(PACKAGE)
    info = tmp_path / "strangers_transport-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers-transport\n"
                                   "Version: 1.0\n")  # fmt: skip
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strangers_transport", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    status = main(["verify", "transport", "--json", *arguments])
    printed: dict[str, object] = json.loads(capsys.readouterr().out)
    return status, printed


def test_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    checks = ["zero_bytes", "odd_offsets"]
    status, printed = report(capsys, "shm", "loopback", "--only", ",".join(checks))
    assert status == 0
    assert printed["ok"] is True
    transports = printed["transports"]
    assert isinstance(transports, dict)
    assert set(transports) == {"shm", "loopback"}
    shm = transports["shm"]
    assert shm["available"] is True
    assert (shm["reason"], shm["remedy"]) == (None, "")
    variants = variants_of("shm")
    assert shm["checks"]["passed"] == [
        f"{check}[{variant}]" if variant else check for variant in variants for check in checks
    ]
    assert (shm["checks"]["failed"], shm["checks"]["skipped"]) == ({}, {})
    assert shm["capabilities"]["revocation"] == "sender_ack"
    assert shm["seconds"] > 0
    kinds = ("receiver_enforced", "sender_ack", "quarantine")
    assert transports["loopback"]["checks"]["passed"] == [
        f"{check}[{kind}]" for kind in kinds for check in checks
    ]


@pytest.mark.usefixtures("strangers")
def test_a_strangers_transport_is_checked_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 4, item 1: a package that registers a transport by entry point, with one promise
    broken on purpose: that check fails, by name, and no other. (Those with processes take long.)"""
    quick = [check.name for check in CHECKS if check.guarantee != "process"]
    status, printed = report(capsys, "careless", "--only", ",".join(quick))
    assert status == 1
    assert printed["ok"] is False
    transports = printed["transports"]
    assert isinstance(transports, dict)
    checks = transports["careless"]["checks"]
    assert list(checks["failed"]) == ["deregister_in_flight"]
    assert "gave a region away that is in use" in checks["failed"]["deregister_in_flight"]
    assert checks["skipped"] == {}
    assert checks["passed"] == [name for name in quick if name != "deregister_in_flight"]


@pytest.mark.usefixtures("strangers")
def test_one_that_crashes_fails_that_check_only(capsys: pytest.CaptureFixture[str]) -> None:
    """A vendor's library that takes the process with it: the rest of the suite goes on."""
    only = "tiny_and_huge,zero_bytes,odd_offsets"
    status, printed = report(capsys, "crashing", "--only", only)
    assert status == 1
    transports = printed["transports"]
    assert isinstance(transports, dict)
    checks = transports["crashing"]["checks"]
    assert checks["passed"] == ["tiny_and_huge", "odd_offsets"]
    assert "died by SIGABRT" in checks["failed"]["zero_bytes"]
    assert "no such luck" in checks["failed"]["zero_bytes"]
    assert transports["crashing"]["capabilities"]["max_batch"] == CAPS.max_batch


def test_one_that_hangs_is_killed(strangers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--only", "zero_bytes", "--timeout-s", "0.2")
    status, printed = report(capsys, "hanging", *options)
    assert status == 1
    transports = printed["transports"]
    assert isinstance(transports, dict)
    failed = transports["hanging"]["checks"]["failed"]
    assert failed == {"zero_bytes": "did not end within 0.2 s: it was killed"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((strangers / "pid").read_text()), 0)


@pytest.mark.usefixtures("strangers")
def test_one_that_cannot_be_made_fails_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "transport", "burning", "--only", "odd_offsets"]) == 1
    shown = capsys.readouterr().out
    assert "burning, odd_offsets: FAILED: no transport could be made" in shown
    assert "the card is on fire" in shown


@pytest.mark.usefixtures("strangers")
def test_what_does_not_work_here_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --all it is no failure; one that was named must work. Both say what helps."""
    monkeypatch.setattr(registry, "names", lambda: ["absent", "loopback", "missing"])
    status, printed = report(capsys, "--all", "--only", "zero_bytes")
    assert status == 0
    transports = printed["transports"]
    assert isinstance(transports, dict)
    absent = transports["absent"]
    assert absent["available"] is False
    assert (absent["reason"], absent["remedy"]) == ("no card is plugged in", "buy a card")
    assert absent["capabilities"]["max_batch"] == CAPS.max_batch
    assert absent["checks"] == {"passed": [], "failed": {}, "skipped": {}}
    assert "strangers_missing" in transports["missing"]["reason"]
    assert "strangers-transport" in transports["missing"]["remedy"]
    assert main(["verify", "transport", "absent"]) == 1
    shown = capsys.readouterr().out
    assert "absent does not work on this machine: no card is plugged in\n  -> buy a card" in shown


def test_the_table_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "transport", "shm", "--only", "zero_bytes"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == ["transport", "shm"]
    assert "holds" in shown
    assert main(["verify", "transport", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(check.name in listed for check in CHECKS)
    assert "loopback" in listed
    assert main(["verify", "transport", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows["checks"]] == [check.name for check in CHECKS]
    assert rows["transports"]["loopback"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a transport, or give --all; there are: loopback"),
        (["rdma"], "no transport 'rdma'; there are: loopback"),
        (["shm", "--all"], "--all is every transport: leave out shm"),
        (["shm", "--only", "nothing"], "--only: no check 'nothing'; there are: minimum_cap"),
        (["shm", "--timeout-s", "0"], "--timeout-s must be more than 0, got 0"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "transport", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
