"""A dry run on a model of `transformers` that is known by its config alone: no weights are read or made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cp_rewrite.packing import PositionIds
from cp_rewrite.sharding import Sharding

from .explain import Report, explain

_CACHE = (
    "explained with use_cache=False, where the config says True: set it in training too, since with a cache "
    "transformers leaves out the mask that keeps documents apart"
)


def explain_config(
    name: str, lengths: Sequence[int], world_size: int, layers: int | None = None, **options: Any
) -> Report:
    """What `explain` says of a causal language model in training on one packed row.

    Args:
        name: a folder with a config.json, that file, or a name that `transformers` finds.
        lengths: tokens per document of the row.
        layers: layers to keep; None: the first ones up to where each kind of layer has come, at least 2.
        options: further arguments of Sharding.

    Raises:
        ImportError: `transformers` is missing. OSError: there is no such config.
        ValueError: `layers` is no whole number from 1 to the config's, or what `Sharding` and `explain` raise.
    """
    try:  # late: only this command needs it
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'cp_rewrite[transformers]'") from error

    config = AutoConfig.from_pretrained(str(Path(name).parent) if name.endswith(".json") else name)
    text = config.get_text_config()
    notes = (_CACHE,) if getattr(text, "use_cache", False) else ()
    config.use_cache = text.use_cache = False
    _keep_layers(text, layers)
    with no_init_weights():  # weights are memory that nothing writes; buffers, which masks are read off, hold numbers
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens = torch.zeros_like(position_ids)
    batch = {"input_ids": tokens, "position_ids": position_ids, "labels": tokens.clone()}
    sharding = Sharding(world_size, dict.fromkeys(batch, 1), PositionIds("position_ids"), **options)
    return replace(explain(model.train(), sharding, shift_labels=True)(**batch), notes=notes)


def _keep_layers(config: Any, layers: int | None) -> None:
    """Shorten the model, and every list in its config that has one entry per layer."""
    total: int = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""]
    every_kind = min(total, max(2, *(kinds.index(kind) + 1 for kind in set(kinds))))
    kept: int = every_kind if layers is None else layers
    if not 1 <= kept <= total:
        raise ValueError(f"layers must be from 1 to the config's {total}, got {kept}")
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, value[:kept])
    config.num_hidden_layers = kept
