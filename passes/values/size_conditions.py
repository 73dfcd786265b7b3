"""What a graph decided by numbers of tokens, checked for each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from .sizes import first_wrong


class SizeConditions:
    """Conditions on token counts under which a graph is right for the whole row.

    They hold for all of the ranks' tokens together. A row that does not divide has fewer: ranks are filled up.

    Args:
        conditions: expression -> the line it is from.
        tokens: symbols of a shard's token count.
        places: other symbols -> (place among the graph's inputs, dim; None: the input itself is the number).
        exact: conditions on the shard's own count, for rows of all lengths that it may be a shard of.
    """

    def __init__(
        self,
        conditions: Mapping[Any, str],
        tokens: set[Any],
        places: Mapping[Any, tuple[int, int | None]],
        exact: Sequence[Any] = (),
    ) -> None:
        self.conditions, self.exact = conditions, exact
        self.tokens = tokens
        self.others = [(symbol, *place) for symbol, place in places.items() if symbol not in tokens]
        self._wrong = lru_cache(maxsize=64)(self._find_wrong)

    def check(self, args: Sequence[Any], total: int) -> None:
        """Raise where a row of `total` tokens would have been computed otherwise."""
        found = self._wrong(total, *(args[at] if dim is None else args[at].shape[dim] for _, at, dim in self.others))
        if found is not None:
            raise ValueError(
                f"`{self.conditions[found]}` decides by the number of tokens, and otherwise for this row of {total} "
                f"than for the rows that its ranks hold, filled up ({found}): pad rows to a multiple of the ranks"
            )

    def _find_wrong(self, total: int, *values: int) -> Any:
        known = {symbol: value for (symbol, *_), value in zip(self.others, values, strict=True)}
        sizes = known | dict.fromkeys(self.tokens, total)
        return first_wrong(self.conditions, sizes)
