"""What can't be done to a model once it is parallelized: each raises, and says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_KNOWN = ("torch.distributed.", "transformers.utils.output_capturing")
"""Whose hooks may come later: they do nothing inside of a graph, or are traced anew."""


class Unchanged:
    """Of a model that something else is traced for, or that is wrapped: its modules and their hooks at that time."""

    def __init__(self, model: nn.Module, hooks: bool) -> None:
        """`hooks`: those of modules inside must not change either."""
        self.model, self.hooks = model, hooks
        self.modules, self.first = dict(model.named_modules()), RemovableHandle.next_id

    def check(self) -> None:
        """Raise a RuntimeError where a module was replaced or added, or got a hook."""
        found = dict(self.model.named_modules())
        changed = [name for name in {**self.modules, **found} if self.modules.get(name) is not found.get(name)]
        if changed:
            raise RuntimeError(
                f"{changed[0]} was put in or taken out after parallelize, which knows the modules of before: change "
                "the model (adapters, heads, checkpointing) first, then parallelize it"
            )
        for name, module in found.items() if self.hooks else ():
            if name and any(self._is_late(hooks) for kind in _HOOKS if (hooks := getattr(module, kind))):
                raise RuntimeError(
                    f"{name} got a hook after parallelize, which would see what a part of the graph reads, or nothing: "
                    "put hooks on modules first, where they are traced, then parallelize the model"
                )

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
