from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdcore.errors import TransportError
from pdcore.transports import memfabric, memfabric_vendor
from pdcore.transports.memfabric_vendor import (
    await_store,
    check_session,
    find,
    judge,
    load,
    start_store,
)
from tests.unit.transports.memfabric_rig import (
    VENDORS,
    VERSIONS,
    free_port,
    has_shared_store,
    vendor,
)


@pytest.mark.parametrize("version", ["mf_adapter", *VERSIONS])
def test_a_version_is_known_by_its_signature(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with vendor(version, monkeypatch) as module:
        found = load()
        assert found.name == find() == module.__name__
        assert found.has_own_stores == (not has_shared_store(version))
        assert found.takes_nic == (version == "1.3.0")
        assert {"SDMA", "DEVICE_RDMA"} <= set(found.op_types)
        assert ("HOST_RDMA" in found.op_types) == (version == "1.3.0")
        assert str(found) == module.__name__
        assert found.version == ""


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfabric_vendor, "PACKAGES", {"pdcore_no_such_vendor": "no-such"})
    assert find() is None
    with pytest.raises(TransportError, match="is installed"):
        load()
    assert memfabric.why_unavailable() == "neither pdcore_no_such_vendor is installed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ImportError('libhcom.so: cannot open')", "cannot be imported: libhcom.so"),
        ("raise OSError('libmf_smem.so: no such file')", "cannot be imported: libmf_smem.so"),
        ("raise RuntimeError('no driver')", "cannot be imported: no driver"),
        ("class TransferEngine: ...", "not the package that pdcore knows"),
    ],
)
@pytest.mark.parametrize("name", ["memfabric_hybrid", "mf_adapter"])
def test_a_package_that_is_broken(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R76: an error that helps, whatever the native module raises."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(memfabric_vendor, "PACKAGES", {name: name})
    with pytest.raises(TransportError, match=f"{name} is .*{message}"):
        load()
    sys.modules.pop(name, None)


def test_importing_the_transport_imports_no_vendor() -> None:
    """R76: lazily; looking for it does not load it either."""
    assert not {"memfabric_hybrid", "mf_adapter"} & set(sys.modules)


LOG = (
    "2026-11-30 07:04:31.66 ERROR [1-1][HYBM a.cpp:128 Check] check driver version failed, empty\n"
    "2026-11-30 07:04:31.66 ERROR [1-1][HYBM b.cpp:97 hybm_init] the current version of ascend "
    "driver does not support mf!\n"
    "2026-11-30 07:04:31.66 ERROR [1-1][SMEM c.cpp:52 init] hybm core init failed: -1\n"
)


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "", None),
        (0, LOG, None),
        (0, "\npdcore says: it failed\n", "it failed"),
        (
            0,
            LOG + "\npdcore says: it failed\n",
            "it failed; the library says: the current version of ascend driver does not support "
            "mf!",
        ),
        (
            0,
            "2025 error 9 pid[9] [BM a.cpp:160] no such store\n\npdcore says: it failed\n",
            "it failed; the library says: no such store",
        ),
        (-11, "", "its process ended with -11"),
    ],
)
def test_what_a_trial_says(code: int, output: str, verdict: str | None) -> None:
    """The fact, and the library's own reason where it logged one."""
    assert judge(code, output) == verdict


@pytest.mark.skipif(sys.platform != "linux", reason="memfabric is Linux")
def test_a_trial_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver the library is asked, and the stand-in says that it can do without; it
    is asked once."""
    monkeypatch.setattr(memfabric_vendor, "_DRIVER", Path("/nonexistent"))
    monkeypatch.syspath_prepend(str(VENDORS / "memfabric"))
    assert memfabric.why_unavailable() is None
    monkeypatch.setattr(memfabric_vendor.subprocess, "run", None)
    assert memfabric.why_unavailable() is None


@pytest.mark.skipif(sys.platform != "linux", reason="memfabric is Linux")
def test_where_there_is_a_driver_nothing_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial would start an engine on an NPU that is in use."""
    monkeypatch.syspath_prepend(str(VENDORS / "memfabric"))
    monkeypatch.setattr(memfabric_vendor, "_DRIVER", tmp_path)
    assert memfabric_vendor.why_unavailable("import sys; sys.exit(3)") is None
    monkeypatch.setattr(memfabric_vendor, "_DRIVER", tmp_path / "none")
    assert memfabric_vendor.why_unavailable("import sys; sys.exit(3)") is not None


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfabric_vendor.sys, "platform", "plan9")
    assert memfabric.why_unavailable() == "memfabric needs Linux; this is plan9"


@pytest.mark.parametrize("name", ["10.0.0.5:15000", "10.0.0.5:1", "10.0.0.5:65535_4194304"])
def test_sessions(name: str) -> None:
    assert check_session(name) == name


@pytest.mark.parametrize(
    "name",
    ["10.0.0.5:0", "10.0.0.5:65536", "10.0.0.5", "h:1", "1.2.3.4:5_", "1.2.3.4:05", " 1.2.3.4:5"],
)
def test_sessions_that_are_none(name: str) -> None:
    with pytest.raises(TransportError, match="memfabric session"):
        check_session(name)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "tcp://10.0.0.5",
        "http://10.0.0.5:1",
        "tcp://store:1",
        "tcp://10.0.0.5:0",
        "tcp://10.0.0.5:65536",
        "tcp://[::1]:10002",
    ],
)
def test_store_addresses_that_are_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with vendor("1.0.5", monkeypatch):
        tries: list[Callable[[], None]] = [
            lambda: start_store(load(), url),
            lambda: await_store(url, 1.0, lambda _: None),
        ]
        for one in tries:
            with pytest.raises(TransportError, match=r"store_url: must be tcp:// .*:10002"):
                one()


def test_a_store_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: an address of another machine, or a port that is taken."""
    with vendor("1.0.5", monkeypatch) as module:
        url = f"tcp://192.0.2.1:{free_port()}"
        with pytest.raises(TransportError, match=rf"cannot start a config store at {url} "):
            start_store(load(), url)
        mine = f"tcp://127.0.0.1:{free_port()}"
        start_store(load(), mine)
        start_store(load(), mine)
        assert list(module._PLACE.stores) == [mine]
