"""How the ranks of a tensor parallel group stay in step, and all return the same tokens.

Theory. A rank that skips a sum, or makes one more, leaves the others waiting; or worse, its
sums meet those of another step and every number from there on is wrong, silently. So a step
is: one vote (what is the batch, can you run it), the forward pass, one word from rank 0
(what are the tokens). Every rank joins the vote, also the one that refuses its batch, and
all go on or all raise (D16). From the vote on there is no way out but the end: a rank that
fails in between closes the group, and the others raise GroupLost.

Tokens are chosen by rank 0 of the group (D1) and told to the others. All could choose from
their own logits, which are mathematically the same; but a matrix product may differ in its
last bit between two processes (with the alignment of their memory), and one token that
differs between two ranks is a KV cache that is wrong for good. Telling costs one small sum,
and the output matrix is needed on one rank only (decision 20).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import attrs
import numpy as np
import torch

from pdcore.engine.base import GroupLost
from pdcore.engine.collective import Collective
from pdcore.engine.shard import WHOLE, TPRank
from pdcore.errors import EngineError
from pdcore.types import Batch

T = TypeVar("T")

#: Votes that are no hash of a batch.
_REFUSED: Final = 1
_WARM_UP: Final = 2

#: Of the reason for a failure, as it is told to the other ranks.
_REASON_BYTES: Final = 512


@attrs.frozen
class Choice:
    """One token and one logprob for each sequence that samples, in batch order; 0.0 where
    no logprob was asked for."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()


def vote_of(batch: Batch) -> int:
    """63-bit hash of what makes ranks compute the same sums: phase, tokens, positions and
    which sequences sample. Block ids and sequence ids are each rank's own affair."""
    digest = hashlib.blake2b(batch.phase.value.encode(), digest_size=8)
    for values in (
        [len(batch), *batch.query_lens],
        batch.num_computed_tokens,
        batch.sample,
        batch.input_ids,
    ):
        digest.update(np.asarray(values, np.int64).tobytes())
    return (int.from_bytes(digest.digest()) >> 1) | 4


class StepGroup:
    """One rank's part in the steps of its group; without a collective a group of one, to
    which nothing here applies."""

    def __init__(self, collective: Collective | None = None) -> None:
        self._collective = collective
        self.rank: TPRank = WHOLE if collective is None else collective.rank

    @property
    def all_reduce(self) -> Callable[[torch.Tensor], None] | None:
        """The sum over the ranks; None in a group of one."""
        return None if self._collective is None else self._collective.all_reduce

    def agree(self, batch: Batch, prepare: Callable[[], T]) -> T:
        """``prepare()`` on every rank, then one vote: all ranks can run this batch.

        Raises EngineError, and the same step raises on every rank: what this rank's own
        ``prepare`` raised, else who refused and why, else that batches differ. The next step
        may succeed.
        """
        if self._collective is None:
            return prepare()
        refused: EngineError | None = None
        prepared: T | None = None
        with self.unbroken():
            try:
                prepared = prepare()
            except EngineError as error:
                refused = error
        self._vote(_REFUSED if refused else vote_of(batch), refused)
        assert prepared is not None
        return prepared

    def agree_to_warm_up(self) -> None:
        """All ranks are about to warm up. Raises EngineError where another one runs a step."""
        if self._collective is not None:
            self._vote(_WARM_UP)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Whatever is raised inside ends the group: the others must not wait for sums that
        will never come."""
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished:
                self.close()

    def share(self, num_tokens: int, choose: Callable[[], Choice]) -> Choice:
        """What rank 0's ``choose()`` says, on every rank; it is called on rank 0 only.

        Raises EngineError on every rank where it raises that on rank 0; the group goes on.
        """
        if self._collective is None:
            return choose()
        failed: EngineError | None = None
        # Token ids are far below 2^53: float64 holds them, and logprobs, exactly.
        words = torch.zeros(1 + 2 * num_tokens, dtype=torch.float64)
        with self.unbroken():
            if self.rank.tp_rank == 0:
                try:
                    choice = choose()
                except EngineError as error:
                    failed = error
                    words[0] = 1.0
                else:
                    said = [0.0, *choice.tokens, *choice.logprobs]
                    words.copy_(torch.tensor(said, dtype=torch.float64))
            self._collective.all_reduce(words)
            heard: list[float] = words.tolist()
            reasons = self._hear(failed) if heard[0] else ""
        if reasons:
            raise failed or EngineError(reasons)
        tokens = [int(token) for token in heard[1 : 1 + num_tokens]]
        return Choice(tokens, heard[1 + num_tokens :])

    def close(self) -> None:
        """Leave the group; the others' next step raises GroupLost. Idempotent."""
        if self._collective is not None:
            self._collective.close()

    def _vote(self, vote: int, refused: EngineError | None = None) -> None:
        """Returns when all ranks vote the same, and that is no refusal; raises on all else."""
        with self.unbroken():
            votes = self._gather(vote)
            reasons = self._hear(refused) if _REFUSED in votes else ""
        if reasons:
            raise refused or EngineError(reasons)
        differ = [rank for rank, other in enumerate(votes) if other != votes[0]]
        if differ:
            raise EngineError(
                f"the ranks of the group were called with different batches: tp_rank {differ[0]} "
                "with another one than tp_rank 0"
            )

    def _gather(self, word: int) -> list[int]:
        """One positive 63-bit word of each rank, by rank: a sum of vectors with one entry."""
        assert self._collective is not None
        words = torch.zeros(self.rank.tp_size, dtype=torch.int64)
        words[self.rank.tp_rank] = word
        self._collective.all_reduce(words)
        votes: list[int] = words.tolist()
        if not all(vote > 0 for vote in votes):
            raise GroupLost(f"the ranks are out of step: votes {votes}")
        return votes

    def _hear(self, own: EngineError | None) -> str:
        """Why the ranks that failed did: a row of text each, added up. What the client is told
        does not depend on which rank speaks for the group."""
        assert self._collective is not None
        said = torch.zeros(self.rank.tp_size, _REASON_BYTES, dtype=torch.uint8)
        if own is not None:
            text = (str(own) or "no reason given").encode()[:_REASON_BYTES]
            said[self.rank.tp_rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        self._collective.all_reduce(said)
        rows: list[list[int]] = said.tolist()
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
        return "; ".join(f"tp_rank {rank}: {text}" for rank, text in enumerate(texts) if text)
