"""What ``pdcore verify lifecycles`` does: explore, report, try mutants, replay.

Counterexamples are files: ``--replay`` walks one again and shows each step.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from pdcore.errors import ConfigError
from pdcore.sim.configurations import Configuration
from pdcore.sim.explore import SAFETY, Exploration, Violation
from pdcore.sim.firing import ROW_IDS
from pdcore.sim.lifecycles import CONFIGURATIONS, MIXES
from pdcore.sim.mutants import MUTANTS, find_mutant

#: Seconds between two words about a world that takes long.
TELL_EVERY_S: Final = 2.0
#: A whole run takes every row of every lifecycle so often: a row that one rare order of events
#: reaches once has hardly been looked at.
MIN_TAKEN: Final = 100
ALL: Final = "all"


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A counterexample as a file: which world, which moves, what is wrong at the end."""

    configuration: str
    kind: str
    problem: str
    trace: tuple[str, ...]
    mutant: str = ""
    about: str = "a counterexample of `pdcore verify lifecycles`; --replay FILE walks it again"


class Ran(NamedTuple):
    configuration: Configuration
    exploration: Exploration


# --- choosing and running ---------------------------------------------------------------


def choose(only: Sequence[str]) -> list[Configuration]:
    wanted = [name.strip() for text in only for name in text.split(",") if name.strip()]
    known = {config.name: config for config in CONFIGURATIONS}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--only: no world {name!r}; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)] or list(CONFIGURATIONS)


def _explore(config: Configuration, mutant: str, *, quiet: bool) -> Exploration:
    name = config.name if not mutant else f"{config.name} with {mutant}"
    return config.run(mutant, progress=None if quiet else teller(name, time.monotonic))


def teller(
    name: str, clock: Callable[[], float], done: str = "states", left: str = "states"
) -> Callable[[int, int], None]:
    """Says on standard error how far a world is, when it takes longer than a moment."""
    started = last = clock()

    def tell(states: int, waiting: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= TELL_EVERY_S:
            last = now
            took = now - started
            print(
                f"  {name}: {states:,} {done}, {waiting:,} {left} to be looked at, {took:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    return tell


def prove(chosen: Sequence[Configuration], as_json: bool, save: Path, *, is_whole: bool) -> int:
    """Explore these worlds; the exit status."""
    started = time.monotonic()
    ran = [Ran(config, _explore(config, "", quiet=as_json)) for config in chosen]
    report = report_of(ran, time.monotonic() - started, is_whole=is_whole, save=save)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(ran, report)
    return 1 if report["violations"] else 0


def try_mutants(wanted: str, chosen: Sequence[Configuration], as_json: bool, save: Path) -> int:
    """One by name, or all, each in the worlds that must catch it; caught is what is wanted."""
    names = list(MUTANTS) if wanted == ALL else [find_mutant(wanted).name]
    out: list[dict[str, object]] = []
    for name in names:
        worlds = [config for config in chosen if name in config.catches]
        if not worlds and len(names) == 1:
            raise ConfigError(f"--mutant: none of the chosen worlds is there to catch {name!r}")
        for config in worlds:
            found = _explore(config, name, quiet=as_json)
            violation = found.violations[0] if found.violations else None
            row: dict[str, object] = {
                "mutant": name,
                "undoes": MUTANTS[name].undoes,
                "configuration": config.name,
                "caught": violation is not None,
                "states": found.states,
                "seconds": round(found.seconds, 3),
            }
            if violation is not None:
                row |= _violation(config, violation, save, name)
            out.append(row)
            if not as_json:
                _print_mutant(row)
    if not out:
        raise ConfigError("--mutant: none of the chosen worlds is there to catch any")
    if as_json:
        print(json.dumps({"mutants": out}, indent=2))
    return 0 if all(row["caught"] for row in out) else 1


def walk_mixes(seeds: range, mutant: str, as_json: bool, save: Path) -> int:
    """Random walks through everything at once; reported apart from what is explored."""
    out: list[dict[str, object]] = []
    violations: list[dict[str, object]] = []
    for config in MIXES:
        tell = None if as_json else teller(config.name, time.monotonic, "moves", "walks")
        found = config.walk(seeds, mutant, progress=tell)
        broken = [_violation(config, v, save, mutant) for v in found.violations[:1]]
        violations += broken
        out.append(
            {
                "name": config.name,
                "covers": config.covers,
                "bounds": dict(config.bounds),
                "walks": found.walks,
                "moves": found.moves,
                "faults": found.faults,
                "seconds": round(found.seconds, 3),
                "broken": len(found.violations),
                "violations": broken,
            }
        )
        if not as_json:
            print(
                f"{config.name}: {found.walks} walks, {found.moves:,} moves, {found.faults:,} of "
                f"them faults, {found.seconds:.1f} s, {len(found.violations)} broken"
            )
            for violation in broken:
                print(f"  {violation['kind']}: {violation['problem']}\n  {violation['replay']}")
    if as_json:
        print(json.dumps({"mixes": out, "violations": violations}, indent=2))
    return (0 if violations else 1) if mutant else (1 if violations else 0)


def replay_file(path: Path) -> int:
    scenario = read_scenario(path)
    config = world_of(scenario)
    if scenario.mutant:
        find_mutant(scenario.mutant)
        print(f"with the known-bad variant {scenario.mutant}: {MUTANTS[scenario.mutant].undoes}")
    steps = config.replay(scenario.mutant, scenario.trace)
    problems: list[str] = []
    for number, step in enumerate(steps):
        print(f"{number:3d} {step.label or 'at the beginning'}")
        print(f"      {step.state}")
        problems += step.problems
    for problem in problems:
        print(f"BROKEN: {problem}")
    is_broken = bool(problems)
    if not problems and scenario.kind != SAFETY:
        is_broken = not config.can_end(scenario.mutant, scenario.trace)
        if is_broken:
            print(f"{scenario.kind}: {scenario.problem}")
    print("still fails" if is_broken else f"does not fail any more: {scenario.problem}")
    return 1 if is_broken else 0


def world_of(scenario: Scenario) -> Configuration:
    """Raises ConfigError for the name of none."""
    mix = next((config for config in MIXES if config.name == scenario.configuration), None)
    return mix or choose((scenario.configuration,))[0]


def read_scenario(path: Path) -> Scenario:
    """Raises ConfigError naming the file and what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Scenario)
    except OSError as error:
        raise ConfigError(f"--replay {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--replay {path}: not a counterexample: {error}") from error


# --- reporting --------------------------------------------------------------------------


def report_of(
    ran: Sequence[Ran], seconds: float, *, is_whole: bool, save: Path
) -> dict[str, object]:
    """What --json prints. ``is_whole``: all worlds ran, so every row must have been taken at
    least MIN_TAKEN times."""
    rows = _rows(found for _, found in ran)
    counts = {row: count for table in rows.values() for row, count in table.items()}
    never = [row for row, count in counts.items() if not count]
    rarely = {row: count for row, count in counts.items() if 0 < count < MIN_TAKEN}
    violations: list[dict[str, object]] = []
    worlds: list[dict[str, object]] = []
    for config, found in ran:
        broken = [_violation(config, v, save) for v in found.violations]
        violations += broken
        worlds.append(
            {
                "name": config.name,
                "covers": config.covers,
                "states": found.states,
                "transitions": found.transitions,
                "depth": found.depth,
                "seconds": round(found.seconds, 3),
                "exhausted": found.exhausted,
                "bounds": dict(config.bounds),
                "invariants": list(config.invariants),
                "violations": broken,
            }
        )
    if is_whole:
        problems = [f"never taken: {row}" for row in never]
        problems += [f"taken {n} times, at least {MIN_TAKEN}: {row}" for row, n in rarely.items()]
        violations += [{"kind": "coverage", "problem": problem} for problem in problems]
    return {
        "states": sum(found.states for _, found in ran),
        "transitions": sum(found.transitions for _, found in ran),
        "seconds": round(seconds, 3),
        "exhausted": all(found.exhausted for _, found in ran),
        "bounds": {config.name: dict(config.bounds) for config, _ in ran},
        "invariants": list(dict.fromkeys(i for config, _ in ran for i in config.invariants)),
        "violations": violations,
        "configurations": worlds,
        "rows": rows,
        "rows_never_taken": never,
        "rows_rarely_taken": rarely,
    }


def _rows(found: Iterable[Exploration]) -> dict[str, dict[str, int]]:
    """table -> row -> moves that took it."""
    taken: dict[str, int] = {}
    for exploration in found:
        for row, count in exploration.rows.items():
            taken[row] = taken.get(row, 0) + count
    return {table: {row: taken.get(row, 0) for row in rows} for table, rows in ROW_IDS.items()}


def _violation(
    config: Configuration, violation: Violation, save: Path, mutant: str = ""
) -> dict[str, object]:
    """The violation, and the file that replays it."""
    name = "-".join(word for word in ("lifecycles", config.name, mutant) if word)
    path = save / f"{name}.json"
    scenario = Scenario(config.name, violation.kind, violation.problem, violation.trace, mutant)
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario)))
    except OSError as error:
        raise ConfigError(f"--save {save}: cannot write {path.name}: {error.strerror}") from error
    return {
        "kind": violation.kind,
        "problem": violation.problem,
        "configuration": config.name,
        "trace": list(violation.trace),
        "state": violation.state,
        "replay": f"pdcore verify lifecycles --replay {path}",
    }


def _print(ran: Sequence[Ran], report: Mapping[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("world", "states", "transitions", "depth", "seconds", "verdict"):
        table.add_column(title, justify="left" if title in ("world", "verdict") else "right")
    for config, found in ran:
        verdict = "holds, all seen" if found.exhausted else "BROKEN"
        table.add_row(
            config.name,
            f"{found.states:,}",
            f"{found.transitions:,}",
            str(found.depth),
            f"{found.seconds:.1f}",
            verdict,
        )
    console = Console()
    console.print(table)
    states = sum(found.states for _, found in ran)
    print(f"\n{states:,} states in {report['seconds']} s")
    counts = [
        count for counted in _rows(found for _, found in ran).values() for count in counted.values()
    ]
    num_taken = sum(count > 0 for count in counts)
    print(
        f"{num_taken} of {len(counts)} rows of the lifecycles were taken, "
        f"the rarest {min(counts):,} times"
    )
    violations = report["violations"]
    assert isinstance(violations, list)
    for violation in violations:
        print(f"\n{violation['kind']}: {violation['problem']}")
        for number, label in enumerate(violation.get("trace", ()), 1):
            print(f"  {number:3d} {label}")
        if "replay" in violation:
            print(f"replay: {violation['replay']}")
    if not violations:
        print("everything holds")


def _print_mutant(row: Mapping[str, object]) -> None:
    verdict = "caught" if row["caught"] else "NOT CAUGHT"
    print(
        f"{row['mutant']} in {row['configuration']}: {verdict} after {row['states']} states "
        f"({row['seconds']} s)\n  undoes {row['undoes']}",
        flush=True,
    )
    if row["caught"]:
        print(f"  {row['kind']}: {row['problem']}\n  replay: {row['replay']}", flush=True)


def show_list(as_json: bool) -> int:
    if as_json:
        worlds = [
            {"name": c.name, "covers": c.covers, "bounds": dict(c.bounds), "catches": c.catches}
            for c in CONFIGURATIONS
        ]
        mutants = {m.name: m.undoes for m in MUTANTS.values()}
        print(json.dumps({"configurations": worlds, "mutants": mutants}, indent=2))
        return 0
    print("Worlds (--only NAME):")
    print_names((config.name, config.covers) for config in CONFIGURATIONS)
    print("\nKnown-bad variants (--mutant NAME), each undoing one rule, and who finds it:")
    print_names((m.name, f"{m.undoes} [{worlds_of(m.name)}]") for m in MUTANTS.values())
    print(
        "\nRules are those of docs/architecture.md, section 3; sections are of that page;"
        "\nD.. is a row of docs/requirements.md. The bounds of each world: --list --json"
    )
    return 0


def worlds_of(mutant: str) -> str:
    return ", ".join(config.name for config in CONFIGURATIONS if mutant in config.catches)


def print_names(rows: Iterable[tuple[str, str]]) -> None:
    """Two columns as wide as the terminal allows."""
    listed = list(rows)
    indent = max(len(name) for name, _ in listed) + 4
    width = max(shutil.get_terminal_size().columns, indent + 20)
    for name, text in listed:
        first, *more = textwrap.wrap(text, width - indent, break_on_hyphens=False)
        print(f"  {name:{indent - 2}}{first}")
        for line in more:
            print(" " * indent + line)
