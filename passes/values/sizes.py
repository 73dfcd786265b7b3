"""Sizes of a graph: what is made from its number of tokens, where its symbols stand, and what was decided by sizes when
it was compiled, checked for each batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch.fx as fx
from torch import SymInt, Tensor

from cp_rewrite.planning.row_map import TokenCount
from cp_rewrite.torch_internals import expression, fake_mode_of, take_guards


def token_count(size: Any, tokens: Any) -> TokenCount | None:
    """A number of a graph, or an expression, as one made from that of its tokens; None: it is made otherwise."""
    if not isinstance(size, int | SymInt | sympy.Expr):
        return None
    expr, symbol = sympy.expand(expression(size)), expression(tokens)
    times = expr.coeff(symbol, 1)
    plus = sympy.expand(expr - times * symbol)
    return TokenCount(int(plus), int(times)) if times.is_Integer and plus.is_Integer else None


def size_places(inputs: Iterable[fx.Node]) -> dict[Any, tuple[int, int | None]]:
    """Symbols of a graph's sizes -> where each is read off its inputs, the first that has it: (place, dim); dim None:
    the input itself is the number."""
    places: dict[Any, tuple[int, int | None]] = {}
    for place, node in enumerate(inputs):
        value = node.meta["example_value"]
        sizes = list(enumerate(value.shape)) if isinstance(value, Tensor) else [(None, value)]
        for dim, size in sizes:
            if isinstance(size, SymInt) and expression(size).is_Symbol:
                places.setdefault(expression(size), (place, dim))
    return places


class _Conditions:
    """Conditions on sizes. places: symbols -> (place among a call's arguments, dim; None: the argument itself is the
    number)."""

    def __init__(self, conditions: Collection[Any], places: Mapping[Any, tuple[int, int | None]]) -> None:
        self._conditions, self._places = conditions, places
        self._first_wrong = lru_cache(maxsize=64)(self._find_wrong)

    def sizes_of(self, args: Sequence[Any]) -> dict[Any, int]:
        """Symbols -> what they are in a call."""
        return {symbol: args[at] if dim is None else args[at].shape[dim] for symbol, (at, dim) in self._places.items()}

    def first_wrong(self, sizes: Mapping[Any, int]) -> Any:
        """The first condition that does not hold for these sizes; None: all do."""
        return self._first_wrong(*sizes.items())

    def _find_wrong(self, *sizes: tuple[Any, int]) -> Any:
        return next((c for c in self._conditions if c.subs(dict(sizes)) != True), None)  # noqa: E712


class SizeConditions(_Conditions):
    """Conditions on token counts under which a graph is right for the whole row.

    They hold for all of the ranks' tokens together. A row that does not divide has fewer: ranks are filled up.

    Args:
        conditions: expression -> the line it is from.
        tokens: symbols of a shard's token count.
        places: of all symbols, as `size_places` gives them.
    """

    def __init__(
        self,
        conditions: Mapping[Any, str],
        tokens: set[Any],
        places: Mapping[Any, tuple[int, int | None]],
    ) -> None:
        super().__init__(conditions, {symbol: place for symbol, place in places.items() if symbol not in tokens})
        self.conditions, self.tokens = conditions, tokens

    def check(self, args: Sequence[Any], total: int) -> None:
        """Raise where a row of `total` tokens would have been computed otherwise."""
        found = self.first_wrong(self.sizes_of(args) | dict.fromkeys(self.tokens, total))
        if found is not None:
            raise ValueError(
                f"`{self.conditions[found]}` decides by the number of tokens, and otherwise for this row of {total} "
                f"than for the rows that its ranks hold, filled up ({found}): pad rows to a multiple of the ranks"
            )


class PlanConditions(_Conditions):
    """Conditions under which a compiled graph is right. Dynamo checks those on its arguments; it knows no plan.

    Where Triton kernels run on the rows that came, Inductor asks for sizes that 32-bit indices can count.
    """

    def __init__(self, inputs: Sequence[fx.Node], plan: Sequence[fx.Node]) -> None:
        """Takes the conditions on the plan's sizes out of the guards, after the graph was compiled.

        Args:
            inputs: of the graph. plan: those of them that stand for the plan's tensors, which come behind the others.
        """
        places = size_places([*inputs, *plan])
        own = places.keys() - size_places(inputs).keys()
        mode = fake_mode_of(plan)
        self.conditions = [] if mode is None or not own else take_guards(mode.shape_env, own)
        super().__init__(self.conditions, places)

    def check(self, args: Sequence[Any]) -> None:
        """Raise where the graph was compiled for other sizes. args: of the graph, the plan's tensors last."""
        if not self.conditions:
            return
        sizes = self.sizes_of(args)
        wrong = self.first_wrong(sizes)
        if wrong is not None:
            known = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
            raise ValueError(
                f"this batch needs another graph than the one that was compiled, which holds where {wrong} ({known}): "
                'call torch.compiler.reset(), which compiles anew, or give Sharding(exchange_at="attention")'
            )
