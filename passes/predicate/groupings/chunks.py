"""Chunks: runs of so many tokens, counted from the row's start or from each document's.

floor(q / 4)    CQ, the number of the query's chunk of 4 tokens
q % 4           Q - 4 CQ, its place there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy

from cp_rewrite.packing import PositionIds
from cp_rewrite.passes.predicate.cells import CellValues
from cp_rewrite.passes.predicate.symbolic import ONE, Expr
from cp_rewrite.passes.predicate.worlds import (
    EVERYTHING,
    FROM_0,
    PK,
    PQ,
    WK,
    WQ,
    Cell,
    D,
    K,
    Linear,
    Q,
    Span,
    World,
)

from .grouping import Form, Grouping, Kept, Relation

CQ, CK = sympy.symbols("CQ CK", integer=True)
"""The number of the query's and of the key's chunk."""
_CHUNKS, _RQ, _RK = sympy.symbols("chunks RQ RK", integer=True)
"""CQ - CK; the token's place in its chunk."""
_KEY_OF = {Q: K, K: K, PQ: PK, PK: PK, WQ: WK, WK: WK}


@dataclass(frozen=True)
class ChunkRelation(Relation):
    """together: one chunk holds both; None: chunks of two documents, which have nothing to do with each other."""

    chunks: Chunks
    together: bool | None

    def __str__(self) -> str:
        return {None: "", True: ", of its chunk,", False: ", of other chunks,"}[self.together]

    def regrouped(self, cell: Cell, reduced: Linear) -> Linear:
        """A form that reads numbers of chunks, by chunks alone. With chunks of 4 tokens:

        4 CQ - K    ->  4 chunks - RK
        D           ->  4 chunks + RQ - RK
        """
        if not {CQ, CK} & set(reduced):
            return reduced
        size = sympy.Integer(self.chunks.size)
        parts: dict[Expr, Linear] = {CQ: {CK: ONE, _CHUNKS: ONE}}
        parts[self.chunks.by] = {CK: size, _RK: ONE}
        if self.chunks.of_row or cell.same:
            parts[D] = {_CHUNKS: size, _RQ: ONE, _RK: -ONE}
        out: Linear = {}
        for term, c in reduced.items():
            for part, factor in parts.get(term, {term: ONE}).items():
                out[part] = out.get(part, sympy.S.Zero) + c * factor
        return {term: c for term, c in out.items() if c != 0}

    def bounds(self, cell: Cell) -> dict[Expr, Span]:
        inside: Span = (0, self.chunks.size - 1)
        low, high = cell.span
        apart = (1.0, float("inf")) if low > 0 else (float("-inf"), -1.0) if high < 0 else EVERYTHING
        later = EVERYTHING if self.together is None else (0.0, 0.0) if self.together else apart
        return {CQ: FROM_0, CK: FROM_0, _RQ: inside, _RK: inside, _CHUNKS: later}

    def alike(self, cell: Cell, form: Form) -> Relation:
        return self if form.fields.get("chunk") else ChunkRelation(self.chunks, cell.span == (0, 0))


@dataclass(frozen=True)
class Chunks(Grouping):
    """Runs of `size` tokens, counted by the key's symbol `by`: from the row's start (K) or from each document's."""

    size: int
    by: sympy.Symbol
    relation = ChunkRelation

    @property
    def of_row(self) -> bool:
        return self.by == K

    @classmethod
    def of_term(cls, reader: CellValues, term: Any) -> Linear | None:
        """The chunk of the query or the key, x // size, or its place there, x % size, of its index or position x."""
        x, size = cast(Any, term.args if isinstance(term, sympy.Mod) else term.args[0].as_numer_denom())
        linear = reader.linear(x) if size.is_Integer and size > 0 else {}
        if list(linear.values()) != [1] or not set(linear) <= set(_KEY_OF):
            return None
        (token,) = linear
        if token in (WQ, WK) and isinstance(reader.sharding.packing, PositionIds):
            return None  # chunks of documents are counted from where these begin, which may be before the row
        chunks = cls(int(size), _KEY_OF[token])
        if reader.groupings.setdefault(cls, chunks) != chunks:
            return None
        number = CQ if token in (Q, PQ, WQ) else CK
        return {number: ONE} if isinstance(term, sympy.floor) else {token: ONE, number: -size}

    @property
    def distances(self) -> set[int]:
        return {self.size, -self.size}

    def relations(self, cell: Cell) -> Sequence[Relation | None]:
        if cell.world not in (World.SAME, World.DIFFERENT):
            return (None,)
        if not cell.same and not self.of_row:
            return (ChunkRelation(self, None),)
        low, high = cell.span
        near = low < self.size and high > -self.size
        return [ChunkRelation(self, True)] * near + [ChunkRelation(self, False)] * (cell.span != (0, 0))

    def fields(self, kept: Kept, plain: Kept) -> dict[str, Any]:
        """The chunks of a mask that drops the keys of other ones."""
        found = [(cell, cell.of(ChunkRelation)) for cell in kept if cell.same]
        others = [cell for cell, relation in found if relation is not None and relation.together is False]
        if not others or any(kept[cell] for cell in others):
            return {}
        return {"chunk": self.size, "chunk_of": "row" if self.of_row else "document"}
