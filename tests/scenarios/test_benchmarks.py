"""What all benchmarks share: the order of runs, the shape of a result, the exit status."""

from __future__ import annotations

import json

import pytest

import benchmarks.__main__ as command
from benchmarks.common import CheckFailed, Result, interleave, result_of, row, table_of


def test_sides_take_turns_and_nobody_is_always_last() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    measured = interleave({n: lambda n=n: side(n) for n in "abc"}, 3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(values) for name, values in measured.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_row_says_medians_ratio_and_how_far_to_trust_them() -> None:
    found = row(
        "x", "time", "us", [2.0, 9.0, 3.0], "peer", [6.0, 6.0, 1.0],
        better="lower", target="<= 1", meets=lambda ratio: ratio <= 1,
    )  # fmt: skip
    assert (found["value"], found["peer_value"], found["ratio"]) == (3.0, 6.0, 0.5)
    assert (found["spread"], found["peer_spread"], found["meets"]) == ([2.0, 9.0], [1.0, 6.0], True)


def test_a_peer_that_did_not_run_is_null_with_its_reason() -> None:
    found = row("x", "time", "us", [2.0], None, better="lower", target="", reason="not installed")
    assert [found[key] for key in ("peer", "peer_value", "peer_spread", "ratio", "meets")] == (
        [None] * 5
    )
    assert "not installed" in table_of(result_of("x", [found]))


def test_the_status_is_1_when_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(name: str, quick: bool) -> Result:
        if name == "fsm":
            raise CheckFailed("other rejections")
        return result_of(name, [], quick=quick)

    monkeypatch.setattr(command, "run_one", fails)
    assert command.main(["fsm", "step", "--json", "--quick"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["quick"] is True
    assert "fsm: correctness check failed, nothing was timed: other rejections" in err
    assert command.main(["step"]) == 0


def test_every_benchmark_is_found_by_its_name() -> None:
    """And a name that is none is the caller's mistake."""
    named = {"e2e", "fsm", "handshake", "kv_copy", "kv_reshard", "router", "step"}
    assert named <= set(command.names())
    with pytest.raises(SystemExit):
        command.main(["kv_reshrad"])
