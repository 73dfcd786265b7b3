"""What ranks do between calls of a model whose weights FSDP shards: its collectives meet in no graph, and what a rank
leaves out shows in no other rank's weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_rewrite.batch.active.current import in_batch
from cp_rewrite.batch.ranks import history
from cp_rewrite.batch.steps import later
from cp_rewrite.sharding import Sharding

_AT_ONCE = 8
"""Weights that are looked at."""


def watch_steps(model: nn.Module, sharding: Sharding) -> None:
    """Before each call in a batch, ahead of FSDP's own: note that it begins, and have compared whether weights were
    changed since the call before, and how often gradients were. No value is read."""
    steps = _Steps(model)

    def begin(*_: Any) -> None:
        if in_batch():
            history.note_start(sharding.group_name)
            if later.watched(sharding) and torch.is_grad_enabled():
                later.add(sharding, _check_steps, "", torch.tensor(steps.look(), dtype=torch.float64))

    model.register_forward_pre_hook(begin, prepend=True)


class _Steps:
    """The state that a sharded model's weights were in."""

    def __init__(self, model: nn.Module) -> None:
        places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
        trained = [(own, name) for own, name in places if (p := own[name]) is not None and p.requires_grad]
        self._places = trained[:: math.ceil(len(trained) / _AT_ONCE) or 1]
        self._before: list[tuple[int, int]] | None = None

    def look(self) -> tuple[float, float, float]:
        """(whether weights were changed, how many have gradients, how often these were written)."""
        # Those of the root are whole between a forward and its backward.
        found: list[Any] = [own[name] for own, name in self._places if isinstance(own[name], DTensor)]
        now = [(id(p), p._version) for p in found]
        grads = [p.grad for p in found if isinstance(p.grad, Tensor)]
        changed = self._before is not None and now != self._before
        self._before = now
        return float(changed), float(len(grads)), float(sum(grad._version for grad in grads))


def _check_steps(_: str, ranks: list[list[float]]) -> None:
    stepped = [changed for changed, *_ in ranks]
    if len(set(stepped)) > 1:
        skipped = [rank for rank, changed in enumerate(stepped) if not changed]
        raise RuntimeError(
            f"cp_rewrite: ranks {skipped} of the group did not change their shards of the weights before a call of "
            "which others did: optimizer.step() is for all ranks or for none: skip a step by what is equal on all"
        )
    if len({(count, written) for _, count, written in ranks}) > 1:
        raise RuntimeError(
            "cp_rewrite: gradients that ranks had before a call are not of the same steps (how many, and how often "
            f"each was written: {', '.join(f'{count:.0f} and {written:.0f}' for _, count, written in ranks)}): zero "
            "gradients, clip and scale them on all ranks or on none"
        )
