"""A model on `meta` for a dry run: rules are made for tensors on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def weights_on_cpu(model: Any) -> Generator[None]:
    """Inside, a module's weights and buffers on `meta` are tensors on the CPU, whose memory nothing writes; what is
    shared stays shared. What buffers hold is not known: masks are not read off them."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    places = [held for module in modules for held in (module._parameters, module._buffers)]
    before = [(held, name, x) for held in places for name, x in held.items() if isinstance(x, Tensor) and x.is_meta]
    made: dict[int, Tensor] = {}
    for held, name, x in before:
        if id(x) not in made:
            made[id(x)] = _like(x)
        held[name] = made[id(x)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for held, name, x in before:
            held[name] = x  # type: ignore[assignment]


def _like(x: Tensor) -> Tensor:
    if isinstance(x, nn.Parameter):
        return nn.Parameter(torch.empty_like(x, device="cpu"), x.requires_grad)
    known = torch.empty_like(x, device="cpu")
    known._cp_rewrite_unknown = True  # type: ignore[attr-defined]
    return known
