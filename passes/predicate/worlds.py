"""What relations between two tokens of a row say, once it is known whether one document holds both.

Symbols, for query token and key token: Q, K index in the row; PQ, PK position inside the document; WQ, WK the place
behind the document's first token in the row, another one where the row begins inside of a document; IQ, IK the batch's
own document ids less the lowest one that is no padding. Each recognised numbering of documents adds a pair of its own
(`Ordinal`).

    position_ids  3 4 5 0 1 2 3
    WQ            0 1 2 0 1 2 3
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

import sympy

from .symbolic import Expr
from .within import Held, Kin, Marks, Relation, Types

Q, K, PQ, PK, IQ, IK, D = sympy.symbols("Q K PQ PK IQ IK D", integer=True)
WQ, WK = sympy.symbols("WQ WK", integer=True)
END_Q, END_K, START_Q, START_K = sympy.symbols("ENDq ENDk STARTq STARTk", integer=True)
"""The query's and the key's token less the one that ends (starts) documents: 0 at no other token of a document than its
last (first), and there where another document follows (precedes)."""
LQ, LK = sympy.symbols("LQ LK", integer=True)
"""Tokens from the query (key) to the end of its document, itself among them."""
BOTH = sympy.Symbol("BOTH", integer=True)
"""How many documents hold query and key: 0 or 1."""
CQ, CK = sympy.symbols("CQ CK", integer=True)
"""The number of the query's and of the key's chunk, see `Chunks`."""
STARTS = sympy.Symbol("S", integer=True)
"""How many of the batch's document starts are at Q. None or more: empty documents start where others do."""
Linear = dict[Expr, Expr]
"""A sum: term -> coefficient, ONE -> the constant. K - Q + 3 is {K: 1, Q: -1, ONE: 3}."""
Span = tuple[float, float]
"""Inclusive bounds."""
EVERYTHING: Span = (-math.inf, math.inf)


class World(Enum):
    """How query and key stand to each other. The query is a token of a document in all of them but the
    two of tokens side by side, ADJACENT and IN_PADDING."""

    SAME = "keys of the query's document"
    DIFFERENT = "keys of other documents"
    ADJACENT = "a document's first token and the token before it"
    PADDING = "padding after the query's document"
    IN_PADDING = "two tokens of padding side by side"


@dataclass(frozen=True)
class Ordinal:
    """A numbering of documents: one value per document, never falling along the row.

    Args:
        query, key: the numbers of the query's and of the key's document.
        with_padding: padding after a document has that document's number.
        of_spans: it numbers spans: one value per span, never falling.
    """

    query: sympy.Symbol
    key: sympy.Symbol
    with_padding: bool
    of_spans: bool = False


@dataclass(frozen=True)
class Chunks:
    """Runs of `size` tokens, counted by the key's symbol `by`: from the row's start (K) or from each document's."""

    size: int
    by: sympy.Symbol

    @property
    def of_row(self) -> bool:
        return self.by == K


@dataclass(frozen=True)
class Cell:
    """A world and a range of distances d = Q - K; where a mask knows chunks, also whether one chunk holds both; where
    it knows spans or trees, how these hold them. levels, depth, types: as of `Relation`."""

    world: World
    span: Span
    chunks: Chunks | None = None
    together: bool | None = None
    marks: Marks | None = None
    held: Held | None = None
    places: bool = False
    kin: Kin | None = None
    levels: int | None = None
    depth: int | None = None
    types: Types = (None, None)

    def __str__(self) -> str:
        low, high = self.span
        away = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        chunk = {None: "", True: ", of its chunk,", False: ", of other chunks,"}[self.together]
        deep = "" if self.depth is None else f", {self.depth} levels up"
        deep += " or more" if self.depth is not None and self.levels is not None and self.depth > self.levels else ""
        kin, held = "" if self.kin is None else self.kin.value, "" if self.held is None else self.held.value
        return f"{self.world.value}{kin}{deep}{chunk}{held} at query - key = {away}"

    @property
    def relation(self) -> Relation:
        """What it says beyond documents and chunks."""
        other = self.world in (World.DIFFERENT, World.ADJACENT)
        padding = self.world in (World.ADJACENT, World.IN_PADDING)
        tree = (self.levels, self.depth, padding, self.types)
        same = self.world is World.SAME
        return Relation(*self.span, same, other, self.kin, self.held, self.marks, self.places, *tree)

    @property
    def plain(self) -> bool:
        """A key of the query's own node, and of no span."""
        return self.kin in (None, Kin.NODE) and self.held in (None, Held.NONE)


def spread(
    cells: Iterable[Cell], marks: Marks | None, tree: bool, places: bool, levels: int | None = None
) -> list[Cell]:
    """The cells, each for every way in which spans and nodes may hold its query and key.

    What is above a node comes before it; where a mask reads parents, by each of the levels that it reads, and all
    further ones. The tokens of a prefix come before all others of its document.
    """
    out: list[Cell] = []
    for cell in cells:
        low, high = cell.span
        kins = (Kin.NODE, *(Kin.ABOVE,) * (low > 0), *(Kin.BELOW,) * (high < 0), *(Kin.APART,) * (low > 0 or high < 0))
        held = (Held.ONE, Held.NONE) if low == high == 0 else tuple(Held)
        if marks is not None and marks.kind == "prefix":
            held = tuple(h for h in held if h is not Held.TWO)
            if cell.world is World.SAME:
                held = tuple(h for h in held if not (h is Held.KEY and high < 0) and not (h is Held.QUERY and low > 0))
        for kin in kins if tree and cell.world is World.SAME else (None,):
            depths = range(1, levels + 2) if kin is Kin.ABOVE and levels is not None else (None,)
            ways = [(None, (None, None))] if marks is None else [(h, types) for h in held for types in marks.types(h)]
            for (each, types), depth in product(ways, depths):
                way = replace(cell, marks=marks, held=each, types=types, places=places)
                out.append(replace(way, kin=kin, levels=levels, depth=depth))
    return out


def cells(world: World, spans: Iterable[Span], chunks: Chunks | None) -> list[Cell]:
    """The cells of a world, those without any pair left out. Chunks of two documents have nothing to do with each
    other, unless they are the row's."""
    if chunks is None or (world is World.DIFFERENT and not chunks.of_row):
        return [Cell(world, span, chunks) for span in spans if world is World.SAME or span != (0, 0)]
    return [
        Cell(world, (low, high), chunks, together)
        for low, high in spans
        for together in (True, False)
        if (low, high) != (0, 0) or (together and world is World.SAME)
        if not together or (low < chunks.size and high > -chunks.size)
    ]


def distances(points: Iterable[int]) -> list[Span]:
    """The integers cut at `points`: every point alone, and the gaps between.

    {0, 3}  ->  (-inf, -1) (0, 0) (1, 2) (3, 3) (4, inf)
    """
    spans: list[Span] = []
    low: float = -math.inf
    for point in sorted(set(points)):
        if low <= point - 1:
            spans.append((low, point - 1))
        spans.append((point, point))
        low = point + 1
    return [*spans, (low, math.inf)]
