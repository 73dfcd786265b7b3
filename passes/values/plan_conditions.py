"""What the inner compiler decided by sizes of the plan, checked for each batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch.fx as fx

from cp_rewrite.torch_internals import fake_mode_of, take_guards

from .sizes import first_wrong, size_places


class PlanConditions:
    """Conditions under which a compiled graph is right. Dynamo checks those on its arguments; it knows no plan.

    Where Triton kernels run on the rows that came, Inductor asks for sizes that 32-bit indices can count.
    """

    def __init__(self, inputs: Sequence[fx.Node], plan: Sequence[fx.Node]) -> None:
        """Takes the conditions on the plan's sizes out of the guards, after the graph was compiled.

        Args:
            inputs: of the graph. plan: those of them that stand for the plan's tensors, which come behind the others.
        """
        self.places = size_places([*inputs, *plan])
        own = self.places.keys() - size_places(inputs).keys()
        mode = fake_mode_of(plan)
        self.conditions = [] if mode is None or not own else take_guards(mode.shape_env, own)
        self._wrong = lru_cache(maxsize=64)(self._find_wrong)

    def check(self, args: Sequence[Any]) -> None:
        """Raise where the graph was compiled for other sizes. args: of the graph, the plan's tensors last."""
        if not self.conditions:
            return
        sizes = (*(args[at] if dim is None else args[at].shape[dim] for at, dim in self.places.values()),)
        wrong = self._wrong(*sizes)
        if wrong is not None:
            known = ", ".join(f"{symbol} = {size}" for symbol, size in zip(self.places, sizes, strict=True))
            raise ValueError(
                f"this batch needs another graph than the one that was compiled, which holds where {wrong} ({known}): "
                'call torch.compiler.reset(), which compiles anew, or give Sharding(exchange_at="attention")'
            )

    def _find_wrong(self, *values: int) -> Any:
        sizes = dict(zip(self.places, values, strict=True))
        return first_wrong(self.conditions, sizes)
