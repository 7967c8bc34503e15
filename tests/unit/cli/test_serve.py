"""``pdcore serve``: flags per role, and one process that is stopped by a signal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from pdcore.cli import main
from pdcore.cli.options import EngineFlags
from pdcore.cli.serve import NodeFlags, check_role, disagg_flags, router_config
from pdcore.config import DisaggConfig
from pdcore.config_loader import Environment, build
from pdcore.errors import ConfigError

BOUND_S = 60.0


def test_flags_of_an_instance() -> None:
    """R20, R15: the advertised address is ips[node-index], never guessed."""
    node = NodeFlags(
        host="0.0.0.0",
        port=0,
        node_index=1,
        devices_per_node=2,
        ips=("10.0.0.1,10.0.0.2",),
        prefill_ips=("10.0.1.1", "10.0.1.2"),
        bootstrap_port=(19000,),
    )
    built = build(DisaggConfig, disagg_flags("decode", node), "disagg")
    assert built == DisaggConfig(
        role="decode",
        host="0.0.0.0",
        http_port=0,
        node_index=1,
        devices_per_node=2,
        ips=("10.0.0.1", "10.0.0.2"),
        local_ip="10.0.0.2",
        bootstrap_port=19000,
        allowed_bootstraps=("10.0.1.1:19000", "10.0.1.2:19000"),
    )


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost"])
def test_an_address_at_which_nothing_listens_is_not_advertised(host: str | None) -> None:
    """vllm #27083: others would be told to connect to an address that only loopback serves."""
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1, but only .* add --host 0\.0\.0\.0"):
        disagg_flags("prefill", NodeFlags(host=host, ips=("10.0.0.1",)))


@pytest.mark.parametrize(
    ("host", "ips"), [("10.0.0.1", "10.0.0.1"), ("::", "fe80::1"), (None, "127.0.0.2")]
)
def test_an_address_that_is_bound_is_advertised(host: str | None, ips: str) -> None:
    assert disagg_flags("prefill", NodeFlags(host=host, ips=(ips,)))["local_ip"] == ips


def test_defaults_are_this_machine() -> None:
    assert disagg_flags("prefill", NodeFlags()) == {"role": "prefill"}


def test_flags_of_a_router() -> None:
    """D44: the seed's router was started without the bootstrap port."""
    node = NodeFlags(
        port=0, prefill_addrs=("a:1,b:2",), decode_addrs=("c:3",), bootstrap_port=(7, 8)
    )
    router = router_config(node, EngineFlags(log_level="error"), Environment())
    assert router.prefill_addrs == ("a:1", "b:2")
    assert router.decode_addrs == ("c:3",)
    assert router.bootstrap_ports == (7, 8)
    assert router.port == 0
    assert router.log_level == "error"
    assert (router.on_prefill_loss, router.max_attempts, router.max_in_flight) == ("retry", 3, 4096)
    node = attrs.evolve(node, on_prefill_loss="fail", max_attempts=1, max_in_flight=9)
    router = router_config(node, EngineFlags(), Environment())
    assert (router.on_prefill_loss, router.max_attempts, router.max_in_flight) == ("fail", 1, 9)


@pytest.mark.parametrize(
    ("role", "node", "words"),
    [
        ("router", NodeFlags(), "--prefill-addrs: --role router needs it"),
        ("router", NodeFlags(prefill_addrs=("a:1",)), "--decode-addrs: --role router needs"),
        ("decode", NodeFlags(max_attempts=2), "--max-attempts: is for --role router"),
        ("router", NodeFlags(ips=("a",)), "--ips: is for --role prefill or decode"),
        ("prefill", NodeFlags(prefill_ips=("a",)), "--prefill-ips: is for --role decode"),
        ("decode", NodeFlags(decode_addrs=("a:1",)), "--decode-addrs: is for --role router"),
        ("router", NodeFlags(node_index=1), "--node-index: is for --role prefill or decode"),
    ],
)
def test_a_flag_of_another_role_is_refused(role: str, node: NodeFlags, words: str) -> None:
    """R20, SGLang I22840, 11750, 10748, 12213: missing is an argument error; D44: what would do
    nothing is refused."""
    with pytest.raises(ConfigError) as error:
        check_role(role, node)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "prefill", "--node-index", "2", "--ips", "a,b"], "--node-index: 2 is outside"),
        (["--role", "decode", "--bootstrap-port", "1", "--bootstrap-port", "2"], "takes one port"),
        (["--role", "prefill", "--port", "70000"], "http_port must be between 0 and 65535"),
        (["--role", "prefill", "--yaml-file-path", "/absent.yaml"], "/absent.yaml: no such file"),
        (
            ["--role", "router", "--prefill-addrs", "a", "--decode-addrs", "b:1"],
            "prefill_addrs: expected a port",
        ),
        (
            ["--role", "router", "--prefill-addrs", "a:1", "--decode-addrs", "b:1", "--simulated"],
            "--simulated: is for --role prefill or decode",
        ),
        (["--role", "both"], 'Invalid value "both" for --role'),
        ([], "--role"),
    ],
)
def test_mistakes_at_the_command_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_instance_in_the_foreground(tmp_path: Path) -> None:
    env = {**os.environ, "PDCORE_RUN_DIR": str(tmp_path), "PDCORE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pdcore.cli", "serve", "--role=decode", "--simulated"]
    serving = subprocess.Popen(
        [*command, "--port=0", "--log-level=error"], env=env, stdout=subprocess.PIPE, text=True
    )
    assert serving.stdout is not None
    with serving.stdout as output:
        assert output.readline().startswith("listening on http://127.0.0.1:")
        assert "ready\n" in output
        serving.terminate()
        assert serving.wait(BOUND_S) == 0
