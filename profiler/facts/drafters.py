"""The layers that propose a decode's next tokens, as models of their own."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from sarathi_sim.profiler.facts.model import ModelSpec

_HEAD_DIM, _KV_HEADS = 128, 8


def drafting_layer(model: ModelSpec, method: str) -> ModelSpec:
    """The layer with which a model drafts.

    ``mtp``: a layer like the model's own, with attention over the whole context, and with experts
    where the model has some (DeepSeek V3, arXiv:2412.19437, section 2.2). ``eagle3``: one dense
    layer of its width, with the model's heads (EAGLE-3, arXiv:2503.01840); where these share a
    latent, heads are taken to be 128 wide, and those of KV at most eight. Both use the model's
    embedding and LM head. What joins their inputs (a GEMM of two or three hidden states) is left
    out.
    """
    changes: dict[str, Any] = {"num_layers": 1, "recurrent": None, "windows": None}
    changes["name"] = f"{model.name}-{method}"
    if method == "mtp":
        if model.experts is not None:
            changes["experts"] = replace(model.experts, dense_layers=(), bare_layers=())
            changes["ffn_hidden_size"] = 0
        return replace(model, **changes)
    if model.latent is not None:
        heads = max(model.hidden_size // _HEAD_DIM, 1)
        changes |= {"num_heads": heads, "num_kv_heads": gcd(_KV_HEADS, heads)}
        changes["head_dim"] = _HEAD_DIM
    return replace(
        model,
        ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
        experts=None,
        latent=None,
        indexer=None,
        output_gate=False,
        qk_norm=False,
        moe_dtype=None,
        **changes,
    )
