"""Addresses and ports: loopback by default, port 0 allowed, nothing truncated by zip."""

from __future__ import annotations

import pytest

from pdcore.config import DisaggConfig, RouterConfig, ServerConfig, normalise_address


def test_defaults_bind_loopback() -> None:
    """D40: nothing listens on all interfaces unless told."""
    assert DisaggConfig().host == "127.0.0.1"
    assert DisaggConfig().local_ip == "127.0.0.1"


def test_port_follows_the_role_and_zero_is_kept() -> None:
    """D44: one settings object decides; 0 means a free port, not the default."""
    assert DisaggConfig(role="prefill").port == 8001
    assert DisaggConfig(role="decode").port == 8100
    assert DisaggConfig(role="decode", http_port=0).port == 0


def test_d44_mutant_that_treats_zero_as_unset_is_caught() -> None:
    def mutant_port(given: int | None) -> int:
        return given or 8100

    def check(port: int) -> None:
        assert port == 0

    check(DisaggConfig(role="decode", http_port=0).port)
    with pytest.raises(AssertionError):
        check(mutant_port(0))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:8001", "http://10.0.0.1:8001"),
        ("http://p0:8001/", "http://p0:8001"),
        ("[::1]:8001", "http://[::1]:8001"),
    ],
)
def test_addresses_are_normalised(address: str, expected: str) -> None:
    """R29: scheme added, trailing slash trimmed."""
    assert normalise_address(address) == expected


@pytest.mark.parametrize("address", ["", "p0", "p0:0", "p0:99999", "ftp://p0:1", "http://p0:1/x"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        normalise_address(address)


def test_a_password_is_neither_kept_nor_quoted() -> None:
    """It reached /health as part of the instance's address."""
    with pytest.raises(ValueError, match="without user:password@") as caught:
        normalise_address("http://me:s3cret@p0:8001")
    assert "s3cret" not in str(caught.value)


def test_bootstraps_pair_with_prefills() -> None:
    RouterConfig(
        prefill_addrs=("p0:8001", "p1:8001"), decode_addrs=("d0:8100",), bootstrap_ports=(18800,)
    )
    with pytest.raises(ValueError, match="one for each of the 3 prefill_addrs, got 2"):
        RouterConfig(
            prefill_addrs=("a:1", "b:1", "c:1"), decode_addrs=("d:1",), bootstrap_ports=(1, 2)
        )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"prefill_addrs": (), "decode_addrs": ("d:1",)}, "prefill_addrs must name"),
        ({"prefill_addrs": ("p:1",), "decode_addrs": ()}, "decode_addrs must name"),
        ({"prefill_addrs": ("p",), "decode_addrs": ("d:1",)}, "prefill_addrs: expected a port"),
        (
            {"prefill_addrs": ("p:1",), "decode_addrs": ("d:1",), "bootstrap_ports": (-1,)},
            "bootstrap_ports must be between",
        ),
    ],
)
def test_router_needs_both_sides(values: dict[str, tuple[object, ...]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RouterConfig(**values)


def test_node_index_must_be_in_ips() -> None:
    """R3: an index outside ips is a clear error."""
    with pytest.raises(ValueError, match="node_index must be below the number of ips"):
        DisaggConfig(node_index=1)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "*"])
def test_a_wildcard_is_bound_and_never_advertised(address: str) -> None:
    """R15, vllm #27083: others connect to what is advertised."""
    assert DisaggConfig(host="0.0.0.0", local_ip="10.0.0.1", ips=("10.0.0.1",)).local_ip
    with pytest.raises(ValueError, match=r"local_ip .*nobody can connect to: name this node's"):
        DisaggConfig(local_ip=address)


@pytest.mark.parametrize(
    "others",
    [{"ips": ("127.0.0.1", "10.0.0.2")}, {"role": "decode", "allowed_bootstraps": ("10.0.0.2:1",)}],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_loopback_is_not_advertised_to_other_hosts(address: str, others: dict[str, object]) -> None:
    """vllm #27083: the default address of one host, told to another, is that one's own."""
    with pytest.raises(ValueError, match=rf"local_ip is {address}, where 10\.0\.0\.2 would"):
        DisaggConfig(local_ip=address, **others)


def test_server_bounds() -> None:
    with pytest.raises(ValueError, match=r"request_timeout_s must be >= 0\.1 s"):
        ServerConfig(request_timeout_s=0.0)
