"""Terms that number documents, or say where one starts: counts, running sums and maxima, repeated indices."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import sympy

from cp_rewrite.packing import CuSeqlens, DocumentIds, EndOfDocument, StartOfDocument, Tree
from cp_rewrite.passes.predicate.groupings.table import GROUPINGS
from cp_rewrite.passes.predicate.symbolic import (
    ONE,
    Expr,
    RepeatIndex,
    RunningMax,
    RunningSum,
    SumOver,
    outer_select,
)
from cp_rewrite.passes.predicate.terms import Pair, Trouble
from cp_rewrite.passes.predicate.worlds import BOTH, STARTS, WK, WQ, Cell, Linear, Ordinal, Q, World
from cp_rewrite.refusal import Reason

from .cell_values import CellValues
from .offsets import Offsets

_TOKEN = sympy.Symbol("token", integer=True, nonnegative=True)


class Numberings(CellValues):
    """Reads them."""

    @cached_property
    def _offsets(self) -> Offsets:
        return Offsets(self.sharding.packing, self.leaves, self.pair)

    def _ordinal(self, key: Expr, side: Expr, with_padding: bool, of: type[Any] | None = None) -> Linear:
        """A numbering's value at the query or the key. `key`: the term, its token replaced by `_TOKEN`."""
        if key not in self.ordinals:
            n = len(self.ordinals)
            names = sympy.symbols(f"G{n}q G{n}k", integer=True)
            self.ordinals[key] = Ordinal(names[0], names[1], with_padding, of)
        ordinal = self.ordinals[key]
        return {ordinal.query if side == Q else ordinal.key: sympy.S.One}

    def _generator(self, term: Any) -> Linear | None:
        """A generator that numbers documents, or that is one number for the whole row; None for any other."""
        if isinstance(term, RunningSum):
            return self._running_sum(term)
        if isinstance(term, RunningMax):
            return self._running_max(term)
        if isinstance(term, SumOver):
            return {BOTH: ONE} if self._offsets.holds_both(term) else self._count_of_offsets(term)
        side = self.pair.side(term.args[3]) if isinstance(term, RepeatIndex) else None
        if side is None or not self._offsets.are_lengths(term):
            return None
        return self._ordinal(term.func(*term.args[:3], _TOKEN), side[0], with_padding=self._padded)

    def _running_sum(self, term: Any) -> Linear | None:
        """A running sum numbers documents where it adds 0 at every token but their first ones, and there 1 or more.

        position_ids                   0 1 2 0 1 0
        RunningSum(position_ids == 0)  1 1 1 2 2 3
        """
        inner, j, at = cast(tuple[Any, Any, Any], term.args)
        side = self.pair.side(at)
        # What is added is read as a mask is: of token j and the one before it.
        sub = self.beside(Pair(j, j - 1, self.pair.batch))
        worlds = (World.SAME, World.ADJACENT, World.IN_PADDING)
        inside, first, padding = (sub.numbers(inner, self._side_by_side(world)) for world in worlds)
        key = RunningSum(inner, j, _TOKEN)
        numbered = next((each for each in GROUPINGS if side and each.is_numbered(self, inner, j)), None)
        if side is not None and numbered is not None:
            return self._ordinal(key, side[0], with_padding=False, of=numbered.relation)
        if side is None or inside != frozenset({0.0}) or first is None:
            return None
        if first == frozenset({0.0}):  # one number for the whole row
            return {key: sympy.S.One}
        if not all(1 <= v < float("inf") for v in first):
            return None
        if isinstance(self.sharding.packing, DocumentIds | Tree) and not (padding and min(padding) >= 0):
            return None  # it might fall inside padding, back to an earlier document's number
        return self._ordinal(key, side[0], with_padding=sub.skips_end or self._padded)

    def _side_by_side(self, world: World) -> Cell:
        """The cell of a token and the one before it, of whose groups nothing is known."""
        given = (grouping.given(self) for grouping in GROUPINGS)
        unknown = (each.unknown for each in given if each is not None)
        return Cell(world, (1, 1), tuple(each for each in unknown if each is not None))

    def _running_max(self, term: Any) -> Linear | None:
        """A running maximum of the index at documents' first tokens, 0 elsewhere, is where the document starts."""
        inner, j, at = cast(tuple[Any, Any, Any], term.args)
        side, choice = self.pair.side(at), outer_select(inner)
        if side is None or choice is None:
            return None
        condition: Any = choice.args[0]
        values = [sympy.expand(inner.xreplace({choice: value})) for value in choice.args[1:]]
        if values not in ([j, 0], [0, j]):
            return None
        sub = self.beside(Pair(j, j - 1, self.pair.batch))
        at_start = [sub.truths(condition, self._side_by_side(world)) for world in (World.ADJACENT, World.SAME)]
        if at_start != [frozenset({values[0] == j}), frozenset({values[0] != j})]:
            return None
        return {side[0]: ONE, WQ if side[0] == Q else WK: -ONE}

    @property
    def _padded(self) -> bool:
        return isinstance(self.sharding.packing, CuSeqlens) and self.sharding.packing.padded_arg is not None

    def _count_of_offsets(self, term: Any) -> Linear | None:
        """How many offsets are <= the token's index (an Ordinal), or are that index (STARTS)."""
        found = self._offsets.counted(term)
        if found is None:
            return None
        # Offset 0 counts for every token, and the last one only tells the last document from what follows it.
        if found.first > 1 or not found.counts_starts:
            return None
        without_end = sympy.expand(found.last - found.size + 1) != 0
        if found.at_token:
            self.skips_end |= without_end
            return {STARTS: sympy.S.One} if found.side == Q else None
        key = term.xreplace({self.pair.at(found.side): _TOKEN})
        return self._ordinal(key, found.side, with_padding=self._padded or without_end)

    def _generator_trouble(self, term: Any) -> Trouble:
        """Why a generator numbers no documents: what it adds up can't be read, or is something else."""
        inner: Any = term.args[0]
        bound: Any = term.args[1]
        pair = Pair(bound, bound - 1, self.pair.batch, self.pair.others)
        sub = self.beside(pair)
        troubles = sub.blame(inner)
        for trouble in troubles:
            # What a count reads at the query is no wrong place: only its own tokens were looked at.
            if trouble.reason is not Reason.MASK_NOT_PACKED and (
                trouble.reason is not Reason.MASK_WRONG_DIM or not isinstance(term, SumOver)
            ):
                return trouble
        what = {RunningSum: "a running sum", RunningMax: "a running maximum", SumOver: "a count (sum, any or all)"}
        name = what.get(term.func, "a repeated index")
        detail = f"{name} over tokens does not number the documents of {self.sharding.packing}"
        if len(str(inner)) < 60:
            detail += f": it adds up `{inner}`"
        if isinstance(self.sharding.packing, EndOfDocument | StartOfDocument):
            detail += "; EndOfDocument's token is a document's last one, StartOfDocument's its first"
        return Trouble(Reason.MASK_NOT_PACKED, detail)
