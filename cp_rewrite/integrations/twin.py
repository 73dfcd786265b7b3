"""A model without memory for its weights, which Dynamo traces in the place of one that is sharded.

FSDP's hooks and sharded weights break a graph. The twin has neither: its parameters have shape, dtype and device of the
whole ones, and no memory. All else is shared with the model (buffers) or a copy.

What can't be done to a model once it is parallelized: each raises, and says what to do instead.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from cp_rewrite.batch.encoders import has_encoders, stands_for
from cp_rewrite.segments.blocks import HOOKS, OF_MODULES, OUTPUT_CAPTURING, ReadOnce

_KNOWN = ("torch.distributed.", OUTPUT_CAPTURING)
"""Whose hooks may come later: they do nothing inside of a graph, or are traced anew."""


class Unchanged:
    """Record of a model that something else is traced for, or that is wrapped: modules, weights' names and hooks then.

    Looked at in every call: lists that are made without a step of Python for each module, 0.2 ms for 1,600 modules.
    """

    def __init__(self, model: nn.Module, hooks: bool) -> None:
        """`hooks`: those of modules inside must not change either."""
        self.model, self.modules, self.first = model, dict(model.named_modules()), RemovableHandle.next_id
        modules = self.modules.values()
        self._made_of = [*(module._modules.values() for module in modules), *(m._parameters.keys() for m in modules)]
        self._weights = {name: [*module._parameters] for name, module in self.modules.items()}
        self._before = [*chain.from_iterable(self._made_of)]
        self._hooks = [getattr(m, kind) for name, m in self.modules.items() if name and hooks for kind in HOOKS]

    def check(self) -> None:
        """Raise a RuntimeError where a module or a weight was replaced or added, or a module got a hook."""
        if [*chain.from_iterable(self._made_of)] != self._before:
            raise RuntimeError(
                f"{self._changed()} was put in or taken out after parallelize, which knows the modules and weights of "
                "before: change the model (adapters, heads, checkpointing) first, then parallelize it"
            )
        late = next((hooks for hooks in self._hooks if hooks and self._is_late(hooks)), None)
        if late is not None:
            owners = (name for name, m in self.modules.items() if any(getattr(m, kind) is late for kind in HOOKS))
            raise RuntimeError(
                f"{next(owners)} got a hook after parallelize, which would see what a part of the graph reads, or "
                "nothing: put hooks on modules first, where they are traced, then parallelize the model"
            )

    def _changed(self) -> str:
        found = dict(self.model.named_modules())
        modules = [name for name in {**self.modules, **found} if self.modules.get(name) is not found.get(name)]
        weights = [f"a weight of {name or 'the model'}" for name, m in found.items()
                   if [*m._parameters] != self._weights.get(name)]  # fmt: skip
        return next(iter(modules + weights), "a module")

    def _is_late(self, hooks: Mapping[int, Any]) -> bool:
        late = [hook for key, hook in hooks.items() if key >= self.first]
        return any(not str(getattr(hook, "__module__", "")).startswith(_KNOWN) for hook in late)


def refuse_copies(model: nn.Module) -> None:
    """A copy's forward would run the model that it was copied from."""

    def refuse(memo: Any) -> NoReturn:
        raise RuntimeError(
            "a model can't be copied after parallelize, or once a trainer has it: the copy would run this one. Copy "
            "the plain model before, or take the weights, "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model)"
        )

    model.__deepcopy__ = refuse


def refuse_whole_weights(model: nn.Module) -> None:
    """Let `load_state_dict` of a model whose weights are sharded refuse whole ones: it would fail on each by itself, or
    with `assign=True` put whole weights in their place."""

    names = [name for name, _ in model.named_parameters()]

    def refuse(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        given = [state[prefix + name] for name in names if isinstance(state.get(prefix + name), Tensor)]
        if not all(isinstance(value, DTensor) for value in given):
            raise RuntimeError(
                "load_state_dict was given whole weights, and parallelize sharded the model's: load them before "
                "parallelize, or by torch.distributed.checkpoint.state_dict.set_model_state_dict(model, weights, "
                "options=StateDictOptions(full_state_dict=True)), with model.reshard() before it where the last call "
                "had no backward"
            )

    model.register_load_state_dict_pre_hook(refuse)


_OF_MODULES = OF_MODULES - {"training"} | {"_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Attributes that every module has for itself, and those that FSDP marks its own by."""


class Twin:
    """A copy of a model before it is sharded, with stand-ins for its weights.

    `module` is called in the model's place. `owners` says of each of its parameters, by id, where the weight is: the
    parameter, the module of the model that holds the weight, and under which name. `read_once`: its equal blocks.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype | None, *, hooks: bool = False
    ) -> None:
        """`dtype`: of weights in the forward, where that is not their own. `hooks`: hooks that come later are an error,
        too."""
        stand_ins = {id(p): _stand_in(p, device, dtype) for p in model.parameters()}
        memo: dict[int, Any] = dict(stand_ins) | {id(buffer): buffer for buffer in model.buffers()}
        if (config := getattr(model, "config", None)) is not None:
            memo[id(config)] = config
        self.module = copy.deepcopy(model, memo)
        self._pairs = list(zip(model.modules(), self.module.modules(), strict=True))
        self.owners: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}
        for mine, theirs in self._pairs:
            theirs._buffers = mine._buffers  # one dict: what the twin assigns, the model has
            if has_encoders(mine):
                stands_for(theirs, mine)
            for name, parameter in mine._parameters.items():
                if parameter is not None:
                    stand_in = stand_ins[id(parameter)]
                    self.owners.setdefault(id(stand_in), (stand_in, mine, name))
        self.read_once = ReadOnce(self.module)
        self._unchanged = Unchanged(model, hooks)
        self._note_attributes()

    def follow(self) -> None:
        """Take over what may change between calls: `train()`, `eval()`, `requires_grad_()`, and attributes that hold
        numbers, words, or lists of such (which adapter is on, a dropout's rate). Raises where modules, weights or hooks
        were added or replaced since, as by adapters."""
        self._unchanged.check()
        if not self._same_attributes():
            self._take_attributes()
            self._note_attributes()
        for stand_in, module, name in self.owners.values():
            weight = module._parameters[name]
            if weight is not None and stand_in.requires_grad != weight.requires_grad:
                stand_in.requires_grad_(weight.requires_grad)

    def _note_attributes(self) -> None:
        """Keep what `_same_attributes` compares: how many attributes each module has, and those that are plain."""
        self._attributes = [vars(mine) for mine, _ in self._pairs]
        self._counts = [*map(len, self._attributes)]
        plain = [[k for k, v in own.items() if k not in _OF_MODULES and _is_plain(v)] for own in self._attributes]
        # Two names at least: of one an `itemgetter` gives the value itself.
        get = [itemgetter("training", "training", *names) for names in plain]
        self._plain = [*zip(get, self._attributes, strict=True)]
        self._values = self._plain_values()

    def _plain_values(self) -> list[Any]:
        return [value for get, own in self._plain for value in get(own)]

    def _same_attributes(self) -> bool:
        """True if no module's plain attributes are other objects than when they were noted: most often so, and 0.5 ms
        for 1,600 modules."""
        try:
            return [*map(len, self._attributes)] == self._counts and all(map(is_, self._plain_values(), self._values))
        except KeyError:
            return False

    def _take_attributes(self) -> None:
        for mine, theirs in self._pairs:
            known = vars(theirs)
            for name, value in vars(mine).items():
                # Most are the same objects as when the twin was made; a buffer has taken the place of some.
                if known.get(name, Twin) is not value and name not in _OF_MODULES and _is_plain(value):
                    if name not in theirs._buffers:
                        known[name] = value


def _is_plain(value: Any) -> bool:
    if isinstance(value, functools.partial):  # how blocks are checkpointed
        return _is_plain((*value.args, value.keywords))
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in cast(Mapping[Any, Any], value).values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in cast(Iterable[Any], value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def without_memory(like: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without memory; one of fewer entries in dim 0 than `like` has its other strides."""
    empty: Tensor = torch.empty_strided(shape, like.stride(), dtype=dtype, device=device)
    empty.untyped_storage().resize_(0)
    return nn.Parameter(empty, requires_grad=like.requires_grad)


def _stand_in(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return without_memory(parameter, parameter.shape, dtype, device)
