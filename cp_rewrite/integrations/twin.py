"""The twin of a model: one without memory for its weights, which Dynamo traces in the place of one that is sharded.

Unchanged, refuse_copies,     uses that a parallelized model refuses: each raises, and says what to do instead
refuse_whole_weights
Twin                          the twin, which follows the model, and hands back what a call leaves on its modules
without_memory                its parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from cp_rewrite.batch.encoders import has_encoders, stands_for
from cp_rewrite.segments.blocks import HOOKS, OF_MODULES, OUTPUT_CAPTURING, ReadOnce

from .held import HeldObjects

_KNOWN = ("torch.distributed.", OUTPUT_CAPTURING)
"""Packages whose hooks may come later: they do nothing inside of a graph, or are traced anew."""


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


_OF_MODULES = OF_MODULES - {"training"} | {"forward", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Attributes that every module has for itself, and those that sharding gives it."""


class Twin:
    """A copy of a model before it is sharded, with stand-ins for its weights: FSDP's hooks and sharded weights break a
    graph.

    Its parameters have shape, dtype and device of the whole ones, and no memory. All else is shared with the model
    (buffers, objects that hold no module) or a copy.

    `module` is called in the model's place. `owners` says of each of its parameters, by id, where the weight is: the
    parameter, the module of the model that holds the weight, and under which name. `read_once`: its equal blocks.
    `pairs`: objects that both have one of their own, as of `HeldObjects`.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype | None, *, hooks: bool = False
    ) -> None:
        """`dtype`: of weights in the forward, where that is not their own. `hooks`: hooks that come later are an error,
        too. Raises a ValueError for tensors that a module holds and a twin can't, as of `HeldObjects`."""
        stand_ins = {id(p): _stand_in(p, device, dtype) for p in model.parameters()}
        self._held = HeldObjects(model, dict(stand_ins))
        self.module, self.pairs = self._held.twin, self._held.pairs
        self._modules = [*zip(dict(model.named_modules()).items(), self.module.modules(), strict=True)]
        self.owners: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}
        for (_, mine), theirs in self._modules:
            theirs._buffers = mine._buffers  # one dict: what the twin assigns, the model has
            if has_encoders(mine):
                stands_for(theirs, mine)
            for name, parameter in mine._parameters.items():
                if parameter is not None:
                    stand_in = stand_ins[id(parameter)]
                    self.owners.setdefault(id(stand_in), (stand_in, mine, name))
        self.read_once = ReadOnce(self.module)
        self._unchanged = Unchanged(model, hooks)
        self._mine = _Attributes([mine for (_, mine), _ in self._modules])
        self._theirs = _Attributes([theirs for _, theirs in self._modules])

    def follow(self) -> None:
        """Take over what may change between calls: `train()`, `eval()`, `requires_grad_()`, and attributes (which
        adapter is on, a dropout's rate). Raises where modules, weights or hooks were added or replaced since, as by
        adapters, and where an object that holds modules was changed."""
        self._unchanged.check()
        self._held.check()
        if changes := self._mine.changes():
            for place, name, value in changes:
                (owner, _), theirs = self._modules[place]
                if value is _GONE:
                    vars(theirs).pop(name, None)
                elif name not in theirs._buffers:  # which has taken the place of some
                    vars(theirs)[name] = self._held.stand_in(f"{owner}.{name}" if owner else name, value)
            self._mine.note()
            self._theirs.note()
        for stand_in, module, name in self.owners.values():
            weight = module._parameters[name]
            if weight is not None and stand_in.requires_grad != weight.requires_grad:
                stand_in.requires_grad_(weight.requires_grad)

    def hand_back(self) -> None:
        """Give the model what a call has left on modules of the twin."""
        if changes := self._theirs.changes():
            for place, name, value in changes:
                (_, mine), _ = self._modules[place]
                if value is _GONE:
                    vars(mine).pop(name, None)
                else:
                    vars(mine)[name] = value
            self._mine.note()
            self._theirs.note()


_GONE = object()


class _Attributes:
    """Attributes of modules as they were noted last."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._now = [vars(module) for module in modules]
        self.note()

    def note(self) -> None:
        """Keep what each module holds now, and how many attributes it has."""
        self._counts = [*map(len, self._now)]
        self._before = [{k: v for k, v in own.items() if _may_change(k)} for own in self._now]
        # Two names at least: of one an `itemgetter` gives the value itself.
        get = [itemgetter("training", "training", *before) for before in self._before]
        self._get = [*zip(get, self._now, strict=True)]
        self._values = self._read()

    def changes(self) -> list[tuple[int, str, Any]]:
        """(the module's place, name, value) of attributes that are other objects than when they were noted; those that
        were deleted are _GONE. Most often there are none: 0.5 ms for 1,600 modules."""
        try:
            if [*map(len, self._now)] == self._counts and all(map(is_, self._read(), self._values)):
                return []
        except KeyError:
            pass
        found: list[tuple[int, str, Any]] = []
        for place, (old, own) in enumerate(zip(self._before, self._now, strict=True)):
            new = {k: v for k, v in own.items() if _may_change(k)}
            found += [(place, name, value) for name, value in new.items() if old.get(name, _GONE) is not value]
            found += [(place, name, _GONE) for name in old if name not in new]
        return found

    def _read(self) -> list[Any]:
        return [value for get, own in self._get for value in get(own)]


def _may_change(name: str) -> bool:
    return name not in _OF_MODULES and not name.startswith("__")


def without_memory(like: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without memory; one of fewer entries in dim 0 than `like` has its other strides."""
    empty: Tensor = torch.empty_strided(shape, like.stride(), dtype=dtype, device=device)
    empty.untyped_storage().resize_(0)
    return nn.Parameter(empty, requires_grad=like.requires_grad)


def _stand_in(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return without_memory(parameter, parameter.shape, dtype, device)
