"""The whole conformance suite at its full size, one report per transport."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdcore.testing.conformance import Report, run_conformance
from pdcore.testing.transport_harness import LoopbackHarness, RegistryHarness
from pdcore.transports import shm_attach
from pdcore.transports.base import Revocation
from pdcore.transports.registry import load, presence
from tests.conformance import matrix

pytestmark = pytest.mark.slow
linux = pytest.mark.skipif(sys.platform != "linux", reason="shm is Linux")


def passes(report: Report, label: str = "") -> None:
    """Every check; ``label`` names the column of the table at the end."""
    matrix.keep(report, label)
    assert report.ok, "\n".join(f"{name}: {why}" for name, why in report.failed.items())
    assert not report.skipped


def skip_without(transport: str) -> None:
    found = presence(transport)
    if found.reason is not None:
        pytest.skip(f"{transport}: {found.reason}; {found.remedy}")


@pytest.mark.parametrize("kind", list(Revocation))
def test_loopback(kind: Revocation) -> None:
    """SGLang PR28652, 29757: the fake transport passes what every other one passes, transfers
    of no byte and of many chunks among them."""
    passes(run_conformance(LoopbackHarness(kind, cycles=1000)), f"loopback, {kind.value}")


@linux
def test_shm() -> None:
    passes(run_conformance(RegistryHarness("shm", cycles=1000)))


@linux
def test_shm_with_little_of_the_peer_mapped() -> None:
    """As a worker uses it, only tighter: pages come and go below transfers all the time."""
    harness = RegistryHarness("shm", cycles=100, peer_resident_bytes=1 << 20)
    passes(run_conformance(harness), "shm, 1 MiB of peers")


@linux
def test_shm_over_named_files(tmp_path: Path) -> None:
    harness = RegistryHarness("shm", cycles=1000, named_directory=str(tmp_path))
    passes(run_conformance(harness), "shm, named files")
    assert list(tmp_path.iterdir()) == []


@linux
def test_shm_into_registered_memory() -> None:
    """Cross-memory attach: nothing is shared, every region is ordinary memory of its process."""
    reason = shm_attach.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    harness = RegistryHarness("shm", cycles=1000, shared=False)
    passes(run_conformance(harness), "shm, attach")


@linux
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "attach"])
@pytest.mark.parametrize("check", ["sender_killed", "receiver_killed", "sender_stopped"])
def test_shm_again_and_again(check: str, shared: bool) -> None:
    """What depends on the moment of a signal, ten times."""
    if not shared and shm_attach.why_unavailable() is not None:
        pytest.skip("attaching is forbidden here")
    for _ in range(10):
        passes(run_conformance(RegistryHarness("shm", shared=shared), only=[check]))


@linux
def test_torchdist_gloo() -> None:
    """torch.distributed: 30 cycles with flat descriptors, threads and memory."""
    pytest.importorskip("torch", reason="torchdist needs the extra `torch`")
    passes(run_conformance(RegistryHarness("torchdist", cycles=30)), "torchdist, gloo")


@linux
@pytest.mark.parametrize(
    "check", ["sender_killed", "receiver_killed", "partial_failure", "revoke_ends_writes"]
)
def test_torchdist_again_and_again(check: str) -> None:
    """What depends on the moment of a signal, or of a revoke, some times."""
    pytest.importorskip("torch", reason="torchdist needs the extra `torch`")
    for _ in range(5):
        passes(run_conformance(RegistryHarness("torchdist"), only=[check]))


@linux
@pytest.mark.parametrize("kind", ["any way", "tcp"])
def test_nixl(kind: str) -> None:
    """NIXL with UCX as it chooses, and as it is between hosts."""
    skip_without("nixl")
    options = load("nixl").variants[kind]
    passes(run_conformance(RegistryHarness("nixl", cycles=30, **options)), f"nixl, {kind}")


@linux
@pytest.mark.parametrize(
    "check", ["sender_killed", "receiver_killed", "partial_failure", "revoke_ends_writes"]
)
def test_nixl_again_and_again(check: str) -> None:
    """What depends on the moment of a signal, or of a revoke, some times."""
    skip_without("nixl")
    for _ in range(5):
        passes(run_conformance(RegistryHarness("nixl", ucx_tls="tcp"), only=[check]))


SOCKETS = {
    "unix": {"families": ["unix"]},
    "tcp": {"families": ["tcp"]},
    "tcp, IPv6": {"families": ["tcp"], "host": "::1"},
    "tcp, with a secret": {"families": ["tcp"], "secret": "a secret of enough bytes"},
}


@linux
@pytest.mark.parametrize("kind", SOCKETS)
def test_socket(kind: str) -> None:
    if "IPv6" in kind and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    options: dict[str, object] = {**SOCKETS[kind]}
    passes(run_conformance(RegistryHarness("socket", cycles=1000, **options)), f"socket, {kind}")


@linux
@pytest.mark.parametrize("family", ["unix", "tcp"])
@pytest.mark.parametrize("check", ["sender_killed", "receiver_killed", "revoke_ends_writes"])
def test_socket_again_and_again(check: str, family: str) -> None:
    """What depends on the moment of a signal, or of a revoke, ten times."""
    for _ in range(10):
        passes(run_conformance(RegistryHarness("socket", families=[family]), only=[check]))
