"""Optimizers that were made of weights which `parallelize` replaces: their steps would change nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer


def check_no_optimizer(parameters: Iterable[nn.Parameter]) -> None:
    """Raise a ValueError where an optimizer holds one of these parameters, which are about to be replaced."""
    replaced = set(map(id, parameters))
    for value in gc.get_objects():
        groups = getattr(value, "param_groups", ()) if issubclass(type(value), Optimizer) else ()
        if any(id(p) in replaced for group in groups for p in group["params"]):
            raise ValueError(
                f"an optimizer ({type(value).__name__}) was made of this model's weights, which parallelize replaces "
                "by shards: its steps would change nothing. Make it afterwards, of parallelize's model, or delete it"
            )
