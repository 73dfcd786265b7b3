"""What is known of spans and trees in a cell: which spans hold query and key, and how their nodes are related.

SQ, SK      the spans' argument at query and key, less `Marks.base`. By ids: above 0 in a span. By a value: 0 there.
CNQ, CNK    numbers of completions: 0 on the prompt.
NODEi       the number of the node i levels above the query's, that of its own for 0, where nodes tell their parents.
            A root is its own parent. NODEi of the key alike.
TIN, TOUT   ranges of nodes. Nodes are numbered along the row, so that [TIN, TOUT) of two nodes lie inside of one
            another where one is above the other, and apart otherwise. Without an argument `tin`, numbers are places.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Literal

import sympy

from .symbolic import ONE, Expr

SQ, SK, CNQ, CNK = sympy.symbols("SQ SK CNQ CNK", integer=True)
TIN_Q, TIN_K, TOUT_Q, TOUT_K = sympy.symbols("TINq TINk TOUTq TOUTk", integer=True)
_SPANS, _COMPLETIONS = sympy.symbols("spans completions", integer=True)
"""SQ - SK of two spans by ids; CNQ - CNK of two completions."""
_TINS, _TOUTS, _KEYS_END, _QUERYS_END = sympy.symbols("tins touts keysend querysend", integer=True)
"""TIN_Q - TIN_K; TOUT_Q - TOUT_K; TOUT_K - TIN_Q; TOUT_Q - TIN_K."""
Span = tuple[float, float]
Types = tuple[int | None, int | None]
_ANY, _ABOVE_0, _UP_TO_0 = (-math.inf, math.inf), (1.0, math.inf), (-math.inf, 0.0)
_FROM_0, _BELOW_0 = (0.0, math.inf), (-math.inf, -1.0)


class Held(Enum):
    """Which spans hold query and key."""

    ONE = ", of its span,"
    TWO = ", of another span,"
    QUERY = ", of no span while the query is of one,"
    KEY = ", of a span while the query is of none,"
    NONE = ", neither it nor the query of a span,"


class Kin(Enum):
    """How the key's node stands to the query's, in one tree."""

    NODE = " of its own node"
    ABOVE = " of a node above"
    BELOW = " of a node below"
    APART = " of another branch"


def node_above(level: int, query: bool) -> sympy.Symbol:
    """NODEi of the query or of the key."""
    return sympy.Symbol(f"NODE{level}{'q' if query else 'k'}", integer=True)


def _nodes_apart(level: int) -> sympy.Symbol:
    """NODEi of the query - NODE0 of the key."""
    return sympy.Symbol(f"nodes{level}", integer=True)


@dataclass(frozen=True)
class Marks:
    """What a mask reads spans by. base: taken off the argument's values. outside: what a bool argument holds, less
    `base`, in no span; None: any other number than in spans. inside: what it holds in spans, less `base`."""

    kind: Literal["ids", "value", "prefix"]
    base: int
    outside: int | None = None
    inside: tuple[int, ...] = (0,)

    def types(self, held: Held) -> list[Types]:
        """What query and key may hold where spans of several types hold them so; None: in no span, or of one type."""
        if len(self.inside) < 2:
            return [(None, None)]
        query = self.inside if held in (Held.ONE, Held.TWO, Held.QUERY) else (None,)
        key = self.inside if held in (Held.ONE, Held.TWO, Held.KEY) else (None,)
        return list(product(query, key))


@dataclass(frozen=True)
class Relation:
    """What a cell says of query and key beyond their documents.

    Args:
        low, high: of query - key.
        same, other: one document, or tree, holds both; the key is none of the query's document.
        kin: their nodes, in one tree; None: it has none, or there are two.
        held, marks: their spans; None: the mask reads none. types: as of `Marks.types`.
        places: ranges of nodes count places in the row.
        levels: how many the mask reads nodes' parents up; None: it reads none. depth: the key's node is so many above
            the query's.
        padding: the query may be padding.
    """

    low: float
    high: float
    same: bool
    other: bool
    kin: Kin | None
    held: Held | None
    marks: Marks | None
    places: bool
    levels: int | None
    depth: int | None
    padding: bool
    types: Types

    @property
    def _by_order(self) -> Span:
        """Of what grows along the row."""
        return (
            _ABOVE_0 if self.low > 0 else _BELOW_0 if self.high < 0 else (0.0, 0.0) if self.low == self.high else _ANY
        )

    @property
    def _never_falls(self) -> Span:
        return _FROM_0 if self.low >= 0 else _UP_TO_0 if self.high <= 0 else _ANY

    @property
    def _apart(self) -> bool:
        """No node is above the other. A later key of no node of the tree may be padding, which has no range."""
        return self.kin is Kin.APART or (self.other and self.low > 0)

    def reduced(self, linear: dict[Expr, Expr], add: Callable[[Expr, Expr], None], query: Expr, key: Expr) -> set[Expr]:
        """Puts the query's symbols as the key's and a difference; which terms these were. `query`, `key`: places."""
        done: set[Expr] = set()
        tin = {TIN_Q: (key, query - key) if self.places else (TIN_K, _TINS)}
        pairs: dict[Expr, tuple[Expr, Expr]] = {}
        if self.kin is Kin.NODE:
            pairs[CNQ] = (CNK, sympy.S.Zero)
        elif linear.get(CNQ) == -linear.get(CNK, sympy.S.Zero):
            pairs[CNQ] = (CNK, _COMPLETIONS)
        if self.marks is not None and self.marks.kind == "ids":
            if self.held is Held.ONE:
                pairs[SQ] = (SK, sympy.S.Zero)
            elif self.held is Held.TWO and linear.get(SQ) == -linear.get(SK, sympy.S.Zero):
                pairs[SQ] = (SK, _SPANS)
        pairs |= self._nodes(linear)
        if self.kin is not None or self.other:
            if linear.get(TOUT_Q) == -linear.get(TOUT_K, sympy.S.Zero):
                pairs[TOUT_Q] = (TOUT_K, _TOUTS)
            if TOUT_Q in linear and TOUT_Q not in pairs:
                pairs[TOUT_Q] = (key if self.places else TIN_K, _QUERYS_END)
            if TOUT_K in linear and pairs.get(TOUT_Q, (None,))[0] is not TOUT_K:
                done.add(TOUT_K)
                for term, factor in _sum_of(*((query, 0) if self.places else (TIN_K, _TINS))):
                    add(term, factor * linear[TOUT_K])
                add(_KEYS_END, linear[TOUT_K])
            if not self.places:
                pairs |= tin
        for term, parts in pairs.items():
            if term in linear:
                done.add(term)
                for part, factor in _sum_of(*parts):
                    add(part, factor * linear[term])
        return done

    def _nodes(self, linear: dict[Expr, Expr]) -> dict[Expr, tuple[Expr, Expr]]:
        """NODEi of the query, less the key's node, as that one and a difference."""
        key = node_above(0, query=False)
        for level in self._levels:
            term = node_above(level, query=True)
            if linear.get(term, sympy.S.Zero) == -linear.get(key, sympy.S.Zero) != 0:
                own = self.kin is Kin.NODE and level == 0
                equal = own or (self.kin is Kin.ABOVE and level == self.depth)
                return {term: (key, sympy.S.Zero if equal else _nodes_apart(level))}
        return {}

    @property
    def _levels(self) -> range:
        return range(0 if self.levels is None else self.levels + 1)

    def _is_another_node(self, level: int) -> bool:
        """Whether the node `level` levels above the query's is never the key's. A root is above itself."""
        match self.kin:
            case Kin.NODE:
                return False
            case Kin.ABOVE:
                return self.depth is not None and level < self.depth
            case None:
                return self.other and not self.padding
            case _:
                return True

    def bounds(self) -> dict[Expr, Span]:
        """Bounds of the symbols."""
        found: dict[Expr, Span] = {}
        if self.marks is not None and self.held is not None:
            inside = _ABOVE_0 if self.marks.kind == "ids" else (0.0, 0.0)
            outside = _UP_TO_0 if self.marks.kind == "ids" else _ANY
            if self.marks.outside is not None:
                outside = float(self.marks.outside), float(self.marks.outside)
            found[SQ] = inside if self.held in (Held.ONE, Held.TWO, Held.QUERY) else outside
            found[SK] = inside if self.held in (Held.ONE, Held.TWO, Held.KEY) else outside
            found |= {
                mark: (float(of), float(of)) for mark, of in zip((SQ, SK), self.types, strict=True) if of is not None
            }
        found |= self._of_completions()
        if self.kin is Kin.NODE:
            found |= {_TINS: self._never_falls, _TOUTS: (0.0, 0.0), _KEYS_END: _ABOVE_0, _QUERYS_END: _ABOVE_0}
        elif self.kin in (Kin.ABOVE, Kin.BELOW):
            above = self.kin is Kin.ABOVE
            found |= {_TINS: _ABOVE_0 if above else _BELOW_0, _TOUTS: _UP_TO_0 if above else _FROM_0}
            found |= {_KEYS_END: _ABOVE_0, _QUERYS_END: _ABOVE_0}
        elif self._apart:
            first = self.low > 0
            found |= {_TINS: self._by_order, _TOUTS: self._by_order}
            found |= {_KEYS_END: _UP_TO_0 if first else _ABOVE_0, _QUERYS_END: _ABOVE_0 if first else _UP_TO_0}
        if self.kin is not None:
            found |= {node_above(level, query): _FROM_0 for level in self._levels for query in (True, False)}
            found |= {TIN_Q: _FROM_0, TIN_K: _FROM_0, TOUT_Q: _ABOVE_0, TOUT_K: _ABOVE_0}
        return found

    def _of_completions(self) -> dict[Expr, Span]:
        match self.kin:
            case Kin.NODE:
                return {CNQ: _FROM_0, CNK: _FROM_0}
            case Kin.ABOVE:
                return {CNQ: _ABOVE_0, CNK: (0.0, 0.0)}
            case Kin.BELOW:
                return {CNQ: (0.0, 0.0), CNK: _ABOVE_0}
            case Kin.APART:
                return {CNQ: _ABOVE_0, CNK: _ABOVE_0}
            case None:
                return {}

    @property
    def nonzero(self) -> set[Expr]:
        """Symbols that are never 0."""
        found = {_COMPLETIONS} if self.kin is Kin.APART else set[Expr]()
        found |= {_nodes_apart(level) for level in self._levels if self._is_another_node(level)}
        if self.held is Held.TWO:
            found.add(_SPANS)
        if self.marks is not None and self.marks.kind != "ids":
            found |= {mark for mark in (SQ, SK) if self.never(mark, sympy.S.Zero)}
        return found

    def never(self, mark: Expr, value: Expr) -> bool:
        """Whether a token's mark, less the base, is another one than `value`: it is in no span."""
        marks = self.marks
        if marks is None or marks.kind == "ids" or value not in marks.inside:
            return False
        return (mark == SQ and self.held in (Held.KEY, Held.NONE)) or (
            mark == SK and self.held in (Held.QUERY, Held.NONE)
        )

    @property
    def numbers_of_spans(self) -> Span:
        """Of the query's less the key's number, in a numbering that grows with each span."""
        one = self.held is Held.ONE and self.marks is not None
        if one and (self.same or (self.marks is not None and self.marks.kind == "value")):
            return (0.0, 0.0)
        return self._by_order if self.held is Held.TWO else self._never_falls

    @property
    def spans_so_far(self) -> tuple[Span, Span]:
        """Of the query's and of the key's number: that of a token in a span counts it."""
        query = self.held in (Held.ONE, Held.TWO, Held.QUERY)
        key = self.held in (Held.ONE, Held.TWO, Held.KEY)
        return _ABOVE_0 if query else _FROM_0, _ABOVE_0 if key else _FROM_0


def _sum_of(term: Expr, difference: Expr) -> list[tuple[Expr, Expr]]:
    """Two parts as (symbol, coefficient) pairs."""
    parts = sympy.expand(term + difference).as_coefficients_dict().items()
    return [(ONE if part == 1 else part, factor) for part, factor in parts if factor != 0]
