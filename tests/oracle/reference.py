"""The reference: transformers' Llama with the same dequantised float32 weights.

Only the tensors come from pdcore's GGUF reader; every token comes from transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pdcore.engine.gguf import GGUFFile
from pdcore.engine.hf_model import HF_NAMES
from pdcore.engine.weights import GGUFWeights


def build_reference(path: Path) -> LlamaForCausalLM:
    """LlamaForCausalLM of a GGUF file, float32, in evaluation mode."""
    source = GGUFWeights(GGUFFile(path))
    c = source.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_model_len,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
        # No stop token: every prompt runs to its full length.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    state: dict[str, torch.Tensor] = {}
    for part, name in HF_NAMES.items():
        if part in ("embed", "norm") or (part == "head" and not c.tie_embeddings):
            state[f"{name}.weight"] = torch.from_numpy(source.part(part))
        elif part != "head":
            for i in range(c.num_layers):
                values = torch.from_numpy(source.part(f"{i}.{part}"))
                state[f"model.layers.{i}.{name}.weight"] = values
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if c.tie_embeddings else set()), missing
    model.tie_weights()
    return model


@torch.inference_mode()
def continue_greedily(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens after ``prompt``.

    The mask is all ones because ``generate`` would otherwise infer one from the pad token,
    which occurs inside chat prompts.
    """
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        use_cache=True,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def teacher_forced(
    model: LlamaForCausalLM, prompt: list[int], tokens: list[int]
) -> tuple[list[int], list[float], float]:
    """One forward over prompt + tokens: (argmax at each generated position, logprob of
    each given token, smallest distance between the best and second best logit)."""
    ids = torch.tensor([prompt + tokens])
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    steps = logits[len(prompt) - 1 : -1].float()
    best = steps.topk(2, dim=-1)
    chosen = torch.tensor(tokens)[:, None]
    logprobs = steps.log_softmax(-1).gather(1, chosen)[:, 0]
    margin = float((best.values[:, 0] - best.values[:, 1]).min())
    return best.indices[:, 0].tolist(), logprobs.tolist(), margin
