"""What this process has mapped of shm segments."""

from __future__ import annotations

from pathlib import Path


def resident_shared() -> int:
    """Our segments' part of RssShmem, by walking them: the sum in /proc/self/status is
    kept per processor and off by some pages on several kernels."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024 if ours else 0
        elif "-" in line.partition(" ")[0]:
            ours = "memfd:pdcore-kv" in line
    return total
