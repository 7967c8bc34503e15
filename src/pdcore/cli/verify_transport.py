"""``pdcore verify transport``: proof 3, whether a KV transport does here what it promises."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from pdcore.cli.options import Words
from pdcore.errors import ConfigError

if TYPE_CHECKING:
    from pdcore.testing.transport_verify import Tell, Verdict

#: Seconds between two words about how far it is, where they are not written over each other.
TELL_EVERY_S: Final = 2.0


def transport(
    *names: str,
    all_: Annotated[bool, Parameter(name="--all", negative="", show_default=False)] = False,
    only: Words = (),
    list_: Annotated[bool, Parameter(name="--list", negative="", show_default=False)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    timeout_s: float = 180.0,
) -> int:
    """Check on this machine what a KV transport promises, guarantee by guarantee.

    The conformance suite moves bytes between processes, kills, stops and restarts them, sends
    hostile descriptors, cancels, connects a thousand times; and asks each time whether every
    byte is where it belongs, none elsewhere, each transfer ended once, and nothing was leaked.
    Some ten seconds for a transport. The same checks run in pdcore's own tests. They run in a
    process of their own: a vendor's library that crashes or hangs fails that check only.

    Your own transport is checked by its name as soon as its package is installed: see
    docs/your-transport.md.

    Exit status 0: every check passed that the transport's declared capabilities ask for. 1: one
    failed, or a transport that was named does not work on this machine; the reason and what
    helps are printed. With --all, one that does not work here is reported, and is no failure.

    Examples:

    - `pdcore verify transport shm`
    - `pdcore verify transport --all --json | jq '.transports.shm.checks.failed'`
    - `pdcore verify transport shm --only sender_killed,receiver_killed`

    Parameters
    ----------
    names
        Transports, as `--list` or `pdcore doctor` has them; `auto`: what it means here.
    all_
        All of them.
    only
        Only these checks, separated by commas; names as --list has them.
    list_
        Names of the transports and of the checks, and what each check shows.
    as_json
        One JSON object: `transports` by name, each with `available`, `reason`, `remedy`,
        `checks` (`passed`, `failed`, `skipped`), `capabilities` and `seconds`.
    timeout_s
        A check that takes longer has failed.
    """
    from pdcore.testing.transport_verify import verify_transport

    if list_:
        return show_list(as_json)
    if timeout_s <= 0:
        raise ConfigError(f"--timeout-s must be more than 0, got {timeout_s:g}")
    chosen = choose_names(names, is_all=all_)
    checks = choose_checks(only)
    started = time.monotonic()
    verdicts = []
    for name in chosen:
        with progress(name, quiet=as_json) as tell:
            verdicts.append(verify_transport(name, checks, tell, timeout_s))
    ok = all(is_ok(verdict, was_named=not all_) for verdict in verdicts)
    if as_json:
        print(json.dumps(report_of(verdicts, time.monotonic() - started, ok=ok), indent=2))
    else:
        show(verdicts)
    return 0 if ok else 1


def choose_names(names: Sequence[str], *, is_all: bool) -> list[str]:
    """Raises ConfigError, naming those there are."""
    from pdcore.transports import registry

    known = registry.names()
    if is_all and names:
        raise ConfigError(f"--all is every transport: leave out {' '.join(names)}")
    if is_all:
        return known
    if not names:
        raise ConfigError(f"name a transport, or give --all; there are: {', '.join(known)}")
    chosen = [registry.resolve(name) if name == registry.AUTO else name for name in names]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no transport {name!r}; there are: {', '.join(known)}")
    return list(dict.fromkeys(chosen))


def choose_checks(only: Sequence[str]) -> list[str]:
    """Raises ConfigError for a check that there is not."""
    from pdcore.testing.conformance import CHECKS

    known = [check.name for check in CHECKS]
    wanted = [name.strip() for text in only for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--only: no check {name!r}; there are: {', '.join(known)}")
    return wanted


def is_ok(verdict: Verdict, *, was_named: bool) -> bool:
    return not verdict.failed and (verdict.available or not was_named)


@contextmanager
def progress(name: str, *, quiet: bool) -> Iterator[Tell | None]:
    """Where the suite is, on standard error: one line that is written over on a terminal, a
    line every few seconds elsewhere."""
    if quiet:
        yield None
        return
    last = time.monotonic()
    on_terminal = sys.stderr.isatty()

    def tell(check: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        line = f"{name}: {done} of {total} checks, now {check}"
        if on_terminal:
            print(f"\r\x1b[K{line[:78]}", end="", file=sys.stderr, flush=True)
        elif now - last >= TELL_EVERY_S:
            last = now
            print(f"  {line}", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def report_of(verdicts: Sequence[Verdict], seconds: float, *, ok: bool) -> dict[str, object]:
    """What --json prints."""
    return {
        "ok": ok,
        "seconds": round(seconds, 3),
        "transports": {verdict.name: _entry(verdict) for verdict in verdicts},
    }


def _entry(verdict: Verdict) -> dict[str, object]:
    results = verdict.results
    return {
        "available": verdict.available,
        "reason": verdict.reason,
        "remedy": verdict.remedy,
        "checks": {
            "passed": [r.check for r in results if r.outcome == "passed"],
            "failed": verdict.failed,
            "skipped": {r.check: r.reason for r in results if r.outcome == "skipped"},
        },
        "capabilities": None if verdict.caps is None else verdict.caps.as_json(),
        "seconds": round(verdict.seconds, 3),
    }


def show(verdicts: Sequence[Verdict]) -> None:
    """A line for each transport, then what failed and why."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("transport", "passed", "failed", "skipped", "seconds", "verdict"):
        table.add_column(title, justify="left" if title in ("transport", "verdict") else "right")
    for verdict in verdicts:
        counts = [
            sum(result.outcome == outcome for result in verdict.results)
            for outcome in ("passed", "failed", "skipped")
        ]
        if not verdict.available:
            table.add_row(verdict.name, *"---", "", Text("does not work here", "yellow"))
        else:
            word = Text("FAILED", "bold red") if verdict.failed else Text("holds", "green")
            cells = [str(count) for count in counts]
            table.add_row(verdict.name, *cells, f"{verdict.seconds:.1f}", word)
    Console().print(table)
    for verdict in verdicts:
        if not verdict.available:
            print(f"\n{verdict.name} does not work on this machine: {verdict.reason}")
            if verdict.remedy:
                print(f"  -> {verdict.remedy}")
        for result in verdict.results:
            if result.outcome != "passed":
                outcome = "FAILED" if result.outcome == "failed" else result.outcome
                print(f"\n{verdict.name}, {result.check}: {outcome}: {result.reason}")


def show_list(as_json: bool) -> int:
    from pdcore.cli.proving import print_names
    from pdcore.testing.conformance import CHECKS
    from pdcore.transports import registry

    found = registry.available()
    if as_json:
        checks = [
            {"name": c.name, "guarantee": c.guarantee, "shows": c.summary, "needs": list(c.needs)}
            for c in CHECKS
        ]
        print(json.dumps({"transports": found, "checks": checks}, indent=2))
        return 0
    print("Transports:")
    print_names((name, reason or "works here") for name, reason in found.items())
    print("\nChecks (--only NAME), by the guarantee that each is for:")
    print_names((check.name, f"[{check.guarantee}] {check.summary}") for check in CHECKS)
    print("\nG1 to G7 are those of pdcore/transports/base.py")
    return 0
