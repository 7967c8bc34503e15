"""The caches of well-known models, entry by entry, from one instance into another (R113).

Numbers are those of the models, with few layers: what counts is what a layer consists of. Blocks
of 128 tokens, as accelerators have them; the harness is that of the resharding tests, so every
row is compared with its definition and nothing outside the lease may change.
"""

from __future__ import annotations

import itertools

import attrs
import pytest

from pdcore.errors import ConfigError
from pdcore.kv.cache import KVBlocks
from pdcore.kv.layout import num_blocks_for, resharded
from pdcore.kv.plan import WriteBatch, plan_blocks
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.kv.tables import kv_groups
from pdcore.topology import InstanceProfile
from tests.property import test_resharding as resharding

BLOCK = 128
BF16 = "bfloat16"
#: More than a block, and more than any window here.
NUM_TOKENS = 150


@attrs.frozen
class Model:
    """``layers``: the entries of each, by the last part of their names. ``item_lens``: bytes of
    a block on one rank of the TP size at which the table of R113 is."""

    layers: tuple[tuple[KVCacheEntry, ...], ...]
    item_lens: dict[str, int]
    tp_sizes: tuple[int, int]
    of_tp: int = 1

    @property
    def spec(self) -> KVCacheSpec:
        """Of all heads."""
        return KVCacheSpec(
            tuple(
                attrs.evolve(entry, name=f"layers.{layer}.{entry.name}", layer=layer)
                for layer, entries in enumerate(self.layers)
                for entry in entries
            )
        )


def latent(
    name: str, dim: int, dtype: str = BF16, key: str = "mla", **more: object
) -> KVCacheEntry:
    """One head, the same on every rank."""
    entry = KVCacheEntry(name, key, dtype, BLOCK, 1, 1, dim, is_mla=True)
    return attrs.evolve(entry, **more)


def heads(
    name: str, count: int, dim: int, dtype: str = BF16, key: str = "full", **more: object
) -> KVCacheEntry:
    return attrs.evolve(KVCacheEntry(name, key, dtype, BLOCK, count, count, dim), **more)


def key_and_value(count: int, dim: int, **more: object) -> tuple[KVCacheEntry, ...]:
    return tuple(heads(part, count, dim, **more) for part in ("k", "v"))


def quantised(count: int, dim: int) -> tuple[KVCacheEntry, ...]:
    """Values, and a scale per token and head."""
    return tuple(
        entry
        for part in ("k", "v")
        for entry in (
            heads(part, count, dim, "int8"),
            heads(f"{part}_scale", count, 1, "float32"),
        )
    )


R1 = (latent("nope", 512), latent("rope", 64))
V32 = (*R1, latent("indexer", 128))
V32_INT8 = (
    latent("nope_rope", 576),
    latent("indexer", 128, "int8"),
    latent("indexer_scale", 1, "float16"),
)
#: The state of a compressor is two rows of the head's size, of the latest tokens only.
WINDOW = latent("win", 512, key="win_kv", sliding_window=128)
C4A = (
    latent("c4a", 512, key="c4a_cmp_kv", block_size=4 * BLOCK, compress_ratio=4),
    latent("c4a_state", 2 * 512, "float32", "c4a_cmp_state", sliding_window=8),
)
C128A = (
    latent("c128a", 512, key="c128a_cmp_kv", block_size=128 * BLOCK, compress_ratio=128),
    latent("c128a_state", 2 * 512, "float32", "c128a_cmp_state", sliding_window=128),
)

MODELS = {
    "DeepSeek R1": Model((R1, R1), {"nope": 131072, "rope": 16384}, (4, 2)),
    "DeepSeek R1, int8": Model(
        ((latent("nope", 512, "int8"), R1[1]),) * 2, {"nope": 65536, "rope": 16384}, (2, 4)
    ),
    "Qwen3 235B": Model((key_and_value(4, 128),) * 2, {"k": 32768, "v": 32768}, (4, 2), 4),
    "Qwen3 235B, int8": Model(
        (quantised(4, 128),),
        {"k": 16384, "k_scale": 512, "v": 16384, "v_scale": 512},
        (2, 8),
        4,
    ),
    "gpt-oss": Model(
        (key_and_value(8, 64, key="window", sliding_window=128), key_and_value(8, 64)),
        {"k": 131072, "v": 131072},
        (1, 4),
    ),
    "DeepSeek V3.2": Model((V32,) * 2, {"nope": 131072, "rope": 16384, "indexer": 32768}, (2, 1)),
    "DeepSeek V3.2, int8": Model(
        (V32_INT8,) * 2, {"nope_rope": 147456, "indexer": 16384, "indexer_scale": 256}, (1, 2)
    ),
    "DeepSeek V4": Model(
        ((WINDOW,), (WINDOW, *C4A), (WINDOW, *C128A), (WINDOW, *C4A)),
        {
            "win": 131072,
            "c4a": 131072,
            "c4a_state": 524288,
            "c128a": 131072,
            "c128a_state": 524288,
        },
        (2, 2),
    ),
}

KEYS = {
    "gpt-oss": {"window": 128, "full": 128},
    "DeepSeek V4": {
        "win_kv": 128,
        "c4a_cmp_kv": 512,
        "c4a_cmp_state": 128,
        "c128a_cmp_kv": 16384,
        "c128a_cmp_state": 128,
    },
}

by_name = pytest.mark.parametrize("name", MODELS)


@by_name
def test_what_a_layer_of_it_has(name: str) -> None:
    """R110, R111, R113: bytes of a block of every entry, and a block size for every key."""
    model = MODELS[name]
    part = resharded(model.spec, model.of_tp, 0)
    found = {entry.name.rpartition(".")[2]: entry.item_len for entry in part.entries}
    assert found == model.item_lens
    assert part.block_sizes == KEYS.get(name, {part.entries[0].manager_key: BLOCK})
    assert {group.key for group in kv_groups(part)} == set(part.block_sizes)


def test_as_many_entries_as_the_whole_model_has() -> None:
    """R112, R113: 61 layers of two entries; layers ascending."""
    spec = Model((R1,) * 61, {}, (1, 1)).spec
    assert len(spec.entries) == 122
    assert [entry.layer for entry in spec.entries] == sorted(2 * list(range(61)))


def test_no_two_of_them_pair() -> None:
    """D35, R113."""
    digests = {name: model.spec.digest() for name, model in MODELS.items()}
    for one, other in itertools.combinations(MODELS, 2):
        assert digests[one] != digests[other], (one, other)


def scene(model: Model, divisor: int) -> resharding.Scene:
    prefill_tp, decode_tp = model.tp_sizes
    spec = model.spec
    return resharding.Scene(
        spec,
        {key: size // divisor for key, size in spec.block_sizes.items()},
        InstanceProfile(tp_size=prefill_tp),
        InstanceProfile(tp_size=decode_tp),
        False,
        NUM_TOKENS,
        (128, NUM_TOKENS),
        7,
    )


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness has prompts of 56 tokens."""
    monkeypatch.setattr(resharding, "MAX_LEN", 512)
    monkeypatch.setattr(resharding, "NUM_BLOCKS", 6)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("divisor", [1, 2], ids=["equal blocks", "half as large at decode"])
@by_name
def test_its_kv_arrives(name: str, divisor: int) -> None:
    """R79, R80, R94, R113: the plan of every pair of ranks, carried out; TP sizes differ."""
    resharding.check_scene(scene(MODELS[name], divisor))


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("name", ["Qwen3 235B, int8", "DeepSeek V3.2, int8", "DeepSeek V4"])
def test_an_entry_that_is_left_out_is_noticed(name: str) -> None:
    """The mutant: the last entry of a layer is not sent."""

    def forgetful(
        src: KVCacheSpec,
        a: KVPlacement,
        s: object,
        dst: KVCacheSpec,
        b: KVPlacement,
        *rest: object,
    ) -> tuple[WriteBatch, ...]:
        cut = [
            (attrs.evolve(x, entries=x.entries[:-1]), first_of(place, len(x.entries) - 1))
            for x, place in ((src, a), (dst, b))
        ]
        return plan_blocks(*cut[0], s, *cut[1], *rest)

    def first_of(place: KVPlacement, count: int) -> KVPlacement:
        return attrs.evolve(
            place,
            regions=place.regions[:count],
            offsets=place.offsets[:count],
            block_strides=place.block_strides[:count],
        )

    with pytest.raises(AssertionError, match="other bytes"):
        resharding.check_scene(scene(MODELS[name], 1), forgetful)


def test_r96_state_that_is_in_no_block_is_refused() -> None:
    """R96, R110, R112: by name, with what to do, when a worker takes its memory."""
    mamba = attrs.evolve(R1[0], name="layers.3.ssm", needs_block=False)
    spec = KVCacheSpec((*R1, mamba))
    with pytest.raises(ConfigError, match=r"entry layers\.3\.ssm: needs_block False; a state"):
        KVBlocks(spec, 8, 512)
    with pytest.raises(ConfigError, match="prefill and decode cannot share this model"):
        num_blocks_for(spec, 1 << 30)
