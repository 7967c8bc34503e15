"""The engine boundary: scheduler owns block ids, runner owns memory, one call per step.

A runner keeps no request state besides KV memory, makes no stop decision, holds no
tokenizer. Any object with this shape works; ``pdcore.testing.check_model_runner`` is
the contract as a test suite (engine boundary notes; R84-R86).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from pdcore.errors import EngineError
from pdcore.kv.spec import KVCacheSpec, KVPlacement
from pdcore.types import Batch, StepOutput

#: ``allocate(size_bytes)`` -> (region id, writable zeroed buffer of that size).
#: The transport supplies it, so that KV memory is registered from its birth.
Allocate = Callable[[int], tuple[int, memoryview]]


class GroupLost(EngineError):
    """Another rank of the runner's group died, hangs or gave up: in the middle of a step, or
    before the group had met. This runner can never run again: all ranks of the instance must be
    restarted. Nobody's mistake: the next start may succeed."""


@attrs.frozen
class RunnerCaps:
    """Declared, never detected (habit 6)."""

    #: A prefill batch may hold a part of a prompt.
    chunked_prefill: bool = True
    #: Forward passes of all ranks contain collectives, so that idle ranks run dummies.
    collectives: bool = False
    device: str = "cpu"


class ModelRunner(Protocol):
    """One rank of a model. Called from one thread, the worker loop."""

    @property
    def caps(self) -> RunnerCaps: ...

    @property
    def kv_cache_spec(self) -> KVCacheSpec: ...

    @property
    def fingerprint(self) -> str:
        """Identifies weights and tokenizer; instances pair only when equal (D35)."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def initialize_cache(self, num_blocks: int, allocate: Allocate) -> KVPlacement:
        """Take KV memory for ``num_blocks`` blocks (block 0 is the null block)."""
        ...

    def execute_model(self, batch: Batch) -> StepOutput:
        """Run one step. KV writes are complete (readable by a transport) on return (R123).

        Raises EngineError for a batch it cannot run; the batch's requests fail, or only those
        that it blames (``seq_ids``), and the loop goes on. With several ranks every rank is
        called with the same batch, returns the same tokens, and raises where another one
        does; after GroupLost no further step succeeds.
        """
        ...

    def warm_up(self) -> None:
        """Touch what the first request would otherwise pay for. Optional work, cheap. With
        several ranks a step: all of them must call it."""
        ...

    def shutdown(self) -> None:
        """Release everything; idempotent."""
        ...
