"""One worker process, from its configuration on standard input to its exit status.

``python -m pdcore.server.worker_main`` is started by a leader (see
:mod:`pdcore.server.launch`), never by hand. Exit status: 0 drained, 2 for a mistake that a
restart would repeat (configuration, model), 1 for anything else.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Final

from pdcore.config import WorkerConfig
from pdcore.errors import ConfigError, EngineError, PdcoreError
from pdcore.server.process import (
    EXIT_FAILED,
    EXIT_USAGE,
    Failed,
    Parent,
    Progress,
    Ready,
    enter_child,
    loading,
)

if TYPE_CHECKING:
    from pdcore.control.messages import LeaderMessage, WorkerMessage
    from pdcore.worker import LeaderPort, Worker

_log: Final = logging.getLogger(__name__)
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Last results still leave after the loop has ended, at most this long.
LINGER_S: Final = 1.0
#: On SIGTERM without a leader's word: what runs may finish this long.
SIGTERM_DRAIN_S: Final = 5.0


def main() -> int:
    """Entry point; heavy imports come after our life is tied to the leader's."""
    parent = enter_child(sys.argv)
    try:
        config = WorkerConfig.decode(parent.config)
        logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT, force=True)
        if config.cpu_cores and sys.platform == "linux":
            os.sched_setaffinity(0, config.cpu_cores)
        run(config, parent)
    except (PdcoreError, OSError, MemoryError) as error:
        status = exit_status(error)
        _log.error("%s", error, exc_info=status != EXIT_USAGE)
        parent.report(Failed(str(error) or type(error).__name__))
        return status
    return 0


def exit_status(error: Exception) -> int:
    """EXIT_USAGE for a mistake that a restart would repeat; the instance gives up then. A rank
    whose group was lost, while it met it or warmed up, made none: it is started again (D45)."""
    from pdcore.engine.base import GroupLost

    is_mistake = isinstance(error, ConfigError | EngineError) and not isinstance(error, GroupLost)
    return EXIT_USAGE if is_mistake else EXIT_FAILED


def run(config: WorkerConfig, parent: Parent) -> None:
    """Build the worker, serve until told to stop, release everything. Raises PdcoreError
    or OSError for whatever keeps it from serving."""
    with loading():
        from pdcore.server.worker_parts import build

        parts = build(config, lambda text: parent.report(Progress(text)))
    port = StoppablePort(parts.link, parts.background.wake)
    signal.signal(signal.SIGTERM, port.handle_signal)
    signal.signal(signal.SIGINT, port.handle_signal)
    try:
        worker = parts.assemble(port, port.is_told_to_stop)
        serve(worker, parts.announce, lambda: parent.report(Ready()))
    finally:
        left = parts.close(LINGER_S)
        if left:
            _log.warning("left behind: %s", "; ".join(left))


def serve(worker: Worker, announce: Callable[[Worker], None], on_ready: Callable[[], None]) -> None:
    """Announce, then loop. The order is D34's: memory first, words last."""
    worker.runner.warm_up()
    announce(worker)
    on_ready()
    _log.info("serving: %s", worker.core)
    worker.run()
    _log.info("drained")


class StoppablePort:
    """The leader's port with one more voice: a signal is a Stop message (D59).

    Safe in a signal handler: it appends and wakes, nothing else."""

    def __init__(self, port: LeaderPort, wake: Callable[[], None]) -> None:
        self._port = port
        self._wake = wake
        self._stops: list[LeaderMessage] = []

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        from pdcore.control.messages import Stop

        self._stops.append(Stop(SIGTERM_DRAIN_S))
        self._wake()

    def is_told_to_stop(self) -> bool:
        """By a signal that nobody has received yet."""
        return bool(self._stops)

    def receive(self, limit: int = 256) -> list[LeaderMessage]:
        messages = self._port.receive(limit)
        while self._stops:  # one by one: a signal may come between any two of these lines
            messages.append(self._stops.pop(0))
        return messages

    def send(self, message: WorkerMessage) -> None:
        self._port.send(message)


if __name__ == "__main__":
    sys.exit(main())
