"""Which kinds of layers a small model has, and which its file has besides."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from torch import nn

LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attention_layers")
"""Fields of configs that name a kind for each layer."""
EXPERTS = re.compile("experts|moe|sparse", re.IGNORECASE)
LAYER = re.compile(r"Attention|Indexer|Layer$|Experts|Router|MLP|Mixer|Sparse|Block")
OTHER = re.compile(r"CrossAttention$|Encoder|FlashAttention2|Vision|Audio|Image|Visual|VAE|Conformer|Pooler|Head")
"""Layers that are not counted: of encoders beside it, of images and sounds, or the same in another way."""


def kinds_of(model: nn.Module) -> list[str]:
    """As the config lists them; "experts" where it does not say so."""
    config: Any = model.config
    text: Any = getattr(config, "text_config", None) or config
    named = [str(kind) for name in LISTS for kind in getattr(text, name, None) or ()]
    found = [*dict.fromkeys(named)]
    has_experts = any(EXPERTS.search(type(module).__name__) for module in model.modules())
    return found + ["experts"] * (has_experts and not {*found} & {"sparse", "moe"})


def absent_from(model: nn.Module) -> list[str]:
    """Layers, and parts of them, that the model's file defines and the model has none of."""
    file: Any = sys.modules[type(model).__module__]
    has = {kind for module in model.modules() for kind in type(module).__mro__}
    return [
        name
        for name, kind in vars(file).items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == file.__name__
        if kind not in has and not hasattr(kind, "config_class") and LAYER.search(name) and not OTHER.search(name)
    ]
