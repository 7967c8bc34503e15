"""How decode learns that its KV cache has arrived: STATUS Done, and nothing else."""

from __future__ import annotations

from pdcore.control.codec import decode_frame
from pdcore.control.messages import Status, StatusKind
from pdcore.testing import make_world


def completes(*, with_status: bool, with_notifications: bool) -> bool:
    """Does a request end well where one of the two is lost every time?"""
    world = make_world(manual=True, seed=1)
    if not with_notifications:
        prefill = world.prefill.worker.core.setup.me.incarnation
        world.fabric.faults(prefill).drop_notifications = 1_000
    key = world.submit([5, 6, 7])

    def is_over() -> bool:
        for flight in world.network.pending():
            messages = decode_frame(flight.frame).messages
            is_done = any(
                isinstance(one, Status) and one.kind is StatusKind.DONE for one in messages
            )
            if is_done and not with_status:
                world.network.drop(flight.sequence)
            else:
                world.network.deliver(flight.sequence)
        return world.decode.result(key) is not None

    world.run(is_over)
    result = world.decode.result(key)
    return result is not None and result.failure is None


def test_d27_a_notification_is_only_a_wake_up() -> None:
    """D27: lost notifications cost nothing."""
    assert completes(with_status=True, with_notifications=False)


def test_d27_without_status_done_nothing_is_complete() -> None:
    """D27: the bytes have landed and the notification has come; that is not the completion.
    A decode that took it for one, as one of the two stories had it, would end well here."""
    assert not completes(with_status=False, with_notifications=True)
