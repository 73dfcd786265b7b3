"""A new grouping tells the passes the bounds of its terms, and how its relations split cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from cp_rewrite.passes.predicate.cells import holds
from cp_rewrite.passes.predicate.groupings.grouping import Grouping, Relation
from cp_rewrite.passes.predicate.groupings.table import cells
from cp_rewrite.passes.predicate.symbolic import ONE, Expr
from cp_rewrite.passes.predicate.worlds import PQ, Cell, Linear, Span, World


@dataclass(frozen=True)
class FirstRelation(Relation):
    """The query is among the first `tokens` of its document; with `query` False it is not."""

    tokens: int
    query: bool

    def bounds(self, cell: Cell) -> dict[Expr, Span]:
        return {PQ: (float("-inf"), self.tokens - 1.0) if self.query else (float(self.tokens), float("inf"))}


@dataclass(frozen=True)
class First(Grouping):
    """The first tokens of each document: `position < tokens`."""

    tokens: int
    relation = FirstRelation

    def relations(self, cell: Cell) -> Sequence[Relation | None]:
        return [FirstRelation(self.tokens, query) for query in (True, False)]


BELOW_4: Linear = {PQ: ONE, ONE: sympy.Integer(-4)}
FROM_0: Linear = {PQ: ONE}


def test_a_relation_narrows_what_a_cell_bounds_by_itself() -> None:
    first, later = (Cell(World.SAME, (1, 2), (FirstRelation(4, query),)) for query in (True, False))
    assert [holds("StrictLessThan", BELOW_4, cell, ()) for cell in (first, later)] == [True, False]
    assert holds("StrictLessThan", BELOW_4, Cell(World.SAME, (1, 2)), ()) is None
    assert holds("StrictGreaterThan", FROM_0, first, ()) is True  # the query is behind the key: as of any cell


def test_cells_are_split_by_what_groupings_say() -> None:
    split = cells(World.SAME, [(1, 1)], [First(4)])
    assert [cell.relations for cell in split] == [(FirstRelation(4, True),), (FirstRelation(4, False),)]
