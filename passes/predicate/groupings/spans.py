"""Spans, whose tokens see each other, whatever causality and window say.

SQ, SK      the spans' argument at query and key, less `Marks.base`. By ids: above 0 in a span. By a value: 0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, Literal

import sympy
import torch

from cp_rewrite.packing import Spans
from cp_rewrite.passes.predicate.cells import CellValues
from cp_rewrite.passes.predicate.context import Leaf
from cp_rewrite.passes.predicate.symbolic import ONE, ZERO, Expr
from cp_rewrite.passes.predicate.worlds import (
    ABOVE_0,
    EVERYTHING,
    FROM_0,
    UP_TO_0,
    Cell,
    Linear,
    Pair,
    Q,
    Span,
    World,
    maximal_terms,
)

from .grouping import Form, Grouping, Kept, Relation, differs, sides

SQ, SK = sympy.symbols("SQ SK", integer=True)
_SPANS = sympy.Symbol("spans", integer=True)
"""SQ - SK of two spans by ids."""
Types = tuple[int | None, int | None]


class Held(Enum):
    """Which spans hold query and key."""

    ONE = ", of its span,"
    TWO = ", of another span,"
    QUERY = ", of no span while the query is of one,"
    KEY = ", of a span while the query is of none,"
    NONE = ", neither it nor the query of a span,"


@dataclass(frozen=True)
class SpanRelation(Relation):
    """types: as of `Marks.types`."""

    marks: Marks
    held: Held
    types: Types = (None, None)

    def __str__(self) -> str:
        return self.held.value

    @property
    def plain(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.held is Held.NONE

    @property
    def special(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.held is Held.ONE

    @property
    def _query(self) -> bool:
        return self.held in (Held.ONE, Held.TWO, Held.QUERY)

    @property
    def _key(self) -> bool:
        return self.held in (Held.ONE, Held.TWO, Held.KEY)

    def reduced(self, cell: Cell, linear: Linear, add: Callable[[Expr, Expr], None]) -> set[Expr]:
        one = self.held is Held.ONE
        known = one or (self.held is Held.TWO and sides(linear, SQ, SK))
        if self.marks.kind != "ids" or SQ not in linear or not known:
            return set()
        add(SK, linear[SQ])
        if not one:
            add(_SPANS, linear[SQ])
        return {SQ}

    def bounds(self, cell: Cell) -> dict[Expr, Span]:
        inside = ABOVE_0 if self.marks.kind == "ids" else (0.0, 0.0)
        outside = UP_TO_0 if self.marks.kind == "ids" else EVERYTHING
        if self.marks.outside is not None:
            outside = float(self.marks.outside), float(self.marks.outside)
        found: dict[Expr, Span] = {SQ: inside if self._query else outside, SK: inside if self._key else outside}
        typed = zip((SQ, SK), self.types, strict=True)
        return found | {mark: (float(of), float(of)) for mark, of in typed if of is not None}

    def nonzero(self, cell: Cell) -> set[Expr]:
        found = {mark for mark in (SQ, SK) if self.never(mark, sympy.S.Zero)}
        return found | ({_SPANS} if self.held is Held.TWO else set())

    def never(self, term: Expr, value: Expr) -> bool:
        """True if `value` (less the base) marks spans, and the token of `term` is in none."""
        if self.marks.kind == "ids" or value not in self.marks.inside:
            return False
        return (term == SQ and not self._query) or (term == SK and not self._key)

    def numbers(self, cell: Cell) -> tuple[Span, Span, Span]:
        """The number of a token in a span counts that one."""
        step = cell.by_order if self.held is Held.TWO else cell.never_falls
        if self.held is Held.ONE and (cell.same or self.marks.kind == "value"):
            step = (0.0, 0.0)
        return step, ABOVE_0 if self._query else FROM_0, ABOVE_0 if self._key else FROM_0

    def impossible(self, cell: Cell) -> bool:
        """A span that tokens of one value make lies inside of one document, and goes on in no padding:
        `SpanRuns.inside` holds batches to that. By ids, padding may have a span's id."""
        if self.held is not Held.ONE:
            return False
        kinds = {World.DIFFERENT: ("value",), World.PADDING: ("value", "prefix")}
        return self.marks.kind in kinds.get(cell.world, ())

    def expected(self, cell: Cell, form: Form) -> bool | type[Relation] | None:
        low, high = cell.span
        if self.marks.kind == "prefix" and cell.world is World.DIFFERENT:
            # The row is one document, whose prefix comes first.
            if (self.held is Held.KEY and high < 0) or (self.held is Held.QUERY and low > 0):
                return None
        if form.fields.get("spans") and self.held is Held.ONE:
            return True if form.reaches(low, high) else None  # spans are not longer than the window
        return Relation

    def alike(self, cell: Cell, form: Form) -> Relation:
        return SpanRelation(self.marks, Held.NONE)


@dataclass(frozen=True)
class Marks(Grouping):
    """The argument that a mask reads spans by. base: taken off the argument's values. outside: what a bool argument
    holds, less `base`, in no span; None: any other number than in spans. inside: what it holds in spans, less
    `base`."""

    kind: Literal["ids", "value", "prefix"]
    base: int
    outside: int | None = None
    inside: tuple[int, ...] = (0,)
    relation = SpanRelation

    @classmethod
    def of(cls, spans: Spans, leaf: Leaf) -> Marks:
        """The marks of a mask that reads spans by `leaf`."""
        if spans.value is None:
            return cls("ids", spans.none)
        # A flag holds one other number in no span.
        base = spans.values[0]
        outside = 1 - 2 * base if leaf.dtype is torch.bool and spans.value in (0, 1) else None
        kind = "prefix" if spans.prefix else "value"
        return cls(kind, base, outside, tuple(value - base for value in spans.values))

    @classmethod
    def arguments(cls, reader: CellValues) -> set[str]:
        spans = reader.sharding.spans
        return set() if spans is None else {spans.arg}

    @classmethod
    def at_token(cls, reader: CellValues, side: tuple[Expr, ...], leaf: Leaf) -> Linear | None:
        spans = reader.sharding.spans
        if spans is None or leaf.name != spans.arg:
            return None
        marks = cls.of(spans, leaf)
        reader.groupings[cls] = marks
        return {SQ if side[0] == Q else SK: sympy.S.One, ONE: sympy.Integer(marks.base)}

    @classmethod
    def is_numbered(cls, reader: CellValues, inner: Any, j: Any) -> bool:
        """True if it reads what marks spans alone, and adds 0 inside of them, 1 or more at their first tokens, and
        nothing below 0 elsewhere.

        token_type_ids                                       0 1 1 0 0 1 1 1
        RunningSum(one, and the token before is none)        0 1 1 1 1 2 2 2
        """
        spans = reader.sharding.spans
        reads = [reader.leaves.get(term.func) for term in maximal_terms(inner) if not isinstance(term, sympy.Symbol)]
        if spans is None or not reads or reads[0] is None or any(not leaf or leaf.name != spans.arg for leaf in reads):
            return False
        marks = cls.of(spans, reads[0])
        # Of token j and the one before it; the row's first token has none before it.
        batch = reader.pair.batch
        later, first = reader.beside(Pair(j, j - 1, batch)), reader.beside(Pair(ZERO, -ONE, batch))
        added = {
            (at is later, held, types): at.numbers(value, Cell(World.SAME, (1, 1), (SpanRelation(marks, held, types),)))
            for at, value, ways in ((later, inner, Held), (first, inner.xreplace({j: ZERO}), (Held.QUERY, Held.NONE)))
            for held in ways
            if held is not Held.TWO or marks.kind == "ids"
            for types in marks.types(held)
        }
        if any(values is None or not 0 <= min(values) <= max(values) < float("inf") for values in added.values()):
            return False
        begins = [values for (_, held, _), values in added.items() if held in (Held.QUERY, Held.TWO)]
        inside = {values for (_, held, _), values in added.items() if held is Held.ONE}
        if inside != {frozenset({0.0})} or any(min(values or {0.0}) < 1 for values in begins):
            return False
        reader.groupings[cls] = marks
        return True

    def types(self, held: Held) -> list[Types]:
        """Values that query and key may hold where spans of several types hold them so; None: in no span, or of one
        type."""
        if len(self.inside) < 2:
            return [(None, None)]
        query = self.inside if held in (Held.ONE, Held.TWO, Held.QUERY) else (None,)
        key = self.inside if held in (Held.ONE, Held.TWO, Held.KEY) else (None,)
        return list(product(query, key))

    def relations(self, cell: Cell) -> Sequence[Relation | None]:
        """The tokens of a prefix come before all others of its document."""
        low, high = cell.span
        held = (Held.ONE, Held.NONE) if low == high == 0 else tuple(Held)
        if self.kind == "prefix":
            held = tuple(h for h in held if h is not Held.TWO)
            if cell.same:
                held = tuple(h for h in held if not (h is Held.KEY and high < 0) and not (h is Held.QUERY and low > 0))
        return [SpanRelation(self, each, types) for each in held for types in self.types(each)]

    def fields(self, kept: Kept, plain: Kept) -> dict[str, Any]:
        return {"spans": differs(kept, plain, SpanRelation)}

    def odd(self, form: Form) -> str:
        """The trouble of a mask that reads spans and has none: batches are held to facts of spans under masks with
        spans alone."""
        if form.fields.get("spans"):
            return ""
        return "the mask reads the annotation's spans, whose tokens do not see each other by it"
