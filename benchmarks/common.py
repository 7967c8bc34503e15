"""What every benchmark shares: interleaved measurement, medians, ratios, the result's shape.

Rules. Ours and the peers run interleaved (A B A B ...) in one process tree, at least five
times; the median and the ratio count, never an absolute time. A peer that is not installed
is reported as null with the reason, never invented. A correctness check comes before the
timing (:func:`check`).

A result is one JSON object, or one object with ``"rows"``, a list of them::

    {"name", "metric", "unit", "value", "peer", "peer_value", "ratio", "limit", "runs",
     "better": "higher" | "lower", "target", "meets", "spread", "peer_spread", "environment"}

``ratio`` is value / peer_value, whichever is better; a ``spread`` is the least and the
greatest of all runs: how far to trust it.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Result = dict[str, object]

#: Runs of each side: never fewer than five.
RUNS = 5


class CheckFailed(Exception):
    """The sides do not do the same work, so timing them would mean nothing."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailed(what)


def interleave(
    sides: Mapping[str, Callable[[], float]], runs: int = RUNS, *, warmup: bool = True
) -> dict[str, list[float]]:
    """Run every side once per round, round after round, and collect what each returns.

    A side measures itself and returns one number. The order turns by one place each round,
    so that no side is always the one after the most expensive. The garbage collector is
    emptied before each run, not switched off.
    """
    if warmup:
        for side in sides.values():
            side()
    measured: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(runs):
        for name in order:
            gc.collect()
            measured[name].append(sides[name]())
        order = [*order[1:], order[0]]
    return measured


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process (all threads): what other jobs take does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


def wall_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def row(
    name: str,
    metric: str,
    unit: str,
    values: Sequence[float],
    peer: str | None,
    peer_values: Sequence[float] = (),
    *,
    better: str,
    target: str,
    meets: Callable[[float], bool] | None = None,
    limit: float | None = None,
    reason: str = "",
) -> Result:
    """One line of a result. ``meets`` judges the ratio value / peer_value. A peer of None
    needs the ``reason`` why it did not run."""
    value = statistics.median(values)
    peer_value = statistics.median(peer_values) if peer_values else None
    ratio = value / peer_value if peer_value else None
    result: Result = {
        "name": name,
        "metric": metric,
        "unit": unit,
        "value": rounded(value),
        "peer": peer,
        "peer_value": rounded(peer_value),
        "ratio": rounded(ratio),
        "limit": rounded(limit),
        "runs": len(values),
        "better": better,
        "target": target,
        "spread": spread_of(values),
        "peer_spread": spread_of(peer_values),
        "meets": meets(ratio) if meets is not None and ratio is not None else None,
    }
    if reason:
        result["reason"] = reason
    return result


def spread_of(values: Sequence[float]) -> list[float | None] | None:
    return [rounded(min(values)), rounded(max(values))] if values else None


def rounded(value: float | None) -> float | None:
    """Four significant digits: more would claim a precision that is not there."""
    return None if value is None else float(f"{value:.4g}")


def result_of(name: str, rows: Sequence[Result], **notes: object) -> Result:
    """A benchmark with several rows; ``notes`` describe the workload."""
    return {"name": name, "rows": list(rows), **notes, "environment": environment()}


def environment() -> Result:
    """What the numbers were measured on; the load average says how busy it was."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": rounded(os.getloadavg()[0]),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def table_of(result: Result) -> str:
    """The same result for people."""
    rows = result.get("rows", [result])
    lines = []
    for one in rows if isinstance(rows, list) else []:
        verdict = {True: "meets", False: "MISSES", None: "-"}[one.get("meets")]
        peer = f"{one['peer']} {one['peer_value']}" if one["peer"] else one.get("reason", "no peer")
        lines.append(
            f"{one['name']:<28} {one['metric']:<22} {one['value']:>10} {one['unit']:<10} "
            f"against {peer:<34} ratio {one['ratio']}  {verdict} {one['target']}"
        )
    return "\n".join(lines)
