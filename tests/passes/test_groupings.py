"""What a grouping of its own may say of a mask: its terms' bounds, and what its relations tell it by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import sympy

import cp_rewrite as cp
from cp_rewrite.passes.predicate.bounds import holds
from cp_rewrite.passes.predicate.groupings import table
from cp_rewrite.passes.predicate.groupings.grouping import Grouping, Relation
from cp_rewrite.passes.predicate.reading.cell_values import CellValues
from cp_rewrite.passes.predicate.symbolic import ONE, Expr
from cp_rewrite.passes.predicate.terms import Pair
from cp_rewrite.passes.predicate.worlds import PQ, Cell, Linear, Span, World


@dataclass(frozen=True)
class FirstRelation(Relation):
    """Whether the query is among the first tokens of its document."""

    tokens: int
    query: bool

    def bounds(self, cell: Cell) -> dict[Expr, Span]:
        return {PQ: (float("-inf"), self.tokens - 1.0) if self.query else (float(self.tokens), float("inf"))}


@dataclass(frozen=True)
class First(Grouping):
    """The first tokens of each document: `position < tokens`."""

    tokens: int
    relation = FirstRelation

    @classmethod
    def of_relation(cls, reader: CellValues, op: str, linear: Linear) -> None:
        if op == "StrictLessThan" and set(linear) == {PQ, ONE}:
            reader.groupings[cls] = cls(int(-linear[ONE]))

    def relations(self, cell: Cell) -> Sequence[Relation | None]:
        return [FirstRelation(self.tokens, query) for query in (True, False)]


BELOW_4: Linear = {PQ: ONE, ONE: sympy.Integer(-4)}
FROM_0: Linear = {PQ: ONE}


def test_a_relation_narrows_what_a_cell_bounds_by_itself() -> None:
    first, later = (Cell(World.SAME, (1, 2), (FirstRelation(4, query),)) for query in (True, False))
    assert [holds("StrictLessThan", BELOW_4, cell, ()) for cell in (first, later)] == [True, False]
    assert holds("StrictLessThan", BELOW_4, Cell(World.SAME, (1, 2)), ()) is None
    assert holds("StrictGreaterThan", FROM_0, first, ()) is True  # the query is behind the key: as of any cell


def test_a_grouping_is_told_by_relations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "GROUPINGS", (First,))
    sharding: Any = cp.Sharding(2, {"position_ids": 1}, cp.PositionIds("position_ids"))
    pair = Pair(*sympy.symbols("q k b"))
    reads: list[list[tuple[str, Linear]]] = [[("StrictLessThan", BELOW_4)], [("Equality", BELOW_4)], []]
    found = [table.groupings_of(CellValues(sharding, {}, pair, frozenset()), read) for read in reads]
    assert found == [[First(4)], [], []]
    split = table.cells(World.SAME, [(1, 1)], found[0])
    assert [cell.relations for cell in split] == [(FirstRelation(4, True),), (FirstRelation(4, False),)]
