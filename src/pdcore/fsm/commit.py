"""What the outcome of a tick means: the reduced vote of one entity, as its tick event.

The state of an entity in a group is *committed* state (architecture, section 9): it moves
only here, by the MIN of the ranks' votes, and so in the same tick on all of them. The numbers
of a vote answer the question of the committed state and never meet those of another state:
  Bootstrapping, WaitingForInput   FAILED ends it, READY moves it on;
  Transferring                     FAILED drains it on all ranks, LOCALLY_DONE completes it;
  Draining                         QUIESCED ends it on all ranks, which then release.
Reducing the lifecycle states themselves instead frees blocks under a writer (protocol
models, Q1): one MIN cannot both spread a failure and hold the release back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdcore.fsm.effects import Effect
from pdcore.fsm.legs import FAILED, LOCALLY_DONE, QUIESCED, READY
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.sender import Sender
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.fsm.targets import Admission


def commit_sender(sender: Sender, outcome: int) -> Sequence[Effect] | None:
    """Apply the group's outcome; None: it moves nothing (or the entity is over)."""
    state = sender.state
    if state is SenderState.DONE or state is SenderState.FAILED:
        return None
    if state is SenderState.DRAINING:
        return sender.quiesced() if outcome == QUIESCED else None
    if outcome == FAILED:
        return sender.failed()
    if state is SenderState.TRANSFERRING:
        return sender.completed() if outcome == LOCALLY_DONE else None
    return sender.advanced() if outcome == READY else None


def commit_receiver(
    receiver: Receiver, outcome: int, admit: Callable[[], Admission | None]
) -> Sequence[Effect] | None:
    """As :func:`commit_sender`. ``admit`` takes blocks and a slot for a room that waits; None
    from it: this rank lost its promise since it voted, and nothing moves."""
    state = receiver.state
    if state is ReceiverState.DONE or state is ReceiverState.FAILED:
        return None
    if state is ReceiverState.DRAINING:
        return receiver.quiesced() if outcome == QUIESCED else None
    if outcome == FAILED:
        return receiver.failed()
    if state is ReceiverState.TRANSFERRING:
        return receiver.completed() if outcome == LOCALLY_DONE else None
    if outcome != READY:
        return None
    if state is ReceiverState.BOOTSTRAPPING:
        return receiver.advanced(None)
    admission = admit()
    return None if admission is None else receiver.advanced(admission)
