"""Choosing the next token from logits, in numpy so that every engine can share it.

The draw is counter-based: it depends only on (seed, position), never on how many draws
were made before, so prefill and decode, or a retried request, never repeat or skip
each other's draws (D18).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdcore.errors import EngineError
from pdcore.types import SamplingParams

Float32Array = NDArray[np.float32]

#: What a logprob that is not finite becomes (R37): JSON has no infinity.
LOWEST_LOGPROB: Final = -float(np.finfo(np.float32).max)

_MASK: Final = (1 << 64) - 1


def mix64(value: int) -> int:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on (seed, position)."""
    mixed = mix64(mix64(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
    return (mixed >> 11) / float(1 << 53)


def log_probability(logits: Float32Array, token: int) -> float:
    """Natural log of the model's own probability (temperature 1) of ``token``, shape (V,)."""
    wide = logits.astype(np.float64)
    with np.errstate(all="ignore"):
        peak = wide.max()
        value = float(wide[token] - peak - np.log(np.exp(wide - peak).sum()))
    return value if np.isfinite(value) else LOWEST_LOGPROB


def require_finite(logit: float) -> None:
    """The logit of the chosen token, after :func:`draw` had its way around a NaN.

    Where it is no finite number no token is right: the first of the vocabulary would often
    end the sequence, and the answer be empty without an error. Raises EngineError.
    """
    if not math.isfinite(logit):
        raise EngineError(
            f"the model produced no finite logits (the best is {logit}): its weights are "
            "damaged. Delete the converted weights (the folder 'weights' in the cache folder) "
            "and start again; if that does not help, check the model file."
        )


def draw(logits: Float32Array, params: SamplingParams, seed: int, position: int) -> int:
    """Token id at ``position`` from logits of shape (V,).

    Order as in the field: temperature, then top_k, then top_p (smallest set of most
    likely tokens that reaches it). A NaN is never chosen while there is a number; where
    what is left gives no distribution (an infinity), the token is the most likely one.
    Never raises: one broken sequence must not fail the batch.
    """
    greedy = int(logits.argmax())
    if np.isnan(logits[greedy]):  # argmax takes a NaN for the largest
        logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
        greedy = int(logits.argmax())
    if params.temperature <= 0.0 or params.top_k == 1:
        return greedy
    ids, scores = _candidates(logits, params)
    with np.errstate(all="ignore"):
        weights = np.exp((scores.astype(np.float64) - float(scores.max())) / params.temperature)
        total = float(weights.sum())
    if not np.isfinite(total) or total <= 0.0:
        return greedy
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        ordered = np.cumsum(weights[order])
        keep = int(np.searchsorted(ordered, params.top_p * total)) + 1
        ids, weights = ids[order[:keep]], weights[order[:keep]]
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], "right"))
    return int(ids[min(index, len(ids) - 1)])


def _candidates(
    logits: Float32Array, params: SamplingParams
) -> tuple[NDArray[np.int64], Float32Array]:
    if 0 < params.top_k < len(logits):
        ids = np.sort(np.argpartition(logits, -params.top_k)[-params.top_k :])
        return ids.astype(np.int64), logits[ids]
    return np.arange(len(logits), dtype=np.int64), logits
