"""All groupings, in the order in which a refusal names them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from cp_rewrite.passes.predicate.cells import CellValues
from cp_rewrite.passes.predicate.worlds import Cell, Span, World

from .chunks import Chunks
from .grouping import Grouping
from .nodes import TreeNodes
from .spans import Marks

GROUPINGS: tuple[type[Grouping], ...] = (TreeNodes, Chunks, Marks)


def groupings_of(reader: CellValues) -> list[Grouping]:
    """The groupings of a mask, once all its relations were read."""
    found = [reader.groupings.get(kind) or kind.given(reader) for kind in GROUPINGS]
    return [each for each in found if each is not None]


def cells(world: World, spans: Iterable[Span], groupings: Iterable[Grouping]) -> list[Cell]:
    """The cells of a world, each for every way in which groupings may hold its query and key; without those that have
    no pair: one token is of one document."""
    plain = [Cell(world, span) for span in spans if world is World.SAME or span != (0, 0)]
    return [
        Cell(world, cell.span, tuple(relation for relation in relations if relation is not None))
        for cell in plain
        for relations in product(*(grouping.relations(cell) for grouping in groupings))
    ]
