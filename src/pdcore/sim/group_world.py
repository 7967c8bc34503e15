"""Two prefill ranks to two decode ranks, one request: a group moves only by its ticks.

Every rank's entity is the production sender or receiver; what a tick does is the production
vote (``entity.vote()``), MIN over the group (:mod:`pdcore.scheduler.consensus`), and the
production commit rule (:mod:`pdcore.fsm.commit`). Local events (aborts, deadlines, messages,
transfers) hit single ranks and only set facts; a release is a tick's outcome, so the pools of
a group stay equal. The prefill rank of a pair writes to the decode rank of the same pair.

``split`` names groups ("D", "P") whose tick is not atomic: a rank casts its vote, the result
reaches each rank later, and local events happen in between, as with a real collective.

Reduction: the two pairs are interchangeable, so a state and the one with the pairs swapped
are one state; "rank 0" in a trace means the first pair of the state before that move.

For liveness a message that was sent is counted on to arrive in the end; that it is also sent
again until then is what the pair worlds check, with the same entities.

Taken as given: a process of a group that dies takes the group with it (a tick needs all
ranks); the pair worlds cover deaths. Nothing is forgotten here; they cover that, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pdcore.fsm.effects import Effect
from pdcore.fsm.legs import FAILED, LOCALLY_DONE, QUIESCED, CancelFrom
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.sender import Sender
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.fsm.targets import StatusFrom
from pdcore.sim.explore import Move
from pdcore.sim.group_pair import STARTED, WRITTEN, Pair, PairMove, PairRules, is_writing
from pdcore.sim.interned import Stepped

_OVER_D: Final = (ReceiverState.DONE, ReceiverState.FAILED)
_OVER_P: Final = (SenderState.DONE, SenderState.FAILED)
_BOUND: Final = (SenderState.WAITING_FOR_INPUT, SenderState.TRANSFERRING)
#: In ``Pair.decode_vote`` and ``Pair.prefill_vote``.
_RESULT: Final = 10


class GroupState(NamedTuple):
    """Ordered: the smaller pair first."""

    first: Pair
    second: Pair


def _ordered(rules: PairRules, a: Pair, b: Pair) -> GroupState:
    return GroupState(a, b) if rules.place(a) <= rules.place(b) else GroupState(b, a)


class GroupWorld:
    """See the module. States, moves and labels as :class:`pdcore.sim.explore.World` asks."""

    def __init__(
        self,
        *,
        split: str = "",
        sender: type[Sender] = Sender,
        receiver: type[Receiver] = Receiver,
        num_chunks: int = 1,
    ) -> None:
        self.rules = PairRules(sender, receiver, num_chunks=num_chunks)
        self.split = split
        self._local: dict[tuple[Pair, int], tuple[tuple[PairMove, str], ...]] = {}
        self._ticks: dict[tuple[Pair, Pair], tuple[Move[GroupState], ...]] = {}
        self._problems: dict[Pair, tuple[str, ...]] = {}

    def initial(self) -> GroupState:
        return GroupState(self.rules.start, self.rules.start)

    def moves(self, state: GroupState) -> Iterable[Move[GroupState]]:
        out = [
            Move(label, move.is_fault, _ordered(self.rules, move.pair, other), move.rows)
            for rank, (pair, other) in enumerate((state, (state.second, state.first)))
            for move, label in self._local_moves(pair, rank)
        ]
        out.extend(self._group_moves(state))
        return out

    def problems(self, state: GroupState) -> Iterable[str]:
        first, second = state
        if not self.split:
            # Blocks change hands by a tick, in which all ranks do the same.
            d = [self.rules.receivers.entity(pair.decode).state for pair in state]
            if d[0] is not d[1]:
                yield f"the decode ranks' pools differ: one is {d[0].value}, one {d[1].value}"
        yield from self._pair_problems(first)
        yield from self._pair_problems(second)
        ends = {self.rules.receivers.entity(pair.decode).state for pair in state}
        if ReceiverState.DONE in ends and ends & {ReceiverState.FAILED, ReceiverState.DRAINING}:
            yield "two results: one decode rank runs the request, the other failed it"

    def is_goal(self, state: GroupState) -> bool:
        """Both halves have ended on all ranks, nothing writes or computes, no tick is half
        done: every block is free or with the running request."""
        rules = self.rules
        return all(
            rules.receivers.entity(pair.decode).state in _OVER_D
            and rules.senders.entity(pair.prefill).state in _OVER_P
            and rules.senders.entity(pair.prefill).is_quiet
            for pair in state
        )

    def show(self, state: GroupState) -> str:
        return " || ".join(f"{rank}: {self.rules.show(pair)}" for rank, pair in enumerate(state))

    # --- inside -------------------------------------------------------------------------

    def _local_moves(self, pair: Pair, rank: int) -> tuple[tuple[PairMove, str], ...]:
        known = self._local.get((pair, rank))
        if known is None:
            moves = (*self.rules.moves(pair), *self._own_moves(pair))
            known = tuple((move, move.label.format(rank=rank)) for move in moves)
            self._local[pair, rank] = known
        return known

    def _own_moves(self, pair: Pair) -> Iterable[PairMove]:
        """Ticks that a rank takes by itself: none, in a group that keeps the rules."""
        return ()

    def _group_moves(self, state: GroupState) -> tuple[Move[GroupState], ...]:
        known = self._ticks.get(state)
        if known is None:
            decode = self._split_decode(state) if "D" in self.split else self._tick_decode(state)
            prefill = self._split_prefill(state) if "P" in self.split else self._tick_prefill(state)
            every = (*self._start(state), *decode, *prefill)
            known = tuple(move for move in every if move.state != state)
            if not self.split:
                self._ticks[state] = known
        return known

    def _start(self, state: GroupState) -> Iterator[Move[GroupState]]:
        """One forward pass of the whole group at a time; it ends on each rank by itself."""
        senders = [self.rules.senders.entity(pair.prefill) for pair in state]
        if any(sender.state not in _BOUND or sender.is_computing for sender in senders):
            return
        for chunk, bit in enumerate(STARTED[: self.rules.num_chunks]):
            if not state.first.net & bit:
                began = [
                    self.rules.prefill(p._replace(net=p.net | bit), "compute_started", None, "")
                    for p in state
                ]
                after = _ordered(self.rules, began[0].pair, began[1].pair)
                rows = began[0].rows + began[1].rows
                yield Move(f"both prefill ranks compute chunk {chunk}", False, after, rows)
                return

    def _tick_decode(self, state: GroupState) -> Iterator[Move[GroupState]]:
        entities = [self.rules.receivers.entity(pair.decode) for pair in state]
        if all(receiver.state not in _OVER_D for receiver in entities):
            outcome = min(receiver.vote() for receiver in entities)
            done = [self.rules.commit_decode(pair, outcome) for pair in state]
            after = _ordered(self.rules, done[0].pair, done[1].pair)
            yield Move(f"tick D: MIN {outcome}", False, after, done[0].rows + done[1].rows)

    def _tick_prefill(self, state: GroupState) -> Iterator[Move[GroupState]]:
        entities = [self.rules.senders.entity(pair.prefill) for pair in state]
        if all(sender.state not in _OVER_P for sender in entities):
            outcome = min(sender.vote() for sender in entities)
            done = [self.rules.commit_prefill(pair, outcome) for pair in state]
            after = _ordered(self.rules, done[0].pair, done[1].pair)
            yield Move(f"tick P: MIN {outcome}", False, after, done[0].rows + done[1].rows)

    def _split_decode(self, state: GroupState) -> Iterator[Move[GroupState]]:
        for rank, (pair, other) in enumerate((state, (state.second, state.first))):
            receiver = self.rules.receivers.entity(pair.decode)
            mine, theirs = pair.decode_vote, other.decode_vote
            if mine >= _RESULT:
                done = self.rules.commit_decode(pair, mine - _RESULT)
                after = _ordered(self.rules, done.pair._replace(decode_vote=0), other)
                yield Move(f"D{rank} applies {mine - _RESULT}", False, after, done.rows)
            elif mine == 0 and receiver.state not in _OVER_D:
                vote = receiver.vote()
                if 0 < theirs < _RESULT:
                    result = _RESULT + min(vote, theirs - 1)
                    after = _ordered(
                        self.rules,
                        pair._replace(decode_vote=result),
                        other._replace(decode_vote=result),
                    )
                else:
                    after = _ordered(self.rules, pair._replace(decode_vote=1 + vote), other)
                yield Move(f"D{rank} votes {vote}", False, after)

    def _split_prefill(self, state: GroupState) -> Iterator[Move[GroupState]]:
        for rank, (pair, other) in enumerate((state, (state.second, state.first))):
            sender = self.rules.senders.entity(pair.prefill)
            mine, theirs = pair.prefill_vote, other.prefill_vote
            if mine >= _RESULT:
                done = self.rules.commit_prefill(pair, mine - _RESULT)
                after = _ordered(self.rules, done.pair._replace(prefill_vote=0), other)
                yield Move(f"P{rank} applies {mine - _RESULT}", False, after, done.rows)
            elif mine == 0 and sender.state not in _OVER_P:
                vote = sender.vote()
                if 0 < theirs < _RESULT:
                    result = _RESULT + min(vote, theirs - 1)
                    after = _ordered(
                        self.rules,
                        pair._replace(prefill_vote=result),
                        other._replace(prefill_vote=result),
                    )
                else:
                    after = _ordered(self.rules, pair._replace(prefill_vote=1 + vote), other)
                yield Move(f"P{rank} votes {vote}", False, after)

    def _pair_problems(self, pair: Pair) -> tuple[str, ...]:
        known = self._problems.get(pair)
        if known is None:
            known = tuple(_find_problems(self.rules, pair))
            self._problems[pair] = known
        return known


def _find_problems(rules: PairRules, pair: Pair) -> Iterator[str]:
    receiver = rules.receivers.entity(pair.decode)
    sender = rules.senders.entity(pair.prefill)
    if is_writing(sender):
        if receiver.state is ReceiverState.FAILED:
            yield "a prefill rank can still write into blocks that decode has freed"
        if receiver.state is ReceiverState.DONE:
            yield "a prefill rank can still write into blocks that a running request reads"
    if sender.state in _OVER_P and not sender.is_quiet:
        yield "source blocks are free while a write or a forward pass uses them"
    if receiver.state is ReceiverState.DONE and not pair.net & WRITTEN:
        yield "decode runs a request whose KV never came"


# --- known-bad variants ------------------------------------------------------------------

_ORDER: Final = (
    ReceiverState.FAILED,
    ReceiverState.DRAINING,
    ReceiverState.BOOTSTRAPPING,
    ReceiverState.WAITING_FOR_INPUT,
    ReceiverState.TRANSFERRING,
    ReceiverState.DONE,
)


class MinOverStates(GroupWorld):
    """``min-over-states``: each decode rank lives its own lifecycle, and the tick takes the
    MIN of the states themselves, Failed lowest: then all ranks fail, and free, at once."""

    def problems(self, state: GroupState) -> Iterable[str]:
        """Ranks differ here between ticks by design; what counts is what that breaks."""
        yield from self._pair_problems(state.first)
        yield from self._pair_problems(state.second)

    def _own_moves(self, pair: Pair) -> Iterable[PairMove]:
        receiver = self.rules.receivers.entity(pair.decode)
        vote = receiver.vote()
        if receiver.state is ReceiverState.DRAINING:
            moves = vote == QUIESCED
        else:
            moves = vote == FAILED or (
                receiver.state is ReceiverState.TRANSFERRING and vote == LOCALLY_DONE
            )
        if receiver.state in _OVER_D or not moves:
            return ()
        return (self.rules.commit_decode(pair, vote)._replace(label="D{rank} moves by itself"),)

    def _tick_decode(self, state: GroupState) -> Iterator[Move[GroupState]]:
        states = [self.rules.receivers.entity(pair.decode).state for pair in state]
        if min(states, key=_ORDER.index) is not ReceiverState.FAILED:
            if states[0] is states[1]:
                yield from super()._tick_decode(state)
            return
        done = [self.rules.change_decode(pair, "free", _fail_and_free) for pair in state]
        yield Move(
            "tick D: MIN is Failed, all free",
            False,
            _ordered(self.rules, done[0].pair, done[1].pair),
        )


def _fail_and_free(receiver: Receiver) -> Stepped:
    effects = (*(receiver.failed() or ()), *(receiver.quiesced() or ()))
    return Stepped(0, effects, "")


class FailedIsAck(Receiver):
    """``failed-is-ack``: an early Failed of a writer counts as the end of its claim."""

    __slots__ = ()

    def acknowledge(self, payload: StatusFrom) -> tuple[()]:
        target = self.targets.get(payload.peer.rank)
        if target is not None:
            target.over = True
        return ()


class NoPoison(Sender):
    """``no-poison``: a rank that failed locally goes on posting until its group commits."""

    __slots__ = ()

    def post_ready(self, payload: object) -> Sequence[Effect]:
        failed, self.failure = self.failure, None
        posted = super().post_ready(payload)
        self.failure = failed
        return posted


class DeafReceiver(Receiver):
    """``deaf``, decode's half: a Done that comes while draining is not heard."""

    __slots__ = ()

    def is_done_of_grant(self, payload: StatusFrom) -> bool:
        return self.state is ReceiverState.TRANSFERRING and super().is_done_of_grant(payload)


class DeafSender(Sender):
    """``deaf``, prefill's half: who is Done answers no cancel any more."""

    __slots__ = ()

    def record_cancel(self, payload: CancelFrom) -> Sequence[Effect]:
        return () if self.state is SenderState.DONE else super().record_cancel(payload)


class NoReleaseVote(Receiver):
    """``no-release-vote``: Draining is left without asking whether every rank is quiet."""

    __slots__ = ()

    def vote(self) -> int:
        return QUIESCED if self.state is ReceiverState.DRAINING else super().vote()


#: name -> (sender, receiver) that make a group break its promise.
GROUP_MUTANTS: Final[dict[str, tuple[type[Sender], type[Receiver]]]] = {
    "min-over-states": (Sender, Receiver),
    "failed-is-ack": (Sender, FailedIsAck),
    "no-poison": (NoPoison, Receiver),
    "deaf": (DeafSender, DeafReceiver),
    "no-release-vote": (Sender, NoReleaseVote),
}


def group_world(mutant: str = "", *, split: str = "", num_chunks: int = 1) -> GroupWorld:
    """The world of this module with a known-bad variant of :data:`GROUP_MUTANTS` in it; ""
    or a name that is not one of these: the product as it is."""
    sender, receiver = GROUP_MUTANTS.get(mutant, (Sender, Receiver))
    kind = MinOverStates if mutant == "min-over-states" else GroupWorld
    return kind(split=split, sender=sender, receiver=receiver, num_chunks=num_chunks)
