"""Keeping a prefill rank registered with its bootstrap server, from a thread of its own.

When to call and what health says meanwhile is :class:`pdcore.control.bootstrap_client.
Registrar`; here is only the thread that makes the calls, because they block and the worker
loop never waits for HTTP (D28). It never gives up (D33), and it says goodbye, so that a
planned stop is not noticed by a lease that runs out (D32).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pdcore.clock import Clock
from pdcore.control.bootstrap_client import CallReply, Registrar

_log = logging.getLogger(__name__)


class Registration:
    """``register`` and ``deregister`` make one bounded, blocking call each."""

    def __init__(
        self,
        registrar: Registrar,
        register: Callable[[], CallReply],
        deregister: Callable[[], CallReply],
        clock: Clock,
        *,
        on_change: Callable[[], None],
    ) -> None:
        self._registrar = registrar
        self._register = register
        self._deregister = deregister
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._has_tried = threading.Event()
        self._has_begun = False
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)

    def start(self, wait_s: float) -> None:
        """Begin, and wait for the first attempt to end, at most ``wait_s``: a rank that
        registers at once is then never seen as not ready."""
        self._thread.start()
        self._has_begun = True
        self._has_tried.wait(wait_s)

    def problems(self) -> list[str]:
        """Why the rank is not registered, for WorkerHealth; empty when it is. A thread that
        ended by an error is said at once, not when the lease has run out."""
        if self._has_begun and not self._thread.is_alive() and not self._is_closing.is_set():
            return ["the registration thread has ended, the worker's log says why: restart it"]
        with self._lock:
            return self._registrar.problems(self._clock.monotonic())

    def close(self) -> None:
        """Stop renewing and deregister; bounded by the calls' own time-outs. Idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._thread.join()
        reply = self._deregister()
        if reply.failure is not None:
            _log.info("not deregistered: %s", reply.failure.detail)

    def _run(self) -> None:
        try:
            self._renew()
        finally:
            # Whoever waits for the first attempt must not wait for a thread that is gone.
            self._has_tried.set()
            self._on_change()

    def _renew(self) -> None:
        while not self._is_closing.is_set():
            before = self.problems()
            self._call_if_due()
            self._has_tried.set()
            after = self.problems()
            if bool(before) != bool(after):
                _log.info("%s", after[0] if after else "registered at the bootstrap server")
                self._on_change()
            self._is_closing.wait(self._pause_s())

    def _call_if_due(self) -> None:
        with self._lock:
            now_s = self._clock.monotonic()
            if not self._registrar.is_due(now_s):
                return
            self._registrar.handle_started(now_s)
        reply = self._register()
        with self._lock:
            self._registrar.handle_reply(reply, self._clock.monotonic())

    def _pause_s(self) -> float:
        with self._lock:
            due_s = self._registrar.poll_deadline()
        return 0.0 if due_s is None else max(0.0, due_s - self._clock.monotonic())
