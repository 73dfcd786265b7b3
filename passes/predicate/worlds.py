"""Worlds: relations between two tokens of a row, once it is known whether one document holds both; and the terms of a
mask's symbolic value that say them.

Symbols, for query token and key token: Q, K index in the row; PQ, PK position inside the document; WQ, WK the place
behind the document's first token in the row, another one where the row begins inside of a document; IQ, IK the batch's
own document ids less the lowest one that is no padding. Each recognised numbering of documents adds a pair of its own
(`Ordinal`).

    position_ids  3 4 5 0 1 2 3
    WQ            0 1 2 0 1 2 3

    World, Ordinal, Cell                 how two tokens stand to each other, and how far apart
    Trouble, Pair, maximal_terms, …      the terms: reads of leaves, index symbols, and generators
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import sympy
import torch.fx as fx
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from cp_rewrite.refusal import Reason

from .symbolic import Expr, RepeatIndex, RunningMax, RunningSum, SumOver

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
"""The number of the query's and of the key's chunk, see `groupings.chunks`."""
STARTS = sympy.Symbol("S", integer=True)
"""How many of the batch's document starts are at Q. None or more: empty documents start where others do."""
Linear = dict[Expr, Expr]
"""A sum: term -> coefficient, ONE -> the constant. K - Q + 3 is {K: 1, Q: -1, ONE: 3}."""
Span = tuple[float, float]
"""Inclusive bounds."""
EVERYTHING: Span = (-math.inf, math.inf)
ABOVE_0, UP_TO_0, FROM_0, BELOW_0 = (1.0, math.inf), (-math.inf, 0.0), (0.0, math.inf), (-math.inf, -1.0)
R = TypeVar("R")


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
        of: the relation whose groups it numbers, one value each, never falling; None: it numbers documents.
    """

    query: sympy.Symbol
    key: sympy.Symbol
    with_padding: bool
    of: type[Any] | None = None


@dataclass(frozen=True)
class Cell:
    """A world and a range of distances d = Q - K. relations: how the groupings that a mask reads hold query and key,
    at most one of each of `groupings.grouping.Relation`'s types."""

    world: World
    span: Span
    relations: tuple[Any, ...] = ()

    def __str__(self) -> str:
        low, high = self.span
        away = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        return f"{self.world.value}{''.join(map(str, self.relations))} at query - key = {away}"

    def of(self, relation: type[R]) -> R | None:
        """The cell's relation of a type, if it has one."""
        return next((each for each in self.relations if type(each) is relation), None)

    @property
    def same(self) -> bool:
        """True if one document, or tree, holds query and key."""
        return self.world is World.SAME

    @property
    def other(self) -> bool:
        """The key is none of the query's document."""
        return self.world in (World.DIFFERENT, World.ADJACENT)

    @property
    def padding(self) -> bool:
        """The query may be padding."""
        return self.world in (World.ADJACENT, World.IN_PADDING)

    @property
    def by_order(self) -> Span:
        """Range of the query's less the key's value of anything that grows along the row."""
        low, high = self.span
        return ABOVE_0 if low > 0 else BELOW_0 if high < 0 else (0.0, 0.0) if low == high else EVERYTHING

    @property
    def never_falls(self) -> Span:
        """Range of the query's less the key's value of anything that never falls along the row."""
        low, high = self.span
        return FROM_0 if low >= 0 else UP_TO_0 if high <= 0 else EVERYTHING


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


GENERATORS = (RunningSum, RunningMax, SumOver, RepeatIndex)
"""Functions that run over all tokens or offsets: what numbers documents is made of them."""


@dataclass(frozen=True)
class Trouble:
    """Why a term can't be read: what to refuse a mask for that hangs on it."""

    reason: Reason
    detail: str
    node: fx.Node | None = None


@dataclass(frozen=True)
class Pair:
    """How a value calls the query token, the key token and the batch row: by an index expression each.

    `others` are symbols that a mask over tokens must not depend on, each with what it is: b and h.
    """

    query: Expr
    key: Expr
    batch: Expr
    others: Mapping[Expr, str] = field(default_factory=dict)

    def side(self, index: Expr) -> tuple[Expr, ...] | None:
        """(index, position, id): symbols of the token that an index expression names; None for neither token's."""
        if sympy.expand(index - self.query) == 0:
            return Q, PQ, IQ
        if sympy.expand(index - self.key) == 0:
            return K, PK, IK
        return None

    def at(self, side: Expr) -> Expr:
        """The index expression of the token at Q or K."""
        return self.query if side == Q else self.key


def maximal_terms(value: Any) -> Iterator[Any]:
    """The outermost reads and generators in a value, and index symbols that stand outside them.

    Eq(RunningSum(starts(j), j, q) - RunningSum(starts(j), j, k), 0) & (k - q <= 0)
       generator                     generator                         index symbols
    """
    if isinstance(value, (AppliedUndef, sympy.Symbol, *GENERATORS)):
        yield value
        return
    for arg in value.args:
        yield from maximal_terms(arg)


def relations(value: Any) -> Iterator[Relational]:
    """The relations that a value is built of, outside reads and generators."""
    if isinstance(value, Relational):
        yield value
    elif not isinstance(value, (AppliedUndef, *GENERATORS)):
        for arg in value.args:
            yield from relations(arg)
