"""Recognise how masks read the offsets at which documents start (`CuSeqlens`).

cu_seqlens                             0 3 5 6       documents of 3, 2 and 1 tokens
q                                      0 1 2 3 4 5
SumOver(cu_seqlens(i) <= q)            1 1 1 2 2 3   counts the offsets up to the token: `counted`
RepeatIndex(cu_seqlens(i + 1) - …(i))  0 0 0 1 1 2   repeats each document's number: `are_lengths`
cu_seqlens(that number)                0 0 0 3 3 5   is where the token's document starts: `document_start`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from cp_rewrite.packing import CuSeqlens, Packing

from .context import Leaf
from .symbolic import Expr, RepeatIndex, Select, SumOver
from .terms import Pair, maximal_terms
from .worlds import PK, PQ, Linear, Q


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
        """What a SumOver counts; None for one that counts no offsets, or not by the query's or the key's token."""
        inner, i, count = term.args
        if not (isinstance(inner, Select) and isinstance(inner.args[0], Relational) and inner.args[1:] == (1, 0)):
            return None
        relation: Any = inner.args[0]
        reads = [t for t in maximal_terms(relation.lhs) if isinstance(t, AppliedUndef)]
        leaf = self.leaf(reads[0]) if len(reads) == 1 else None
        if leaf is None:
            return None
        slope = relation.lhs.coeff(reads[0])
        rest = sympy.expand(-(relation.lhs - slope * reads[0]) / slope) if slope in (1, -1) else sympy.nan
        op = type(relation).__name__ if slope == 1 else type(relation.reversed).__name__
        # offset < x is offset <= x - 1 for integers.
        token = {"LessThan": rest, "StrictLessThan": sympy.expand(rest - 1), "Equality": rest}.get(op)
        side = self.pair.side(token) if token is not None else None
        first = sympy.expand(reads[0].args[0] - i)
        if side is None or not first.is_Integer or first.is_negative:
            return None
        return Count(first, first + count - 1, leaf.shape[0], side[0], op == "Equality")

    def document_start(self, term: Any) -> Linear | None:
        """offsets[number of the token's document], as the token's index minus its position; None for other reads."""
        if self.leaf(term) is None:
            return None
        for number in maximal_terms(term.args[0]):
            index = sympy.expand(term.args[0] - number)
            if isinstance(number, RepeatIndex) and index == 0 and self.are_lengths(number):
                side = self.pair.side(number.args[3])
                return {side[0]: sympy.S.One, side[1]: -sympy.S.One} if side else None
            found = self.counted(number) if isinstance(number, SumOver) else None
            if found is not None and not found.at_token and found.first in (0, 1) and index == found.first - 1:
                return {found.side: sympy.S.One, PQ if found.side == Q else PK: -sympy.S.One}
        return None
