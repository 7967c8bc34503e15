"""Value types every layer shares: identity, requests, batches.

Layer 0: nothing here does I/O, reads a clock or knows a vendor. Hot values are
plain ``NamedTuple``s (cheap to make, hashable); configuration-like values are attrs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, NewType, NoReturn, TypeGuard, overload

import attrs

#: Random 128-bit identity of one process start (architecture, section 2): 16 bytes.
Incarnation = NewType("Incarnation", bytes)

#: Rooms and attempts are 63-bit and positive, so that they fit a signed 64-bit field.
MAX_ID: Final = (1 << 63) - 1

#: Addressee not known yet; never a valid incarnation of a process.
UNKNOWN_INCARNATION: Final = Incarnation(b"")

#: Physical block 0 of every pool: never allocated, never freed, never transferred (R93).
NULL_BLOCK: Final = 0


class RoomKey(NamedTuple):
    """Identity of one dispatch of a request; keys every entity and every message."""

    room: int
    attempt: int


class LeaseId(NamedTuple):
    """Fresh for every receiver entity: decode incarnation + counter (rule 1)."""

    incarnation: Incarnation
    counter: int


class Nonce(NamedTuple):
    """Fresh for every sender entity and leg: prefill incarnation + counter."""

    incarnation: Incarnation
    counter: int


class PeerRef(NamedTuple):
    """One rank of one instance in one process life.

    ``instance`` is the leader's advertised ``host:port``; ``address`` is where its
    control channel listens (``tcp://host:port``).
    """

    instance: str
    rank: int
    incarnation: Incarnation
    address: str


class Phase(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


class FinishReason(enum.Enum):
    """Why a request ended. Only STOP and LENGTH are successes (D9)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Failure(NamedTuple):
    """A failure as it travels between processes and reaches the client.

    ``code`` is a stable snake_case word (see :mod:`pdcore.errors`), ``detail`` one
    sentence with the remedy, ``http_status`` what the client sees.
    """

    code: str
    detail: str
    http_status: int


@attrs.frozen
class SamplingParams:
    """Sampling of one request. ``temperature`` 0 is greedy; ``max_tokens`` None means
    "what is left of the context"; ``top_k`` 0 is all tokens; ``seed`` None is a draw that
    nobody can repeat. A draw depends only on (seed, position), so prefill and decode never
    repeat each other's draws (D18).

    Raises :class:`~pdcore.errors.InvalidRequest` naming the field that is out of range."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __attrs_post_init__(self) -> None:
        # One expression that is true for every good request; only then look which.
        # Comparisons are written so that a NaN fails them.
        if not (
            (self.max_tokens is None or self.max_tokens >= 1)
            and self.min_tokens >= 0
            and (self.max_tokens is None or self.min_tokens <= self.max_tokens)
            and 0.0 <= self.temperature < math.inf
            and 0.0 < self.top_p <= 1.0
            and self.top_k >= 0
            and (self.seed is None or 0 <= self.seed <= MAX_ID)
            and (not self.stop_token_ids or min(self.stop_token_ids) >= 0)
            and self.top_logprobs >= 0
        ):
            self._refuse()

    def _refuse(self) -> NoReturn:
        from pdcore.errors import InvalidRequest  # which needs this module first

        longest = math.inf if self.max_tokens is None else self.max_tokens
        if not longest >= 1:
            raise InvalidRequest("max_tokens", f"is {self.max_tokens}, expected at least 1")
        if not 0 <= self.min_tokens <= longest:
            upper = "" if self.max_tokens is None else f", at most max_tokens ({self.max_tokens})"
            raise InvalidRequest("min_tokens", f"is {self.min_tokens}, expected at least 0{upper}")
        if not 0.0 <= self.temperature < math.inf:
            detail = f"is {self.temperature}, expected a number of at least 0"
            raise InvalidRequest("temperature", detail)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest("top_p", f"is {self.top_p}, expected above 0 and at most 1")
        if not self.top_k >= 0:
            raise InvalidRequest("top_k", f"is {self.top_k}, expected at least 0 (0: all tokens)")
        if self.seed is not None and not 0 <= self.seed <= MAX_ID:
            raise InvalidRequest("seed", f"is {self.seed}, expected 0..{MAX_ID}")
        if not self.top_logprobs >= 0:
            raise InvalidRequest("top_logprobs", f"is {self.top_logprobs}, expected at least 0")
        raise InvalidRequest("stop_token_ids", f"holds {min(self.stop_token_ids)}, a negative id")


@attrs.frozen(eq=False)
class GenerateRequest:
    """What a leader hands to a core: token ids, never text.

    ``expires_at_s`` is absolute Unix time (a late arrival is rejected), ``remaining_s``
    the budget for this hop's own monotonic timers (rule 8). ``prefill`` and ``decode``
    are instance ids (``host:port`` of the leaders) chosen by the router; a handshake
    from any other decode instance is rejected. ``bootstrap`` is ``host:port`` of the
    chosen prefill instance's bootstrap server. ``prefill_dp_rank``: of that instance; None:
    nobody named one, and :func:`pdcore.topology.choose_dp_rank` says which it is, at decode
    once the route says how many there are (R60). ``is_local``: decode computes the prompt
    itself (local prefill), and no prefill instance has a part in it.
    """

    key: RoomKey
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    expires_at_s: float
    remaining_s: float
    bootstrap: str = ""
    prefill: str = ""
    decode: str = ""
    prefill_dp_rank: int | None = None
    replaces: int | None = None
    is_local: bool = False


class Batch:
    """One engine step as a struct of parallel lists, one position per sequence.

    ``input_ids`` packs the new tokens of all sequences back to back;
    ``query_lens[i]`` of them belong to sequence i, whose KV already holds
    ``num_computed_tokens[i]`` positions. ``block_tables[i]`` maps a manager key to the
    position-aligned block ids (lists owned by the scheduler: read, do not keep).
    ``sample[i]`` is False for a prefill chunk that is not the last one.
    """

    __slots__ = (
        "batch_id",
        "block_tables",
        "input_ids",
        "num_computed_tokens",
        "phase",
        "query_lens",
        "sample",
        "sampling",
        "seq_ids",
    )

    def __init__(self, batch_id: int, phase: Phase) -> None:
        self.batch_id = batch_id
        self.phase = phase
        self.seq_ids: list[int] = []
        self.input_ids: list[int] = []
        self.query_lens: list[int] = []
        self.num_computed_tokens: list[int] = []
        self.block_tables: list[Mapping[str, Sequence[int]]] = []
        self.sampling: list[SamplingParams] = []
        self.sample: list[bool] = []

    def add(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        block_table: Mapping[str, Sequence[int]],
        sampling: SamplingParams,
        *,
        sample: bool = True,
    ) -> None:
        self.seq_ids.append(seq_id)
        self.input_ids.extend(token_ids)
        self.query_lens.append(len(token_ids))
        self.num_computed_tokens.append(num_computed_tokens)
        self.block_tables.append(block_table)
        self.sampling.append(sampling)
        self.sample.append(sample)

    def __len__(self) -> int:
        return len(self.seq_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(sequence position, start, end) of each sequence's slice of ``input_ids``."""
        start = 0
        for i, n in enumerate(self.query_lens):
            yield i, start, start + n
            start += n

    def __repr__(self) -> str:
        return f"Batch({self.phase.value}, seqs={len(self)}, tokens={self.num_tokens})"


class OneTokenEach(Sequence[Sequence[int]]):
    """Rows of exactly one token id each, without an object per row: what a decode step
    without speculation returns. ``flat`` is handed over with it and not changed again."""

    __slots__ = ("flat",)

    def __init__(self, flat: list[int]) -> None:
        self.flat = flat

    def __len__(self) -> int:
        return len(self.flat)

    @overload
    def __getitem__(self, index: int) -> Sequence[int]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[int]]: ...

    def __getitem__(self, index: int | slice) -> Sequence[int] | Sequence[Sequence[int]]:
        if isinstance(index, slice):
            return OneTokenEach(self.flat[index])
        return (self.flat[index],)

    def __iter__(self) -> Iterator[Sequence[int]]:
        return zip(self.flat, strict=True)

    def __repr__(self) -> str:
        return f"OneTokenEach({self.flat})"


def rows_of(tokens: Sequence[int | None]) -> Sequence[Sequence[int] | None]:
    """Rows for a StepOutput from at most one token per sequence."""
    flat = [token for token in tokens if token is not None]
    if len(flat) == len(tokens):
        return OneTokenEach(flat)
    return [None if token is None else (token,) for token in tokens]


def one_token_each(rows: Sequence[Sequence[int] | None]) -> list[int] | None:
    """The tokens of rows of exactly one each, else None."""
    if isinstance(rows, OneTokenEach):
        return rows.flat
    return _flatten(rows) if _starts_with_a_row(rows) else None


def _starts_with_a_row(rows: Sequence[Sequence[int] | None]) -> TypeGuard[Sequence[Sequence[int]]]:
    """A look at the first row; :func:`_flatten` proves the others or refuses."""
    return not rows or rows[0] is not None


def _flatten(rows: Sequence[Sequence[int]]) -> list[int] | None:
    """Unpacking proves the length while it flattens: one pass for the common case. A row
    of None cannot be unpacked either."""
    try:
        return [token for (token,) in rows]
    except (TypeError, ValueError):
        return None


@attrs.frozen
class StepOutput:
    """Result of one engine step, aligned with the batch's sequences.

    ``token_ids[i]`` is None where nothing was sampled; otherwise the new token ids
    (more than one with speculative decoding). :class:`OneTokenEach` where all have one: a
    thousand lists a step cost more than all else the scheduler does. ``logprobs[i]``
    matches it, or None.
    ``elapsed_s`` is informational with a real clock and authoritative in simulation.
    """

    token_ids: Sequence[Sequence[int] | None]
    logprobs: Sequence[Sequence[float] | None] | None = None
    elapsed_s: float = 0.0


#: Checksums of the KV that travels: what ``integrity`` may be set to.
NO_CHECKSUMS: Final = "none"
CRC32: Final = "crc32"
INTEGRITY: Final = (NO_CHECKSUMS, CRC32)
