"""A worker's loop in a thread of this process, ended and cleaned up in one place.

For servers that keep everything in one process; pdcore's own server gives every worker a
process instead (a runner that holds the GIL for long slows down its host).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

from pdcore.errors import EngineError
from pdcore.worker import Worker

#: Releasing transport and sockets takes at most this long.
CLOSE_TIMEOUT_S: Final = 5.0
#: Longer than any iteration of the loop; a runner that hangs is given up after it.
STOP_TIMEOUT_S: Final = 30.0


class WorkerThread:
    """Runs ``worker`` from :meth:`start` to :meth:`stop`; also a context manager.

    From ``start`` on the worker belongs to its thread: other threads only use its
    :class:`~pdcore.local.LocalPort`. To drain first, call the port's ``stop(drain_s)`` and
    :meth:`join`. ``on_end`` is called in the thread when the loop has ended: True as it was
    told to, False by an error, which ``threading.excepthook`` shows.
    """

    def __init__(self, worker: Worker, on_end: Callable[[bool], None] | None = None) -> None:
        self.worker = worker
        self._on_end = on_end
        name = f"worker-{worker.core.setup.me.instance}-{worker.core.setup.me.rank}"
        # A daemon: a host that forgets to stop it can still exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._begun = threading.Event()
        self._is_cold = False
        self._is_closed = False

    def start(self) -> None:
        """Returns when the runner has warmed up, in the thread, and the loop begins. Raises
        EngineError when it could not (and is stopped), RuntimeError the second time."""
        self._thread.start()
        self._begun.wait()
        if self._is_cold:
            self.stop()
            raise EngineError("the model runner could not warm up")

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the loop has ended by itself; False when ``timeout_s`` passed."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> list[str]:
        """End the loop after its current iteration, then release transport, channel and
        runner. Returns what had to be left behind, usually []. Idempotent.

        A loop that has not ended after ``timeout_s`` (a runner that hangs) still uses them,
        so nothing is released then, and a later call tries again."""
        if self._is_closed:
            return []
        self.worker.stop()
        if self._thread.ident is not None and not self.join(timeout_s):
            return [f"{self._thread.name} has not ended within {timeout_s:g} s"]
        self._is_closed = True
        return self.worker.close(CLOSE_TIMEOUT_S)

    def __enter__(self) -> WorkerThread:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        was_told = False
        try:
            self.worker.runner.warm_up()
            self._begun.set()
            self.worker.run()
            was_told = True
        finally:
            self._is_cold = not self._begun.is_set()
            self._begun.set()
            if self._on_end is not None:
                self._on_end(was_told)
