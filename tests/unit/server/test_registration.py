"""Registration: keeps trying while health says why (D33), renews, and says goodbye (D32)."""

from __future__ import annotations

import threading

import pytest

from pdcore.control.bootstrap_client import CallReply, Registrar
from pdcore.errors import failure
from pdcore.server.registration import Registration
from pdcore.system_clock import SystemClock

BOUND_S = 20.0
REFUSED = CallReply(failure("unreachable", "nobody listens"))


class Server:
    """Answers each call from a script; ``done`` is set when the script is used up."""

    def __init__(self, *replies: CallReply) -> None:
        self.replies = list(replies)
        self.done = threading.Event()
        self.num_goodbyes = 0

    def register(self) -> CallReply:
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if len(self.replies) == 1 and reply is self.replies[0]:
            self.done.set()
        return reply

    def deregister(self) -> CallReply:
        self.num_goodbyes += 1
        return CallReply()


def registration(server: Server, changed: threading.Event | None = None) -> Registration:
    registrar = Registrar(
        "127.0.0.1:1", renew_interval_s=0.01, retry_initial_s=0.001, retry_max_s=0.002
    )
    on_change = (changed or threading.Event()).set
    return Registration(
        registrar, server.register, server.deregister, SystemClock(), on_change=on_change
    )


def test_a_first_success_is_known_when_start_returns() -> None:
    server = Server(CallReply())
    one = registration(server)
    assert one.problems() == ["not registered at the bootstrap server 127.0.0.1:1 yet"]
    one.start(BOUND_S)
    assert one.problems() == []
    one.close()
    one.close()
    assert server.num_goodbyes == 1


def check_recovers(one: Registration, changed: threading.Event) -> None:
    one.start(BOUND_S)
    assert "nobody listens" in one.problems()[0]
    assert changed.wait(2.0)
    assert one.problems() == []


def test_failures_are_retried_until_they_pass() -> None:
    """D33: the seed logged the tenth failure and stayed "healthy"."""
    changed = threading.Event()
    one = registration(Server(*[REFUSED] * 30, CallReply()), changed)
    check_recovers(one, changed)
    one.close()


def test_d33_mutant_that_gives_up_is_caught() -> None:
    class Mutant(Registration):
        def _run(self) -> None:
            for _ in range(10):
                self._call_if_due()
            self._has_tried.set()

    changed = threading.Event()
    server = Server(*[REFUSED] * 30, CallReply())
    registrar = Registrar("127.0.0.1:1", retry_initial_s=0.001, retry_max_s=0.002)
    one = Mutant(
        registrar, server.register, server.deregister, SystemClock(), on_change=changed.set
    )
    with pytest.raises(AssertionError):
        check_recovers(one, changed)
    one.close()


def test_it_renews() -> None:
    server = Server(*[CallReply()] * 5)
    one = registration(server)
    one.start(BOUND_S)
    assert server.done.wait(BOUND_S)
    one.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_by_an_error_is_a_problem_at_once() -> None:
    """Readiness tells the truth: the lease would count for seconds more."""
    server = Server(CallReply())
    changed = threading.Event()
    one = registration(server, changed)

    def broken() -> CallReply:
        if server.num_goodbyes == 0:
            server.num_goodbyes = 1
            return CallReply()
        raise RuntimeError("a bug")

    one._register = broken
    one.start(BOUND_S)
    one._thread.join(BOUND_S)
    assert changed.is_set()
    assert one.problems() == [
        "the registration thread has ended, the worker's log says why: restart it"
    ]
    one.close()
    assert one.problems() == []
