"""``pdcore verify cluster``: proof 2, whole clusters on virtual time, one per seed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from pdcore.errors import ConfigError

if TYPE_CHECKING:
    from pdcore.sim.seeds import SeedResult, Totals

#: Seconds between two words about how far it is.
TELL_EVERY_S: Final = 2.0
DEFAULT_SEEDS: Final = 500
#: Processes; each is an interpreter of its own.
MAX_JOBS: Final = 256
#: Of a seed or the number of a fault.
MAX_DIGITS: Final = 100
NONE: Final = "none"
ALL: Final = "all"


def cluster(
    *,
    seeds: int | None = None,
    start: int = 0,
    jobs: int = 1,
    seeds_file: Path | None = None,
    seed: int | None = None,
    only_faults: str | None = None,
    only_requests: str | None = None,
    mutant: Annotated[str, Parameter(show_default=False)] = "",
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Run whole clusters in one process on virtual time, and let everything go wrong.

    Each seed makes a world: a router, two or three prefill and decode instances with their
    bootstrap servers, leaders and workers, all of it the code that runs in production, on a
    simulated engine whose KV proves itself. Some fifty requests run through it while frames
    are lost, repeated, late and out of order, networks part, processes are killed, stopped
    and started again, memory runs out and clients leave. Every request must end exactly once,
    in time, with the right tokens or a precise error; no write may touch memory that was
    given back; and when it is calm again, it serves, and nothing is left behind.

    Exit status 0: everything held. 1: something did not; the world is cut down to what still
    fails and a command that replays it is printed. With --mutant: 0 when the known-bad
    variant was caught, 1 when it was not. --seed replays: always 1 when its world is broken.

    Examples:

    - `pdcore verify cluster --seeds 500`
    - `pdcore verify cluster --seed 17`
    - `pdcore verify cluster --seeds 500 --mutant free-on-abort`

    Parameters
    ----------
    seeds
        How many seeds to run; default 500, or 0 with --seeds-file.
    start
        The first of them; the others follow.
    jobs
        Processes to run them in; 0: one for each core.
    seeds_file
        Run the seeds that a file lists first, one a line; `#` begins a comment.
    seed
        Run this one and show its trace: what happened, one line each, and the faults.
    only_faults
        With --seed: numbers of the faults to keep, separated by commas, or `none`.
    only_requests
        With --seed: numbers of the requests to keep, separated by commas, or `none`.
    mutant
        Plant a known-bad variant; the first seed that catches it ends the run. `all`: each that
        a cluster must catch, one after the other. Names: `pdcore verify lifecycles --list`.
    as_json
        One JSON object, for programs.
    """
    from pdcore.sim.mutants import find_mutant

    if mutant and mutant != ALL and not find_mutant(mutant).patches:
        raise ConfigError(
            f"--mutant: {mutant} is planted by the small worlds only; try "
            f"`pdcore verify lifecycles --mutant {mutant}`"
        )
    if seed is not None:
        if seeds is not None or seeds_file is not None:
            raise ConfigError("--seed runs one world: leave out --seeds and --seeds-file")
        return replay(
            seed,
            faults=read_numbers("--only-faults", only_faults),
            requests=read_numbers("--only-requests", only_requests),
            mutant=mutant,
            as_json=as_json,
        )
    if only_faults is not None or only_requests is not None:
        raise ConfigError("--only-faults and --only-requests need the --seed that they are of")
    if not 0 <= jobs <= MAX_JOBS:
        raise ConfigError(f"--jobs must be 0 to {MAX_JOBS}, got {jobs}")
    wanted = choose_seeds(seeds, start, seeds_file)
    if mutant == ALL:
        return try_all(wanted, jobs or os.cpu_count() or 1, as_json=as_json)
    return run_all(wanted, jobs or os.cpu_count() or 1, mutant, as_json=as_json)


def choose_seeds(count: int | None, start: int, file: Path | None) -> list[int]:
    """Seeds of the file first, then ``count`` from ``start``. Raises ConfigError."""
    if count is not None and count < 0:
        raise ConfigError(f"--seeds must be 0 or more, got {count}")
    wanted = [] if file is None else read_seeds(file)
    default = 0 if file is not None else DEFAULT_SEEDS
    wanted += range(start, start + (default if count is None else count))
    if not wanted:
        raise ConfigError("no seeds: give --seeds a number, or --seeds-file one that lists some")
    return wanted


def read_seeds(file: Path) -> list[int]:
    """Raises ConfigError naming file and line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--seeds-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--seeds-file {file}: is not text, one seed a line") from None
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text and not _is_number(text):
            raise ConfigError(f"--seeds-file {file}:{number}: {text[:40]!r} is not a seed")
        if text:
            found.append(int(text))
    return found


def read_numbers(option: str, text: str | None) -> list[int] | None:
    """None: nothing was said. Raises ConfigError."""
    if text is None:
        return None
    if text == NONE:
        return []
    words = text.split(",")
    if not all(_is_number(word) for word in words):
        raise ConfigError(f"{option} takes numbers, comma-separated, or `none`; got {text!r}")
    return [int(word) for word in words]


def _is_number(text: str) -> bool:
    """What ``int`` reads: not each digit of Unicode, nor thousands of them."""
    return text.isdecimal() and len(text) <= MAX_DIGITS


def check_numbers(option: str, wanted: Collection[int] | None, known: Collection[int]) -> None:
    """A number that the world does not have would keep nothing and prove nothing. Raises
    ConfigError."""
    unknown = sorted(set(wanted or ()).difference(known))
    if unknown:
        most = max(known, default=0)
        raise ConfigError(f"{option}: the world has 0 to {most}, and no {unknown[0]}")


def run_all(seeds: Sequence[int], jobs: int, mutant: str, *, as_json: bool) -> int:
    from pdcore.sim.seeds import run_seeds

    totals = run_seeds(seeds, jobs=jobs, mutant=mutant, on_result=teller(len(seeds)))
    report = totals.report()
    caught = bool(totals.violations)
    if mutant:
        report = {"mutant": mutant, "caught": caught, **report}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(totals, report, mutant)
    return int(not caught if mutant else caught)


def try_all(seeds: Sequence[int], jobs: int, *, as_json: bool) -> int:
    """Every variant that a cluster must catch, until a seed does; the exit status says whether
    all were caught."""
    from pdcore.sim.mutants import find_mutant
    from pdcore.sim.seeds import CAUGHT_HERE, run_seeds

    rows: list[dict[str, object]] = []
    for name in CAUGHT_HERE:
        row: dict[str, object] = {"mutant": name, "undoes": find_mutant(name).undoes}
        totals = run_seeds(seeds, jobs=jobs, mutant=name)
        row |= {"caught": bool(totals.violations), "seeds": totals.num_seeds}
        if totals.violations:
            row |= totals.violations[0]._asdict()
        rows.append(row)
        if not as_json:
            print("\n".join(f"{key}: {value}" for key, value in row.items()) + "\n", flush=True)
    if as_json:
        print(json.dumps({"mutants": rows}, indent=2))
    return int(not all(row["caught"] for row in rows))


def teller(count: int) -> Callable[[SeedResult], None]:
    """Says on standard error how far it is, and at once what was found."""
    last_s = time.monotonic()
    done = broken = 0

    def tell(found: SeedResult) -> None:
        nonlocal last_s, done, broken
        done += 1
        broken += bool(found.violations)
        if found.violations:
            first = found.violations[0]
            print(f"seed {first.seed}: {first.message}\n  {first.replay}", file=sys.stderr)
        now_s = time.monotonic()
        if now_s - last_s >= TELL_EVERY_S:
            last_s = now_s
            print(f"{done} of {count} seeds, {broken} broken", file=sys.stderr, flush=True)

    return tell


def replay(
    seed: int,
    *,
    faults: list[int] | None,
    requests: list[int] | None,
    mutant: str,
    as_json: bool,
) -> int:
    """One world, told in full."""
    from pdcore.sim.mutants import planted
    from pdcore.sim.plan import make_plan
    from pdcore.sim.world import run_world

    if mutant == ALL:
        raise ConfigError("--seed replays one world: name one variant with --mutant")
    plan = make_plan(seed)
    check_numbers("--only-faults", faults, [fault.number for fault in plan.faults])
    check_numbers("--only-requests", requests, [request.number for request in plan.requests])
    plan = plan.only(faults, requests)
    with planted(mutant):
        result = run_world(plan, is_traced=True)
    if as_json:
        shown = {
            "seed": seed,
            "options": str(plan.options),
            "plan": [str(fault) for fault in plan.faults],
            "requests": result.num_requests,
            "virtual_seconds": round(result.virtual_s, 3),
            "faults": result.faults,
            "outcomes": result.outcomes,
            "digest": result.digest,
            "violations": result.violations,
            "trace": result.trace,
        }
        print(json.dumps(shown, indent=2))
    else:
        for line in result.trace or ():
            print(line)
        print(f"\n{plan.options}")
        for fault in plan.faults:
            print(
                f"fault {fault.number}: {fault.kind} {fault.target} (with {fault.other}), "
                f"{fault.at_s:.3f} s after the load began, for {fault.duration_s:.3f} s, "
                f"amount {fault.amount:.3f}"
            )
        print(f"{result.num_requests} requests: {result.outcomes}; trace {result.digest}")
        for text in result.violations:
            print(f"BROKEN: {text}")
        print("broken" if result.violations else "everything held")
    return int(bool(result.violations))


def _print(totals: Totals, report: dict[str, object], mutant: str) -> None:
    print(
        f"{totals.num_seeds} seeds, {totals.num_requests} requests, {totals.virtual_s:.0f} virtual "
        f"seconds in {report['wall_seconds']} s; "
        f"{report['requests_per_cpu_second']} requests a second and core"
    )
    for title, counts in (("faults", totals.faults), ("outcomes", totals.outcomes)):
        shown = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        print(f"{title}: {shown}")
    for command, found in groupby(totals.violations, key=lambda violation: violation.replay):
        print()
        for violation in found:
            print(f"seed {violation.seed}: {violation.message}")
        print(f"  {command}")
    if mutant:
        print(f"{mutant}: {'caught' if totals.violations else 'NOT CAUGHT'}")
    elif not totals.violations:
        print("everything held")
