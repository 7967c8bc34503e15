"""The command line: help that teaches, one message for a mistake, nothing heavy imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdcore import __version__
from pdcore.cli import COMMANDS, main


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert command in out
    assert "First steps" in out
    assert main([]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "xample" in out
    assert f"pdcore {command} " in out.partition("Parameters")[0]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdcore {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dokter"], 'Unknown command "dokter"'),
        (["doctor", "--jsn"], "Did you mean --json?"),
        (["doctor", "extra"], "nothing takes 'extra'\nTry `pdcore doctor --help`"),
        (["verify", "lifecycles", "--nope"], "Try `pdcore verify lifecycles --help`"),
        (["verify", "nope"], "Try `pdcore verify --help`"),
        (["diagram", "sendr"], "did you mean `sender`?"),
        (["settings", "scheduler"], "did you mean `scheduler_config`?"),
    ],
)
def test_a_mistake_is_one_message_and_exit_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue item 8: no traceback for a user's mistake."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("pdcore: ")
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_help_needs_no_torch_and_no_server() -> None:
    code = (
        "import sys\n"
        "from pdcore.cli import main\n"
        "main(['--help'])\n"
        "heavy = {'torch', 'zmq', 'starlette', 'uvicorn', 'numpy', 'transitions'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "[]\n"
