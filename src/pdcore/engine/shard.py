"""Which part of a Llama one rank of a tensor parallel group holds (Megatron's split).

Theory. Every head is computed by one rank: its rows of q, k and v, the attention itself,
and the columns of o that its output meets. Every unit of the MLP likewise: its row of gate
and of up, its column of down. What is left of a layer is two sums over the ranks, after o
and after down. With fewer KV heads than ranks, neighbouring ranks hold copies of one KV
head (R80 counts on this order). Numpy-free and torch-free: shapes and row numbers only.

The output matrix is whole on rank 0 and absent elsewhere: rank 0 alone chooses tokens
(:mod:`pdcore.engine.step_group`).
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import attrs

from pdcore.engine.weights import FusedTensor, LlamaConfig
from pdcore.errors import EngineError

#: Name of a fused tensor within its layer -> the axis that is cut, as torch stores (out, in).
_CUT: Final = {"qkv": 0, "gate_up": 0, "o": 1, "down": 1}


@attrs.frozen
class TPRank:
    """One rank of a tensor parallel group. Raises EngineError for an impossible one."""

    tp_size: int = 1
    tp_rank: int = 0

    def __attrs_post_init__(self) -> None:
        if self.tp_size < 1:
            raise EngineError(f"tp_size is {self.tp_size}, expected at least 1")
        if not 0 <= self.tp_rank < self.tp_size:
            raise EngineError(f"tp_rank {self.tp_rank} is not within 0..{self.tp_size - 1}")


WHOLE: Final = TPRank()


@attrs.frozen(kw_only=True)
class TensorParallel:
    """A rank, and where its group meets.

    ``rendezvous`` is ``tcp://host:port``, where rank 0 listens, or ``file:///path``, which
    must not exist yet; either serves one start of one group. ``bind_host`` is the address of
    this rank on which the others reach it. ``rendezvous_timeout_s`` is for all ranks to have
    loaded; ``step_timeout_s`` for a rank to join a sum that another one waits in: then the
    group counts as lost.
    """

    rank: TPRank
    rendezvous: str
    bind_host: str = "127.0.0.1"
    rendezvous_timeout_s: float = 120.0
    step_timeout_s: float = 15.0

    def __attrs_post_init__(self) -> None:
        for name, value in (
            ("rendezvous_timeout_s", self.rendezvous_timeout_s),
            ("step_timeout_s", self.step_timeout_s),
        ):
            # The collective counts whole milliseconds.
            if not 0.001 <= value <= 86_400:
                raise EngineError(f"{name} is {value}, expected 0.001..86400 seconds")
        self.address()

    def address(self) -> tuple[str, int] | str:
        """(host, port) or the path of a file. Raises EngineError for anything else."""
        try:
            url = urlsplit(self.rendezvous)
            host, port = url.hostname, url.port
        except ValueError:  # a port that is none, half an IPv6 address
            host, port, url = None, None, urlsplit("")
        if url.scheme == "file" and url.path.startswith("/") and not url.netloc:
            return url.path
        if url.scheme == "tcp" and host and port and not url.path:
            return host, port
        raise EngineError(
            f"rendezvous {self.rendezvous!r} is neither tcp://host:port nor file:///path"
        )


def check_divides(config: LlamaConfig, tp_size: int) -> None:
    """Raises EngineError, naming both numbers, where a group of this size cannot share the
    model: query heads and MLP are cut, KV heads cut or copied whole."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    for name, value in (
        ("num_heads", heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if value % tp_size:
            raise EngineError(
                f"tp_size {tp_size} does not divide {name} {value} of the model; "
                f"possible are {_possible(config)}"
            )
    if kv_heads % tp_size and tp_size % kv_heads:
        raise EngineError(
            f"tp_size {tp_size} neither divides num_kv_heads {kv_heads} of the model nor is "
            f"a multiple of it; possible are {_possible(config)}"
        )


def _possible(config: LlamaConfig) -> str:
    kv_heads = config.num_kv_heads
    sizes = [
        n
        for n in range(1, config.num_heads + 1)
        if not (config.num_heads % n or config.intermediate_size % n)
        and not (kv_heads % n and n % kv_heads)
    ]
    return ", ".join(map(str, sizes))


def local_config(config: LlamaConfig, rank: TPRank) -> LlamaConfig:
    """The shapes of one rank: its heads, its KV heads (at least one), its part of the MLP.

    ``tie_embeddings`` becomes true on ranks above 0, which have no output matrix of their
    own and never ask for logits. Raises EngineError as :func:`check_divides`.
    """
    check_divides(config, rank.tp_size)
    return attrs.evolve(
        config,
        num_heads=config.num_heads // rank.tp_size,
        num_kv_heads=max(1, config.num_kv_heads // rank.tp_size),
        intermediate_size=config.intermediate_size // rank.tp_size,
        tie_embeddings=config.tie_embeddings or rank.tp_rank > 0,
    )


def spans(
    config: LlamaConfig, tensor: FusedTensor, rank: TPRank
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(axis, [start, end) ranges along it) of a whole fused tensor that make up the rank's,
    in order; no range where the rank does not hold it. Raises EngineError as
    :func:`check_divides`."""
    what = tensor.name.rpartition(".")[2]
    axis = _CUT.get(what, 0)
    if rank.tp_size == 1 or what not in _CUT:
        held = what != "head" or rank.tp_rank == 0
        return axis, ((0, tensor.shape[axis]),) if held else ()
    own = local_config(config, rank)
    at, dim = rank.tp_rank, config.head_dim
    q = own.num_heads * dim
    mlp = own.intermediate_size
    if what == "down":
        return axis, ((at * mlp, (at + 1) * mlp),)
    if what == "o":
        return axis, ((at * q, (at + 1) * q),)
    if what == "gate_up":
        starts = (at * mlp, config.intermediate_size + at * mlp)
        return axis, tuple((start, start + mlp) for start in starts)
    first_k = config.num_heads * dim + at * config.num_kv_heads // rank.tp_size * dim
    kv = own.num_kv_heads * dim
    keys_and_values = (first_k, first_k + config.num_kv_heads * dim)
    rows = ((at * q, (at + 1) * q), *((start, start + kv) for start in keys_and_values))
    return axis, rows
