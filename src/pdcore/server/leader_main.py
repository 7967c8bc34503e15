"""Leader and router processes as children of ``pdcore up`` and ``pdcore demo``.

``python -m pdcore.server.leader_main`` reads a :class:`LeaderSpec` from standard input.
Exit status as in :mod:`pdcore.server.worker_main`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from pdcore.config import InstanceConfig, RouterConfig
from pdcore.errors import ConfigError, EngineError, PdcoreError
from pdcore.server.process import (
    EXIT_FAILED,
    EXIT_USAGE,
    Failed,
    Report,
    enter_child,
    loading,
)

_log: Final = logging.getLogger(__name__)
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Exit status of a process that was told twice to stop (128 + SIGINT).
EXIT_FORCED: Final = 130


class LeaderSpec(msgspec.Struct, frozen=True, tag="leader"):
    """One instance to lead, and the folders to use."""

    config: InstanceConfig
    cache_dir: str
    run_dir: str


class RouterSpec(msgspec.Struct, frozen=True, tag="router"):
    """A router to run."""

    config: RouterConfig


Spec = LeaderSpec | RouterSpec


def decode_spec(data: bytes) -> Spec:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(data, type=Spec)
    except msgspec.DecodeError as error:
        raise ConfigError(f"process configuration: {error}") from None


def log_level_of(spec: Spec) -> str:
    """debug, info, warning or error."""
    return spec.config.log_level if isinstance(spec, RouterSpec) else spec.config.server.log_level


def set_up_logging(spec: Spec) -> None:
    """To standard error; the web server's own lines only where everything is asked for."""
    level = log_level_of(spec)
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, force=True)
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def main() -> int:
    """Entry point of a child process."""
    parent = enter_child(sys.argv)
    try:
        spec = decode_spec(parent.config)
    except ConfigError as error:
        parent.report(Failed(str(error)))
        return EXIT_USAGE
    set_up_logging(spec)
    return run_process(spec, parent.report)


def run_process(spec: Spec, report: Callable[[Report], None]) -> int:
    """Run one leader or router in this process until it is told to stop; the first SIGINT
    or SIGTERM drains, the second ends everything. Returns the exit status; what keeps it
    from serving is reported as Failed, never raised."""
    try:
        return asyncio.run(_run(spec, report))
    except (ConfigError, EngineError) as error:
        _log.debug("cannot serve", exc_info=True)
        report(Failed(str(error)))
        return EXIT_USAGE
    except (PdcoreError, OSError) as error:
        _log.exception("the process ends")
        report(Failed(str(error) or type(error).__name__))
        return EXIT_FAILED


async def _run(spec: Spec, report: Callable[[Report], None]) -> int:
    stopping = asyncio.Event()
    if isinstance(spec, RouterSpec):
        with loading():
            from pdcore.server.router_run import run_router

        return await _until_forced(run_router(spec.config, stopping, report), stopping, _nothing)
    with loading():
        from pdcore.server.leader import Leader, Place

    place = Place(Path(spec.cache_dir), Path(spec.run_dir))
    leader = Leader(spec.config, place, report)
    return await _until_forced(leader.run(stopping), stopping, leader.kill)


async def _until_forced(
    main_part: Awaitable[int], stopping: asyncio.Event, kill: Callable[[], None]
) -> int:
    """The part's own status, or EXIT_FORCED after a second signal."""
    forced: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_signal() -> None:
        if not stopping.is_set():
            _log.info("stopping: running requests may finish; a second signal ends them")
            stopping.set()
            return
        kill()
        if not forced.done():
            forced.set_result(EXIT_FORCED)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    running = asyncio.ensure_future(main_part)
    await asyncio.wait([running, forced], return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        running.cancel()
        await asyncio.wait([running], timeout=5.0)
        return forced.result()
    return running.result()


def _nothing() -> None:
    """A router has no workers to end."""


if __name__ == "__main__":
    sys.exit(main())
