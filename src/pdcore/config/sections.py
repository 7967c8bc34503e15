"""The four sections of a role's YAML file: model, data, parallel and scheduler (R16-R18).

Fields and sections carry the seed's names, so that its files read. A default that is not
the seed's says why.
"""

from __future__ import annotations

from typing import Final

import attrs

from pdcore.config.fields import (
    bounded,
    choice,
    optional_int,
    optional_share,
    optional_text,
    text,
)
from pdcore.types import MAX_ID

#: What ``model_path`` says for the engine without a model; it serves token ids only.
SIMULATED: Final = "simulated"
#: The most that the metadata of speculative decoding has room for (R120).
MAX_SPEC_TOKENS: Final = 7
#: KV pool where no size is set: one prompt of the embedded model's full 8,192 tokens in
#: float32 takes 361 MiB, and a worker must stay under 1.3 GiB resident.
DEFAULT_KV_CACHE_BYTES: Final = 384 << 20


@attrs.frozen
class ModelConfig:
    """``model_config``: what is served (R17). ``model_path`` None is the embedded model,
    :data:`SIMULATED` the engine without one, else a GGUF file or a safetensors folder."""

    model_name: str = text("", "empty: the model's own name")
    model_path: str | None = optional_text(
        "none: the embedded model; `simulated`; a GGUF file or a safetensors folder"
    )
    dtype: str = choice(
        "float32",
        ("float32", "bfloat16"),
        "weights and KV; float32 makes prefill and decode token-exact",
        seed="bfloat16",
    )
    max_model_len: int | None = optional_int(
        "tokens", "prompt + output; none: what the model was trained for", low=2
    )
    next_n: int = bounded(
        0, "tokens", "speculative tokens a step", low=0, high=MAX_SPEC_TOKENS, seed="0"
    )
    exe_mode: str = choice(
        "eager", ("eager", "ge_graph", "npugraph_ex"), "how the engine runs a step", seed="eager"
    )
    num_threads: int = bounded(
        1, "threads", "per worker; more than free cores collapse", low=1, high=1024
    )

    @property
    def is_simulated(self) -> bool:
        return self.model_path == SIMULATED


@attrs.frozen
class DataConfig:
    """``data_config``: sampling where a request says nothing, the same on both roles (R17).
    Prefill draws the first token of an answer and decode the others."""

    dataset: str = text("default", "prompts to run offline: refused here", seed="default")
    dataset_path: str = text("", "prompts to run offline: refused here")
    input_truncated_len: int = bounded(
        256, "tokens", "derives max_prefill_tokens when that is 0 (R18)", low=1, seed="256"
    )
    temperature: float = bounded(0.0, "", "0 is greedy", low=0, high=100, seed="0.0")
    top_p: float = bounded(1.0, "", "nucleus sampling", low=0.01, high=1, seed="1.0")
    top_k: int = bounded(0, "", "0: off", low=0, high=(1 << 31) - 1, seed="0")
    seed: int | None = optional_int("", "none: drawn per request", low=0, high=MAX_ID)


@attrs.frozen
class ParallelConfig:
    """``parallel_config``: ``world_size`` is per instance (R16); every size divides it (R17)."""

    world_size: int = bounded(1, "ranks", "of one instance", low=1, seed="1")
    attn_tp_size: int = bounded(1, "ranks", "tensor parallel, attention", low=1, seed="1")
    moe_tp_size: int = bounded(1, "ranks", "tensor parallel, experts", low=1, seed="1")
    embed_tp_size: int = bounded(1, "ranks", "tensor parallel, embedding", low=1, seed="1")
    lmhead_tp_size: int = bounded(1, "ranks", "tensor parallel, output head", low=1, seed="1")
    dense_tp_size: int = bounded(1, "ranks", "tensor parallel, dense layers", low=1, seed="1")
    shared_tp_size: int = bounded(1, "ranks", "tensor parallel, shared experts", low=1, seed="1")
    o_proj_tp_size: int = bounded(1, "ranks", "tensor parallel, output proj.", low=1, seed="1")
    cp_size: int = bounded(
        1,
        "ranks",
        "context parallel: 1 or world_size; not served yet, 1 only (docs/layouts.md)",
        low=1,
        seed="1",
    )
    pp_size: int = bounded(
        1, "stages", "pipeline parallel (R4); not served yet, 1 only (docs/layouts.md)", low=1
    )

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(ParallelConfig)[1:]:
            size: int = attrs.asdict(self)[field.name]
            if self.world_size % size:
                raise ValueError(
                    f"{field.name} must divide world_size ({self.world_size}), got {size}"
                )
        if self.cp_size > 1 and (self.cp_size != self.world_size or self.attn_tp_size > 1):
            raise ValueError(
                f"cp_size must be 1, or world_size ({self.world_size}) with attn_tp_size 1, "
                f"got {self.cp_size} with attn_tp_size {self.attn_tp_size}"
            )
        if self.world_size % (self.attn_tp_size * self.cp_size * self.pp_size):
            raise ValueError(
                f"pp_size x attn_tp_size x cp_size must divide world_size ({self.world_size})"
            )

    @property
    def attn_dp_size(self) -> int:
        return self.world_size // (self.attn_tp_size * self.pp_size)

    @property
    def dp_size(self) -> int:
        """Scheduling units of one instance: W / (tp x cp x pp) (R4)."""
        return self.world_size // (self.attn_tp_size * self.cp_size * self.pp_size)

    @property
    def moe_ep_size(self) -> int:
        return self.world_size // self.moe_tp_size

    @property
    def embed_dp_size(self) -> int:
        return self.world_size // self.embed_tp_size


@attrs.frozen
class SchedulerConfig:
    """``scheduler_config``: batches and KV memory (R18). At most one of ``num_blocks``,
    ``kv_cache_bytes`` and ``mem_fraction_static`` is set; none of them: 384 MiB, which
    holds one prompt of the embedded model's full length."""

    batch_size: int = bounded(
        32, "requests", "of an instance in one step", low=1, high=65536, seed="1"
    )
    max_new_tokens: int | None = optional_int(
        "tokens",
        "most a request may ask for, the same on both roles; none: what is left. On prefill "
        "1 is no limit: there it says what prefill makes (R19)",
        low=1,
        seed="32",
    )
    max_prefill_tokens: int = bounded(
        8192, "tokens", "longest prompt, and one step's budget; 0: derived (R18)", low=0, seed="0"
    )
    prefill_chunk_tokens: int = bounded(
        512, "tokens", "of one prompt in one step; short enough to abort in time", low=1
    )
    num_reserved_decode_tokens: int = bounded(
        64, "tokens", "head-room of each running request at admission (R69)", low=0, seed="64"
    )
    metadata_slots: int = bounded(
        0, "slots", "0: 2 x batch, as quarantined ones must not stop admission", low=0, seed="batch"
    )
    block_size: int = bounded(16, "tokens", "of one KV block", low=1, high=65536, seed="128")
    num_blocks: int | None = optional_int("blocks", "KV pool, null block included", low=2)
    kv_cache_bytes: int | None = optional_int("bytes", "KV pool; none: 384 MiB", low=1)
    mem_fraction_static: float | None = optional_share(
        "of the memory that is free at start", seed="0.85"
    )
    cp_mini_batch: int = bounded(-1, "requests", "of one CP step; -1: no cap", low=-1, seed="-1")

    def __attrs_post_init__(self) -> None:
        sizes = {
            "num_blocks": self.num_blocks,
            "kv_cache_bytes": self.kv_cache_bytes,
            "mem_fraction_static": self.mem_fraction_static,
        }
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]} must not be set together with {given[0]}: keep one")
        room = ((self.num_blocks or 0) - 1) * self.block_size - 1
        if self.num_blocks is not None and room < max(1, self.max_prefill_tokens):
            raise ValueError(
                f"num_blocks must hold max_prefill_tokens ({self.max_prefill_tokens}), got "
                f"{self.num_blocks}: {self.num_blocks} blocks of {self.block_size} hold {room} "
                f"tokens (one is the null block, one token is the first output)"
            )
