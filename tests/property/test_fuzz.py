"""Damaged frames and bodies at a size for every run; `nox -s fuzz` feeds a hundred thousand.

A failure prints the command that replays it.
"""

from __future__ import annotations

import json
import random

import pytest

from pdcore.control import codec
from pdcore.errors import CodecError
from pdcore.testing.world import Rank
from tests.property import fuzz as fuzz_module
from tests.property.fuzz import TARGETS, FuzzFailure, fuzz, main
from tests.property.fuzz_mutations import has_good_header, mutated_frame, mutated_json
from tests.property.fuzz_targets import (
    LEADER_MESSAGES,
    PEER_MESSAGES,
    CodecTarget,
    LeaderMessageTarget,
    StrangerTarget,
    frame_of,
)

FRAMES = [frame_of(one) for one in PEER_MESSAGES]


@pytest.mark.parametrize("target", TARGETS)
def test_d40_d45_damaged_input_ends_no_loop(target: str) -> None:
    """D40, D45: codec, cores with honest requests beside them, leader link, descriptors, and
    the bodies of all three HTTP apps: nothing raises, nothing allocates without bound, and
    what is honest finishes right. Half of the input at least passes magic and version."""
    report = fuzz(target, {"corrupted": 100, "strangers": 400}.get(target, 800), seed=11)
    assert report.is_deep_enough


def test_every_valid_input_is_accepted_before_it_is_damaged() -> None:
    """Or the mutations would be mutations of nothing."""
    for data in FRAMES:
        assert codec.encode_frame(codec.decode_frame(data)) == data
    for one in LEADER_MESSAGES:
        assert codec.decode_leader_message(codec.encode_link(one)) == one


def test_mutations_reach_the_decoder_and_some_pass_it() -> None:
    rng = random.Random(1)
    found = [mutated_frame(rng, rng.choice(FRAMES), rng.choice(FRAMES)) for _ in range(2_000)]
    good = [data for data in found if has_good_header(data)]
    passed = 0
    for data in good:
        try:
            codec.decode_frame(data)
        except CodecError:
            continue
        passed += 1
    assert len(good) > 1_200
    assert passed > 100


def test_the_same_seed_makes_the_same_inputs() -> None:
    runs = []
    for _ in range(2):
        rng = random.Random(3)
        runs.append([mutated_frame(rng, rng.choice(FRAMES), FRAMES[0]) for _ in range(50)])
        runs[-1] += [mutated_json(rng, b'{"a": [1, {"b": "c"}]}', b"{}") for _ in range(50)]
    assert runs[0] == runs[1]


def check_fails(monkeypatch: pytest.MonkeyPatch, make) -> None:
    monkeypatch.setitem(TARGETS, "codec", (make, 1.0))
    with pytest.raises(FuzzFailure, match=r"replay: python -m tests\.property\.fuzz --only codec"):
        fuzz("codec", 200, seed=1)


def test_a_decoder_that_lets_foreign_errors_out_is_caught(monkeypatch) -> None:
    """The mutant: what one would write first."""

    class Naive(CodecTarget):
        def feed(self, data: bytes) -> None:
            codec._decode_frame_body(data[8:])

    check_fails(monkeypatch, lambda seed: Naive())


def test_d45_a_loop_that_ends_with_a_bad_frame_is_caught(monkeypatch) -> None:
    """The mutant of D45: the worker's loop without its check."""

    class Fragile(StrangerTarget):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            for rank in self._world.ranks.values():
                worker = rank.worker
                worker._handle_frame = lambda data, now: codec.decode_frame(data)

    check_fails(monkeypatch, Fragile)


def test_a_request_that_does_not_finish_right_is_caught(monkeypatch) -> None:
    """The mutant: every output token is another."""
    right = Rank.tokens
    monkeypatch.setattr(Rank, "tokens", lambda rank, key: [one + 1 for one in right(rank, key)])
    check_fails(monkeypatch, LeaderMessageTarget)


def test_a_bomb_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that is believed: more memory than any input is worth."""
    monkeypatch.setattr(fuzz_module, "MAX_PEAK_BYTES", 1 << 20)

    class Bomb(CodecTarget):
        def feed(self, data: bytes) -> None:
            bytearray(2 << 20)

    check_fails(monkeypatch, lambda seed: Bomb())


def test_the_driver_prints_its_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "codec", "--count", "50", "--seed", "4"]) == 0
    said = capsys.readouterr()
    assert '"inputs": 50' in said.out
    assert "seed 4" in said.err


class Shallow(CodecTarget):
    """The mutant: so many of a hundred inputs are cut in the middle of their magic."""

    def __init__(self, num_cut: int) -> None:
        super().__init__()
        self._num_cut, self._num_drawn = num_cut, 0

    def draw(self, rng: random.Random) -> tuple[bytes, bool]:
        is_cut = self._num_drawn % 100 < self._num_cut
        self._num_drawn += 1
        return (FRAMES[0][:1], False) if is_cut else (FRAMES[0], True)


@pytest.mark.parametrize(("num_cut", "count", "status"), [(50, 200, 0), (51, 200, 1), (51, 99, 0)])
def test_a_run_whose_inputs_are_refused_at_once_fails(
    num_cut: int,
    count: int,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Issue 3, point 10: at least half are mutations of valid ones that pass magic and version."""
    monkeypatch.setitem(TARGETS, "codec", (lambda seed: Shallow(num_cut), 1.0))
    assert main(["--only", "codec", "--count", str(count), "--seed", "1"]) == status
    said = json.loads(capsys.readouterr().out)
    assert said["less_than_half_good"] == (["codec"] if status else [])
    assert said["good"] == count - sum(i % 100 < num_cut for i in range(count))
