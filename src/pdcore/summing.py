"""Checksums off the loop: at prefill before a transfer is posted, at decode after it arrived.

A gigabyte takes a core a third of a second, in which the loop would answer no peer. Prefill
sums first and writes then: whatever goes wrong with the bytes from that moment on, also at the
source, is noticed. What waits is as good as posted for the lifecycle: its handle is live, its
blocks stay, until it ends like any other (rule 9).
"""

from __future__ import annotations

from pdcore.background import BackgroundCalls
from pdcore.fsm.effects import PostTransfer, VerifyBlocks
from pdcore.fsm.events import BlocksSummed, BlocksVerified
from pdcore.kv.checksums import ByteArray, LegPart, first_difference

#: (one past the last token, checksums) of a transfer.
Summed = tuple[int, bytes]


class Summing:
    """Owned by the loop's thread; ``memory``: of the KV cache, by region. What threads read may
    be free again by then: their answer is dropped, because nobody waits for it."""

    def __init__(self, memory: dict[int, ByteArray], background: BackgroundCalls) -> None:
        self.memory = memory
        self._background = background
        #: By core handle: transfers that wait for their checksums.
        self._waiting: dict[int, PostTransfer] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, effect: PostTransfer, part: LegPart) -> None:
        """Answered by ``BlocksSummed``, from the background."""
        memory = self.memory
        self._waiting[effect.handle] = effect

        def summed() -> BlocksSummed:
            return BlocksSummed(effect.handle, part.sums(memory))

        def failed(error: BaseException) -> BlocksSummed:
            problem = f"taking checksums raised {type(error).__name__}: {error}"
            return BlocksSummed(effect.handle, b"", problem)

        self._background.compute(summed, failed)

    def taken(self, event: BlocksSummed) -> PostTransfer | None:
        """What can be posted now; None when it was cancelled meanwhile."""
        return self._waiting.pop(event.handle, None)

    def cancel(self, handle: int) -> bool:
        """True: it waited, and will not be posted."""
        return self._waiting.pop(handle, None) is not None

    def verify(self, effect: VerifyBlocks) -> None:
        """Answered by ``BlocksVerified``, from the background."""
        memory, part = self.memory, effect.part

        def found(problem: str) -> BlocksVerified:
            return BlocksVerified(effect.key, effect.lease, effect.rank, problem)

        def verify() -> BlocksVerified:
            ours = part.sums(memory)
            if ours == effect.sums:
                return found("")
            return found(first_difference(tuple(part.plans()), ours, effect.sums))

        def failed(error: BaseException) -> BlocksVerified:
            return found(f"comparing raised {type(error).__name__}: {error}")

        self._background.compute(verify, failed)
