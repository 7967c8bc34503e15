"""``python -m tests.property.fuzz --count 100000``: damaged frames and bodies, everywhere.

Inputs come from one seed; ``--seed`` and ``--only`` replay a run, and a failure says after
which input of which target. Of each target's inputs at least half are mutations of valid ones
that still have a good magic, version and length, or the run fails: what every decoder refuses at
its first byte says nothing of what lies behind. No input may raise out of a loop, allocate more
than a bound, or keep an honest request from finishing right.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence

import attrs

from tests.property import fuzz_http, fuzz_targets
from tests.property.fuzz_targets import Target

#: Far more than any decoder or loop needs for one small input.
MAX_PEAK_BYTES = 64 << 20
#: Tracing every allocation is slow: one input in so many is traced.
TRACED = 50
#: A target with fewer inputs, as in a replay, is not judged by the share of good ones.
MIN_JUDGED = 100

#: name -> (how to make it from a seed, its share of the inputs).
TARGETS: dict[str, tuple[Callable[[int], Target], float]] = {
    "codec": (lambda seed: fuzz_targets.CodecTarget(), 0.30),
    "strangers": (fuzz_targets.StrangerTarget, 0.20),
    "corrupted": (fuzz_targets.CorruptedTarget, 0.03),
    "leader": (fuzz_targets.LeaderMessageTarget, 0.12),
    "link": (lambda seed: fuzz_targets.LinkTarget(), 0.10),
    "descriptors": (lambda seed: fuzz_targets.DescriptorTarget(), 0.05),
    "instance": (lambda seed: fuzz_http.InstanceTarget(), 0.08),
    "bootstrap": (lambda seed: fuzz_http.BootstrapTarget(), 0.08),
    "router": (lambda seed: fuzz_http.RouterTarget(), 0.04),
}


@attrs.frozen
class FuzzReport:
    """``good`` inputs passed magic and version, or have no such thing (HTTP bodies)."""

    target: str
    seed: int
    inputs: int
    good: int
    seconds: float

    @property
    def is_deep_enough(self) -> bool:
        return self.good * 2 >= self.inputs or self.inputs < MIN_JUDGED


class FuzzFailure(AssertionError):
    """Names the input; the same seed makes it again."""


def fuzz(name: str, count: int, seed: int) -> FuzzReport:
    """Raises FuzzFailure."""
    start_s = time.monotonic()
    rng = random.Random(f"{name} {seed}")
    target = TARGETS[name][0](seed)
    good, data, i = 0, b"", 0
    try:
        for i in range(count):
            data, is_good = target.draw(rng)
            good += is_good
            if i % TRACED:
                target.feed(data)
            else:
                feed_traced(target, data)
        data = b"(the end)"
        target.finish()
    except Exception as error:
        raise FuzzFailure(
            f"{target.name}: input {i} {data[:2000]!r}: {type(error).__name__}: {error}\n"
            f"replay: python -m tests.property.fuzz --only {name} --seed {seed} --count {i + 1}"
        ) from error
    finally:
        target.close()
    return FuzzReport(target.name, seed, count, good, round(time.monotonic() - start_s, 1))


def feed_traced(target: Target, data: bytes) -> None:
    tracemalloc.start()
    try:
        target.feed(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < MAX_PEAK_BYTES, f"{peak_bytes} bytes were allocated for {len(data)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.property.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=110_000, help="inputs of all targets")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--only", choices=TARGETS, help="all inputs to this target")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    reports = []
    for name, (_, share) in TARGETS.items():
        if given.only in (None, name):
            count = given.count if given.only else round(given.count * share)
            reports.append(fuzz(name, count, seed))
            print(reports[-1], file=sys.stderr, flush=True)
    totals = {
        "seed": seed,
        "inputs": sum(one.inputs for one in reports),
        "good": sum(one.good for one in reports),
        "targets": [attrs.asdict(one) for one in reports],
        "less_than_half_good": [one.target for one in reports if not one.is_deep_enough],
    }
    print(json.dumps(totals))
    return 1 if totals["less_than_half_good"] else 0


if __name__ == "__main__":
    sys.exit(main())
