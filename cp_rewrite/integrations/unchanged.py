"""What can't be done to a model once it is parallelized: each raises, and says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_KNOWN = ("torch.distributed.", "transformers.utils.output_capturing")
"""Whose hooks may come later: they do nothing inside of a graph, or are traced anew."""


class Unchanged:
    """Of a model that something else is traced for, or that is wrapped: its modules, its weights' names and hooks then.

    Looked at in every call: lists that are made without a step of Python for each module, 0.2 ms for 1,600 modules.
    """

    def __init__(self, model: nn.Module, hooks: bool) -> None:
        """`hooks`: those of modules inside must not change either."""
        self.model, self.modules, self.first = model, dict(model.named_modules()), RemovableHandle.next_id
        modules = self.modules.values()
        self._made_of = [*(module._modules.values() for module in modules), *(m._parameters.keys() for m in modules)]
        self._weights = {name: [*module._parameters] for name, module in self.modules.items()}
        self._before = [*chain.from_iterable(self._made_of)]
        self._hooks = [getattr(m, kind) for name, m in self.modules.items() if name and hooks for kind in _HOOKS]

    def check(self) -> None:
        """Raise a RuntimeError where a module or a weight was replaced or added, or a module got a hook."""
        if [*chain.from_iterable(self._made_of)] != self._before:
            raise RuntimeError(
                f"{self._changed()} was put in or taken out after parallelize, which knows the modules and weights of "
                "before: change the model (adapters, heads, checkpointing) first, then parallelize it"
            )
        late = next((hooks for hooks in self._hooks if hooks and self._is_late(hooks)), None)
        if late is not None:
            owners = (name for name, m in self.modules.items() if any(getattr(m, kind) is late for kind in _HOOKS))
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
            "a model can't be copied after parallelize: copy the plain model before, or take the weights, "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model)"
        )

    model.__deepcopy__ = refuse


def refuse_whole_weights(model: nn.Module) -> None:
    """Of a model whose weights are sharded: `load_state_dict` of whole ones would fail on each by itself, or with
    `assign=True` put whole weights in their place."""

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
