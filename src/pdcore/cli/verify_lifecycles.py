"""``pdcore verify lifecycles``: proof 1, every reachable state of small worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pdcore.cli.options import Words
from pdcore.errors import ConfigError

Text = Annotated[str, Parameter(show_default=False)]
Count = Annotated[int, Parameter(show_default=False)]
Folder = Annotated[Path, Parameter(show_default=False)]


def lifecycles(
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    only: Words = (),
    list_: Annotated[bool, Parameter(name="--list", negative="")] = False,
    mutant: Text = "",
    walks: Count = 0,
    start: int = 0,
    replay: Path | None = None,
    save: Folder = Path(),
) -> int:
    """Explore small worlds built from the production state machines, each to its end.

    Real cores of prefill and decode, groups, peers and the router are put into worlds that
    lose, repeat, reorder and delay every message, abort, time out, forget, crash and restart
    at any moment, with writes that land late. Checked in every state: one result per request,
    no block with two writers or reused too early, nothing leaked, no deadlock; and that from
    every state the end can be reached without another fault.

    Exit status 0: everything holds and every row of every lifecycle was taken 100 times at
    least. 1: something does not; the shortest way there is written to a file, and how to
    replay it is printed.
    With --mutant: 0 when the known-bad variant was caught, 1 when it was not.

    Examples:

    - `pdcore verify lifecycles --list`
    - `pdcore verify lifecycles --only pair,chunks`
    - `pdcore verify lifecycles --mutant free-on-abort`
    - `pdcore verify lifecycles --replay lifecycles-pair-free-on-abort.json`

    Parameters
    ----------
    as_json
        One JSON object; with --mutant, --walks and --list, too.
    only
        Only these worlds, separated by commas; names as --list has them. Rows that they do not
        take are no fault.
    list_
        Names of the worlds and of the known-bad variants, and what each is for.
    mutant
        Plant a known-bad variant and see whether it is caught; `all`: each of them.
    walks
        Instead, this many random walks through each of the mixes, which are too large to be
        explored: everything at once. They prove nothing; they may find something.
    start
        Seed of the first walk.
    replay
        Walk a counterexample again and show every step. Exit status 1 while it still fails, the
        known-bad variant in it planted.
    save
        Folder for counterexamples; default: the current one.
    """
    from pdcore.cli import proving

    if list_:
        return proving.show_list(as_json)
    if replay is not None:
        return proving.replay_file(replay)
    if walks < 0:
        raise ConfigError(f"--walks must be 0 or more, got {walks}")
    if not save.is_dir():
        raise ConfigError(f"--save {save}: no such folder")
    if walks:
        return proving.walk_mixes(range(start, start + walks), mutant, as_json, save)
    chosen = proving.choose(only)
    if mutant:
        return proving.try_mutants(mutant, chosen, as_json, save)
    return proving.prove(chosen, as_json, save, is_whole=not only)
