"""Small models with fixed random weights."""

from __future__ import annotations

import torch
from torch import nn


def build_model(name: str) -> nn.Module:
    """A model by name, the same weights on every call."""
    torch.manual_seed(0)
    return _BUILDERS[name]()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


_BUILDERS = {"llama": _llama}
