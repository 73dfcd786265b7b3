"""A model without memory for its weights, which Dynamo traces in the place of one that is sharded.

FSDP's hooks and sharded weights break a graph. The twin has neither: its parameters have shape, dtype and device of the
whole ones, and no memory. All else is shared with the model (buffers) or a copy.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

_OF_MODULES = {*vars(nn.Module())} - {"training"} | {"_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Attributes that every module has for itself, and those that FSDP marks its own by."""


class Twin:
    """Of a model before it is sharded.

    `module` is called in the model's place. `owners` says of each of its parameters, by id, where the weight is: the
    parameter, the module of the model that holds the weight, and under which name.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        """`dtype`: of weights in the forward, where that is not their own."""
        stand_ins = {id(p): _without_memory(p, device, dtype) for p in model.parameters()}
        memo: dict[int, Any] = dict(stand_ins) | {id(buffer): buffer for buffer in model.buffers()}
        if (config := getattr(model, "config", None)) is not None:
            memo[id(config)] = config
        self.module = copy.deepcopy(model, memo)
        self._pairs = list(zip(model.modules(), self.module.modules(), strict=True))
        self._made_of = [(module, _parts(module)) for module in model.modules()]
        self.owners: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}
        for mine, theirs in self._pairs:
            theirs._buffers = mine._buffers  # one dict: what the twin assigns, the model has
            for name, parameter in mine._parameters.items():
                if parameter is not None:
                    stand_in = stand_ins[id(parameter)]
                    self.owners.setdefault(id(stand_in), (stand_in, mine, name))

    def follow(self) -> None:
        """Take over what may change between calls: `train()`, `eval()`, `requires_grad_()`, and attributes that hold
        numbers, words, or lists of such (which adapter is on, a dropout's rate). Raises where modules or weights were
        added or replaced since, as by adapters."""
        for module, parts in self._made_of:
            if _parts(module) != parts:
                name = type(module).__name__.removeprefix("FSDP")
                raise RuntimeError(
                    f"modules or weights of a {name} were added or replaced after parallelize, which the compiled "
                    "model would not see: change the model (adapters, frozen heads) before parallelize"
                )
        for mine, theirs in self._pairs:
            known = vars(theirs)
            for name, value in vars(mine).items():
                # Most are the same objects as when the twin was made.
                if known.get(name, Twin) is not value and name not in _OF_MODULES and _is_plain(value):
                    known[name] = value
        for stand_in, module, name in self.owners.values():
            weight = module._parameters[name]
            if weight is not None and stand_in.requires_grad != weight.requires_grad:
                stand_in.requires_grad_(weight.requires_grad)


def _parts(module: nn.Module) -> tuple[object, ...]:
    """What a module is made of: its modules, and the names of its weights."""
    return (*map(id, module._modules.values()), *module._parameters)


def _is_plain(value: Any) -> bool:
    if isinstance(value, functools.partial):  # how blocks are checkpointed
        return _is_plain((*value.args, value.keywords))
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in cast(Mapping[Any, Any], value).values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in cast(Iterable[Any], value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _without_memory(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    empty: Tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device=device)
    empty.untyped_storage().resize_(0)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
