"""``python -m benchmarks [NAME ...] [--json] [--quick]`` from the repository root.

A benchmark NAME is a module ``benchmarks/NAME.py`` with ``run(quick: bool) -> dict``; adding
the file is all it takes. Without a name all of them run. ``--json`` prints one JSON object
per benchmark and nothing else. Exit status 1 if a benchmark's own correctness check fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

if importlib.util.find_spec("pdcore") is None:  # a checkout that is not installed
    sys.path.insert(0, str(FOLDER.parent / "src"))
    os.environ["PYTHONPATH"] = str(FOLDER.parent / "src")  # processes that it starts

from benchmarks.common import CheckFailed, Result, table_of  # noqa: E402


def names() -> list[str]:
    """Every benchmark there is."""
    return sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if path.stem != "common" and not path.stem.startswith("_")
    )


def run_one(name: str, quick: bool) -> Result:
    module = importlib.import_module(f"benchmarks.{name}")
    result: Result = module.run(quick)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(names())}")
    parser.add_argument("--json", action="store_true", help="one JSON object per benchmark")
    parser.add_argument("--quick", action="store_true", help="under 40 s each on two cores")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(names())}")
    status = 0
    for name in options.names or names():
        try:
            result = run_one(name, options.quick)
        except CheckFailed as error:
            print(f"{name}: correctness check failed, nothing was timed: {error}", file=sys.stderr)
            status = 1
            continue
        print(json.dumps(result) if options.json else table_of(result), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
