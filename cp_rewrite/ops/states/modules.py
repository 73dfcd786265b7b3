"""Modules of transformers whose own loops pass a state through tokens: their forwards are traced as ops of ours.

    MiniMaxLightningAttention      ssd: keys write, queries look, and each head decays by a number of its own

Dynamo asks no table for the forward of a module, so that it is wrapped in its class; outside of blocks, and in eager
calls, it runs as it is. As of functions, it is left alone if it gives other numbers than the op.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ops: Any = torch.ops.cp_rewrite
_NAME = "MiniMaxLightningAttention"


class Blocks:
    """Blocks that are open, in all threads. `inside`: whether there are any; Dynamo guards on it."""

    count = 0
    inside = False


def wrap_modules(module: ModuleType) -> None:
    """Wrap the forwards of a loaded module's classes, once."""
    names = (_NAME, "MiniMaxConfig", "apply_mask_to_padding_states")
    found: list[Any] = [vars(module).get(name) for name in names]
    if None in found or hasattr(found[0].forward, "_cp_rewrite"):
        return
    kind, config, masked = found
    if _agrees(kind, config, masked):
        kind.forward = _wrapped(kind.forward, masked)


def _wrapped(plain: Any, masked: Any) -> Any:
    @functools.wraps(plain)
    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if torch.compiler.is_compiling() and Blocks.inside and past_key_values is None:
            return lightning(self, hidden_states, attention_mask, masked), None
        return plain(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)

    wrapped: Any = forward
    wrapped._cp_rewrite = True
    return forward


def lightning(module: Any, hidden_states: Tensor, attention_mask: Tensor | None, masked: Any) -> Tensor:
    """(B, T, C): what the attention gives for hidden states (B, T, C)."""
    rows = masked(module.act_fn(module.qkv_proj(hidden_states)), attention_mask)
    heads = rows.unflatten(-1, (module.num_attention_heads, 3 * module.head_dim))
    query, key, value = heads.split(module.head_dim, 3)
    rate = -module.slope_rate[:, 0, 0]
    out = _ops.ssd(value, torch.ones_like(value[..., 0]), rate, key, query, None).to(value.dtype)
    out = module.norm(out.flatten(2))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * out)


def _agrees(kind: Any, config: Any, masked: Any) -> bool:
    """Whether the class gives on a few tokens what the op gives."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            sizes = dict(num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
            module = kind(config(hidden_size=8, head_dim=4, block_size=4, **sizes), 0).float()
            x = torch.randn(2, 7, 8, dtype=torch.float32)
            theirs, ours = module(x, None, None)[0], lightning(module, x, None, masked)
    except Exception:
        return False
    return torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4)
