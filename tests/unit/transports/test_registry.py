from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import attrs
import pytest

from pdcore.errors import ConfigError, TransportError
from pdcore.transports import registry
from pdcore.transports.base import Revocation
from pdcore.transports.loopback import LoopbackTransport, loopback_caps
from pdcore.transports.registry import TransportPlugin, available, create, names, resolve
from pdcore.types import Incarnation

US = Incarnation(b"u" * 16)
broken = TransportPlugin(
    create=LoopbackTransport, why_unavailable=lambda: "no such hardware", remedy="buy some"
)
not_a_plugin = "a string"


def __getattr__(name: str) -> object:
    """Packages whose import does not end in an ImportError."""
    if name == "no_library":
        raise OSError("libvendor.so.1: cannot open shared object file")
    if name == "bad_import":
        raise RuntimeError("no driver")
    raise AttributeError(name)


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `entry_points` would find of installed packages."""
    here = __name__
    found = EntryPoints(
        EntryPoint(name, f"{module}:{attribute}", registry.ENTRY_POINT_GROUP)
        for name, module, attribute in (
            ("mine", "pdcore.transports.loopback", "PLUGIN"),
            ("broken", here, "broken"),
            ("wrong", here, "not_a_plugin"),
            ("missing", "pdcore_missing_vendor", "PLUGIN"),
            ("no_library", here, "no_library"),
            ("bad_import", here, "bad_import"),
        )
    )
    sys.modules.setdefault(here, sys.modules[__name__])
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))


def test_names_and_reasons() -> None:
    assert {"loopback", "shm", "socket"} <= set(names())
    found = available()
    assert found["loopback"] is None
    assert found["shm"] is None or "shm" in found["shm"] or "Linux" in found["shm"]


def test_create_by_name() -> None:
    transport = create("loopback", US, address="somewhere")
    try:
        assert transport.name == "loopback"
        assert transport.incarnation == US
    finally:
        transport.close()


def test_a_worker_gets_what_its_transport_wants_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """shm: a bound on the peers' memory that counts as a prefill worker's own."""
    limit = registry.load("shm").worker_options["peer_resident_bytes"]
    assert isinstance(limit, int)
    assert 0 < limit <= 128 << 20
    fussy = TransportPlugin(LoopbackTransport, lambda: None, {"address": "worker"})
    monkeypatch.setattr(registry, "load", lambda name: fussy)
    transport = registry.create_for_worker("loopback", US)
    try:
        with pytest.raises(TransportError):  # the address is taken: it was passed on
            create("loopback", US, address="worker")
    finally:
        transport.close()


def test_a_worker_tells_its_transport_where_it_stands() -> None:
    """socket: what to bind, what its peers dial, and the secret; the others do not ask."""
    place = registry.WorkerPlace("0.0.0.0", "127.0.0.1", "a secret of enough bytes")
    options_at = registry.load("socket").options_at
    assert options_at is not None
    assert options_at(place) == {
        "host": "0.0.0.0",
        "advertise": "127.0.0.1",
        "secret": "a secret of enough bytes",
    }
    assert "enough bytes" not in repr(place)
    registry.create_for_worker("loopback", US, registry.WorkerPlace()).close()
    if available()["socket"] is None:
        registry.create_for_worker("socket", US, place).close()


def test_a_secret_that_nobody_would_ask_for_is_refused() -> None:
    """D44: a setting that does nothing; here it would look like safety."""
    place = registry.WorkerPlace(secret="a secret of enough bytes")
    with pytest.raises(ConfigError, match="'loopback' asks nobody for a secret"):
        registry.create_for_worker("loopback", US, place)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'rdma'; choose one of auto, .*loopback.*shm"):
        create("rdma", US)


def test_unknown_option_is_the_users_mistake() -> None:
    with pytest.raises(ConfigError, match=r"'loopback'.*frobnicate"):
        create("loopback", US, frobnicate=3)


def test_auto_is_shm_where_it_works() -> None:
    if available()["shm"] is None:
        assert resolve("auto") == "shm"
    else:
        with pytest.raises(ConfigError, match="shm"):
            resolve("auto")


@pytest.mark.usefixtures("third_party")
def test_entry_points() -> None:
    """A third party's transport is created by its name; one that cannot be imported, or
    is no plugin, is listed with the reason and refused with it."""
    create("mine", US).close()
    found = available()
    assert found["mine"] is None
    assert found["broken"] == "no such hardware"
    assert "must be a TransportPlugin" in str(found["wrong"])
    assert "pdcore_missing_vendor" in str(found["missing"])
    with pytest.raises(TransportError, match="no such hardware; buy some"):
        create("broken", US)
    with pytest.raises(ConfigError, match="cannot be imported"):
        create("missing", US)


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(("name", "why"), [("no_library", "libvendor"), ("bad_import", "driver")])
def test_a_package_that_cannot_be_imported_in_its_own_way_harms_no_other(
    name: str, why: str
) -> None:
    """A library that ctypes does not find is an OSError, and doctor ended with a traceback."""
    with pytest.raises(ConfigError, match=f"{name!r} cannot be imported: .*{why}"):
        create(name, US)
    reason = available()[name]
    assert reason is not None
    assert why in reason


def test_importing_the_registry_imports_no_transport() -> None:
    """Nothing a user did not choose is imported (vendors may be missing or slow)."""
    program = (
        "import sys, pdcore.transports.registry\n"
        "print([m for m in sys.modules if m.startswith('pdcore.transports.')"
        " and m not in ('pdcore.transports.base', 'pdcore.transports.registry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"


def test_a_transport_that_crosses_hosts_may_be_told_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def network(incarnation: Incarnation) -> LoopbackTransport:
        """As a third party's could be."""
        transport = LoopbackTransport(incarnation)
        transport.caps = attrs.evolve(transport.caps, cross_host=True)
        return transport

    registry.require_reach("loopback", ())
    with pytest.raises(ConfigError, match="10\\.0\\.0\\.9: is another host"):
        registry.require_reach("loopback", ("10.0.0.9",))
    monkeypatch.setattr(registry, "load", lambda name: TransportPlugin(network, lambda: None))
    registry.require_reach("loopback", ("10.0.0.9",))


def test_what_a_plugin_declares_is_what_it_makes() -> None:
    """docs/transports.md and `pdcore doctor` tell what is declared without making one."""
    for name in registry.built_in():
        declared = registry.load(name).caps
        assert declared is not None, f"{name}: its PLUGIN declares no caps"
        if registry.load(name).why_unavailable() is None:
            transport = create(name, US)
            transport.close()
            assert transport.caps == declared


@pytest.mark.usefixtures("third_party")
def test_presence_says_what_helps() -> None:
    here = registry.presence("loopback")
    assert (here.reason, here.remedy) == (None, "")
    assert here.caps == loopback_caps(Revocation.SENDER_ACK)
    absent = registry.presence("broken")
    assert (absent.reason, absent.remedy, absent.caps) == ("no such hardware", "buy some", None)
    missing = registry.presence("missing")
    assert "pdcore_missing_vendor" in str(missing.reason)
    assert "repair or remove the package" in missing.remedy
    with pytest.raises(ConfigError, match="unknown name 'rdma'"):
        registry.presence("rdma")


def test_a_plugin_may_not_ask_for_fewer_cycles_than_show_a_leak() -> None:
    with pytest.raises(ValueError, match="cycles"):
        TransportPlugin(LoopbackTransport, lambda: None, cycles=29)


def test_variants_that_a_machine_may_forbid_are_asked_for_late() -> None:
    plain = TransportPlugin(LoopbackTransport, lambda: None, {"address": "worker"})
    assert plain.all_variants() == {"": {"address": "worker"}}
    more = attrs.evolve(plain, variants_here=lambda: {"fast": {}})
    assert more.all_variants() == {"": {"address": "worker"}, "fast": {}}
    named = attrs.evolve(more, variants={"slow": {"address": "slow"}})
    assert list(named.all_variants()) == ["slow", "fast"]
