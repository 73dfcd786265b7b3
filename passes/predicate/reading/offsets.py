"""Recognise how masks read the offsets at which documents start (`CuSeqlens`).

cu_seqlens                             0 3 5 6       documents of 3, 2 and 1 tokens
q                                      0 1 2 3 4 5
SumOver(cu_seqlens(i) <= q)            1 1 1 2 2 3   counts the offsets up to the token: `counted`
RepeatIndex(cu_seqlens(i + 1) - …(i))  0 0 0 1 1 2   repeats each document's number: `are_lengths`
cu_seqlens(that number)                0 0 0 3 3 5   is where the token's document starts: `document_bound`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from cp_rewrite.packing import CuSeqlens, Packing
from cp_rewrite.passes.predicate.context import Leaf
from cp_rewrite.passes.predicate.symbolic import Expr, RepeatIndex, Select, SumOver
from cp_rewrite.passes.predicate.terms import Pair, maximal_terms
from cp_rewrite.passes.predicate.worlds import LK, LQ, WK, WQ, K, Linear, Q


@dataclass(frozen=True)
class Count:
    """A count of offsets up to a token, or (`at_token`) at it.

    Args:
        first, last: which offsets are counted. size: how many there are.
        side: Q or K, the token.
    """

    first: Expr
    last: Expr
    size: Expr
    side: Expr
    at_token: bool

    @property
    def counts_starts(self) -> bool:
        """Whether all documents' starts are counted: all offsets from `first` on, the last of all perhaps not."""
        return sympy.expand(self.last - self.size + 2).is_negative is False


@dataclass(frozen=True)
class Offsets:
    """The offsets that `packing` names, among the leaves that a mask reads."""

    packing: Packing
    leaves: Mapping[Any, Leaf]
    pair: Pair

    def leaf(self, term: Any) -> Leaf | None:
        """The leaf, if `term` reads the offsets; None for other terms."""
        packing = self.packing
        leaf = self.leaves.get(term.func)
        if not isinstance(packing, CuSeqlens) or leaf is None or len(term.args) != 1:
            return None
        return leaf if leaf.name == (packing.padded_arg or packing.arg) else None

    def are_lengths(self, term: Any) -> bool:
        """Whether a RepeatIndex repeats each document's number as often as it has tokens."""
        lengths, i, count = term.args[:3]
        reads = [t for t in maximal_terms(lengths) if isinstance(t, AppliedUndef)]
        leaves = [self.leaf(t) for t in reads]
        if len(reads) != 2 or any(leaf is None for leaf in leaves) or leaves[0] is not leaves[1]:
            return False
        read = reads[0].func
        assert leaves[0] is not None
        return sympy.expand(lengths - read(i + 1) + read(i)) == 0 and leaves[0].shape[0] - count == 1

    def counted(self, term: Any) -> Count | None:
        """The offsets that a SumOver counts; None: it counts none, or not by the query's or the key's token."""
        inner, i, count = term.args
        if not (isinstance(inner, Select) and isinstance(inner.args[0], Relational) and inner.args[1:] == (1, 0)):
            return None
        found = self._bound(inner.args[0])
        if found is None or found[0] == "StrictGreaterThan":
            return None
        op, place, side, size = found
        first = sympy.expand(place - i)
        if not first.is_Integer or first.is_negative:
            return None
        return Count(first, first + count - 1, size, side, op == "Equality")

    def _bound(self, relation: Any) -> tuple[str, Expr, Expr, Expr] | None:
        """(op, place, side, size) of a relation `offsets[place] op token at Q or K`, of `size` offsets."""
        reads = [t for t in maximal_terms(relation.lhs) if isinstance(t, AppliedUndef)]
        leaf = self.leaf(reads[0]) if len(reads) == 1 else None
        if leaf is None:
            return None
        slope = relation.lhs.coeff(reads[0])
        rest = sympy.expand(-(relation.lhs - slope * reads[0]) / slope) if slope in (1, -1) else sympy.nan
        op = type(relation).__name__ if slope == 1 else type(relation.reversed).__name__
        # Of integers, offset < x is offset <= x - 1, and offset >= x is offset > x - 1.
        moved = {"StrictLessThan": "LessThan", "GreaterThan": "StrictGreaterThan"}
        if op in moved:
            op, rest = moved[op], sympy.expand(rest - 1)
        side = self.pair.side(rest) if op in ("LessThan", "StrictGreaterThan", "Equality") else None
        return None if side is None else (op, reads[0].args[0], side[0], leaf.shape[0])

    def holds_both(self, term: Any) -> bool:
        """Whether a SumOver counts the documents that hold query and key:
        offsets[i] <= q < offsets[i + 1] and the same of k."""
        inner, i, count = term.args
        if not (isinstance(inner, Select) and isinstance(inner.args[0], sympy.And) and inner.args[1:] == (1, 0)):
            return False
        bounds = [self._bound(relation) for relation in inner.args[0].args if isinstance(relation, Relational)]
        known = [bound for bound in bounds if bound is not None]
        asked = {(op, place, side) for op, place in (("LessThan", i), ("StrictGreaterThan", i + 1)) for side in (Q, K)}
        whole = len(known) == len(inner.args[0].args) and {bound[:3] for bound in known} == asked
        return whole and not self._padded and all(sympy.expand(size - count - 1) == 0 for *_, size in known)

    def document_bound(self, term: Any) -> Linear | None:
        """offsets[number of the token's document], as the token's index less its place in the document, or the offset
        behind it, as the index and the tokens from there to the end; None for other reads."""
        if self.leaf(term) is None:
            return None
        for number in maximal_terms(term.args[0]):
            index = sympy.expand(term.args[0] - number)
            side, start = None, sympy.S.Zero
            if isinstance(number, RepeatIndex) and self.are_lengths(number):
                side = self.pair.side(number.args[3])
            found = self.counted(number) if isinstance(number, SumOver) else None
            # All starts must be counted, the one at offset 0 aside.
            if found is not None and not found.at_token and found.first in (0, 1) and found.counts_starts:
                side, start = (found.side,), found.first - 1
            if side is not None and index == start:
                return {side[0]: sympy.S.One, WQ if side[0] == Q else WK: -sympy.S.One}
            if side is not None and index == start + 1 and not self._padded:
                return {side[0]: sympy.S.One, LQ if side[0] == Q else LK: sympy.S.One}
        return None

    def merges_padding(self, term: Any) -> bool:
        """Whether a document's bound is that of the padding behind it too: the last offset ends no document there."""
        counts = [self.counted(number) for number in maximal_terms(term.args[0]) if isinstance(number, SumOver)]
        return self._padded or any(found is None or sympy.expand(found.last - found.size) != -1 for found in counts)

    @property
    def _padded(self) -> bool:
        """Whether documents end before the next offset."""
        return isinstance(self.packing, CuSeqlens) and self.packing.padded_arg is not None
