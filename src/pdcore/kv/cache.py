"""KVBlocks: all block tables of one rank, by sequence and manager key (R97, R98).

The scheduler asks here for room, the engine reads the tables, transfers pin them. Every
call is all-or-nothing over the manager keys. Sequence ids are unique per entity, never
reused while blocks of that id exist, quarantined ones included.

Admission of several requests in one tick is voted before anything is allocated: take a
:class:`Budget`, ask it for each candidate, and allocate after the consensus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdcore.errors import ConfigError, OwnershipError
from pdcore.kv.blocks import HELD, LEASED, BlockPool, Ledger
from pdcore.kv.spec import KVCacheSpec
from pdcore.kv.tables import FullAttentionBlocks, kv_groups, make_tables
from pdcore.types import NULL_BLOCK


class Budget:
    """A tentative account of free blocks, so that a tick can vote before it allocates.

    R95: ``need`` is granted iff, for every manager key of which it wants any block,
    ``need <= free - ceil(reserved / block_size) * requests that hold blocks``. Each
    grant counts as one more holder, as if it had been allocated.
    """

    __slots__ = ("free", "holders", "reserve")

    def __init__(self, free: Mapping[str, int], reserve: Mapping[str, int], holders: int) -> None:
        self.free = dict(free)
        self.reserve = dict(reserve)
        self.holders = holders

    def available(self, key: str) -> int:
        """Blocks of this key that a newcomer may take now; negative when over-committed."""
        return self.free[key] - self.reserve[key] * self.holders

    def fits(self, need: Mapping[str, int]) -> bool:
        return all(count == 0 or count <= self.available(key) for key, count in need.items())

    def try_take(self, need: Mapping[str, int]) -> bool:
        """Grant ``need`` (manager key -> blocks) entirely, or leave the account alone."""
        if not self.fits(need):
            return False
        for key, count in need.items():
            self.free[key] -= count
        self.holders += 1
        return True

    def earmark(self, need: Mapping[str, int]) -> None:
        """Keep ``need`` for somebody who does not fit yet; free may become negative."""
        for key, count in need.items():
            self.free[key] -= count


def _end(computed: int, new: int, lookahead: int, max_model_len: int) -> int:
    """First position past the slots a step asks for, clamped to the model's length."""
    if computed < 0 or new < 0 or lookahead < 0:
        raise OwnershipError(
            f"token counts must be >= 0: computed {computed}, new {new}, lookahead {lookahead}"
        )
    return min(computed + new + lookahead, max_model_len)


def _has_room(need: int, free: int, reserved: int) -> bool:
    """R95; who needs no block of a key takes nothing from anybody's head-room."""
    return need == 0 or need <= free - reserved


class KVTables:
    """Block tables and pools of one rank, as far as they can be read: nothing here
    changes ownership.

    ``num_blocks`` is one number for every manager key, or a mapping by key; the null
    block is counted in it.
    """

    def __init__(
        self, spec: KVCacheSpec, num_blocks: int | Mapping[str, int], max_model_len: int
    ) -> None:
        groups = kv_groups(spec)
        if not groups or max_model_len < 1:
            raise ConfigError(
                f"a KV cache needs at least one entry and max_model_len >= 1, got "
                f"{len(groups)} manager keys and {max_model_len}"
            )
        self.max_model_len = max_model_len
        self._by_key: dict[str, FullAttentionBlocks] = {}
        for group in groups:
            count = num_blocks if isinstance(num_blocks, int) else num_blocks[group.key]
            self._by_key[group.key] = make_tables(group, BlockPool(count))
        self._tables: dict[int, dict[str, list[int]]] = {}
        self._leased: set[int] = set()
        self._quarantined: set[int] = set()
        only = next(iter(self._by_key.values()))
        uniform = len(groups) == 1 and type(only) is FullAttentionBlocks
        self._uniform = only if uniform else None

    def need(self, seq_id: int, computed: int, new: int, lookahead: int = 0) -> dict[str, int]:
        """Blocks per manager key that ``allocate_slots`` would take. No side effect."""
        total = _end(computed, new, lookahead, self.max_model_len)
        return {key: t.need(seq_id, computed, total) for key, t in self._by_key.items()}

    def budget(self, reserved: int = 0) -> Budget:
        """What is free now, with ``reserved`` tokens of head-room owed to each holder."""
        return Budget(
            {key: t.pool.num_free for key, t in self._by_key.items()},
            {key: t.reserve(reserved) for key, t in self._by_key.items()},
            self.num_holders,
        )

    def can_allocate(
        self, seq_id: int, computed: int, new: int, lookahead: int = 0, reserved: int = 0
    ) -> bool:
        """Would ``allocate_slots`` with the same arguments succeed? No side effect."""
        total = _end(computed, new, lookahead, self.max_model_len)
        holders = self.num_holders if reserved else 0
        pinned = seq_id in self._leased
        return all(
            _has_room(
                t.need(seq_id, computed, total),
                t.pool.num_free + (0 if pinned else t.recyclable(seq_id, computed)),
                t.reserve(reserved) * holders,
            )
            for t in self._by_key.values()
        )

    def can_ever_fit(self, computed: int, new: int, lookahead: int = 0) -> bool:
        """Could a fresh sequence get these slots if the pools were empty? If not, waiting
        is pointless: reject it."""
        total = _end(computed, new, lookahead, self.max_model_len)
        return all(t.need(-1, computed, total) <= t.pool.num_usable for t in self._by_key.values())

    def next_change(self, seq_id: int, computed: int, new: int, lookahead: int = 0) -> int:
        """Smallest count >= ``computed`` at which ``allocate_slots(seq_id, count, new,
        lookahead)`` would change a table: until then a decode step costs nothing here."""
        ahead = new + lookahead
        return min(
            t.next_change(seq_id, computed, ahead, self.max_model_len)
            for t in self._by_key.values()
        )

    @property
    def uniform_block_size(self) -> int | None:
        """Tokens per block when there is one full-attention key, else None."""
        return None if self._uniform is None else self._uniform.block_size

    def get_block_ids(self, seq_id: int) -> dict[str, list[int]]:
        """manager key -> position-aligned block ids, nulls included (R98).

        The same dict and lists for the life of the sequence, changed in place: read
        them, do not keep or change them. Empty dict when the sequence holds nothing.
        """
        return self._tables.get(seq_id, {})

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tables

    @property
    def num_holders(self) -> int:
        """Sequences that hold blocks and may grow; quarantined ones cannot."""
        return len(self._tables) - len(self._quarantined)

    @property
    def num_free(self) -> dict[str, int]:
        return {key: t.pool.num_free for key, t in self._by_key.items()}

    def ledger(self) -> dict[str, Ledger]:
        return {key: t.pool.ledger() for key, t in self._by_key.items()}

    def audit(self) -> dict[str, Ledger]:
        """Recount pools against tables; raises OwnershipError on any difference."""
        ledgers = {}
        for key, tables in self._by_key.items():
            ledgers[key] = tables.pool.audit()
            ids = [b for t in tables.tables.values() for b in t if b != NULL_BLOCK]
            owned = ledgers[key].total - ledgers[key].free
            if len(ids) != len(set(ids)) or len(ids) != owned:
                raise OwnershipError(
                    f"{key}: tables hold {len(ids)} blocks ({len(set(ids))} distinct), "
                    f"the pool counts {owned}"
                )
        return ledgers

    def format_usage(self) -> str:
        """``key:used/total,...`` where used includes the null block (R98)."""
        return ",".join(
            f"{key}:{t.pool.num_blocks - t.pool.num_free}/{t.pool.num_blocks}"
            for key, t in self._by_key.items()
        )

    def __repr__(self) -> str:
        return (
            f"KVBlocks({self.format_usage()}, seqs={len(self._tables)}, "
            f"leased={len(self._leased)}, quarantined={len(self._quarantined)})"
        )


class KVBlocks(KVTables):
    """The tables with the operations that change who owns which block."""

    @property
    def num_quarantined(self) -> int:
        """Sequences that are over and whose blocks are out."""
        return len(self._quarantined)

    def allocate_slots(
        self, seq_id: int, computed: int, new: int, lookahead: int = 0, reserved: int = 0
    ) -> bool:
        """Give positions ``computed .. computed + new + lookahead - 1`` slots (R97).

        ``computed`` counts cached tokens, so it is the next query position; the end is
        clamped to max_model_len. Blocks behind a sliding window go back first (also when
        the answer is False), except while the sequence is leased: a transfer may still
        read them. False: some key lacks blocks and nothing was allocated. ``reserved``
        is R95's head-room in tokens per holder, for newcomers. Raises OwnershipError for
        negative counts or a quarantined sequence.
        """
        if seq_id in self._quarantined:
            raise OwnershipError(f"sequence {seq_id} is quarantined and cannot grow")
        total = _end(computed, new, lookahead, self.max_model_len)
        holders = self.num_holders if reserved else 0
        pinned = seq_id in self._leased
        fits = True
        for tables in self._by_key.values():
            if not pinned:
                tables.recycle(seq_id, computed)
            fits = fits and _has_room(
                tables.need(seq_id, computed, total),
                tables.pool.num_free,
                tables.reserve(reserved) * holders,
            )
        if not fits:
            return False
        for tables in self._by_key.values():
            tables.grow(seq_id, computed, total)
        if seq_id not in self._tables:
            self._tables[seq_id] = {k: t.tables[seq_id] for k, t in self._by_key.items()}
        return True

    def grow_each(self, tables: Sequence[list[int]]) -> bool:
        """One more block for each of these tables, or False and none for any.

        Only with a ``uniform_block_size``: the decode batch's fast path, where a table
        is full exactly every block_size steps.
        """
        if self._uniform is None:
            raise OwnershipError("grow_each needs exactly one full-attention manager key")
        if self._uniform.pool.num_free < len(tables):
            return False
        blocks = self._uniform.pool.allocate(len(tables), is_scattered=True)
        for table, block in zip(tables, blocks, strict=True):
            table.append(block)
        return True

    def free(self, seq_id: int) -> int:
        """Give all blocks back; 0 when the sequence holds none (idempotent, R94).

        Raises OwnershipError when it is leased or quarantined: ``release`` it instead.
        """
        if seq_id in self._leased or seq_id in self._quarantined:
            raise OwnershipError(f"sequence {seq_id} is leased or quarantined: release it")
        return self._forget(seq_id)

    def lease(self, seq_id: int) -> None:
        """From now on a peer or a transfer may touch these blocks. Idempotent; call it
        again after the sequence has grown. Raises OwnershipError without blocks."""
        if seq_id not in self._tables or seq_id in self._quarantined:
            raise OwnershipError(f"sequence {seq_id} has no blocks to lease")
        for key, tables in self._by_key.items():
            pool = tables.pool
            pool.lease(pool.those_in(HELD, self._tables[seq_id][key]))
        self._leased.add(seq_id)

    def unlease(self, seq_id: int) -> None:
        """The lease ended well (every writer Done); the request goes on with its blocks."""
        if seq_id not in self._leased:
            raise OwnershipError(f"sequence {seq_id} is not leased")
        self._leased.discard(seq_id)
        for key, tables in self._by_key.items():
            pool = tables.pool
            pool.unlease(pool.those_in(LEASED, self._tables[seq_id][key]))

    def quarantine(self, seq_id: int) -> int:
        """The request is over, a writer may be alive: blocks stay out, counted.

        Idempotent; returns how many are out.
        """
        if seq_id in self._quarantined or seq_id not in self._tables:
            return 0
        self._leased.discard(seq_id)
        self._quarantined.add(seq_id)
        tables = self._tables[seq_id]
        return sum(t.pool.quarantine(tables[key]) for key, t in self._by_key.items())

    def release(self, seq_id: int) -> int:
        """Give all blocks back on proof that nothing can touch them, whatever their
        state. Idempotent; returns how many came back."""
        if seq_id in self._leased:
            self.unlease(seq_id)
        if seq_id not in self._quarantined:
            return self._forget(seq_id)
        self._quarantined.discard(seq_id)
        self._tables.pop(seq_id)
        return sum(t.pool.release(t.forget(seq_id)) for t in self._by_key.values())

    def _forget(self, seq_id: int) -> int:
        if self._tables.pop(seq_id, None) is None:
            return 0
        return sum(t.pool.free(t.forget(seq_id)) for t in self._by_key.values())
