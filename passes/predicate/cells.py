"""The value of a mask in a cell, once the terms of its symbolic value are read.

`holds` tells by bounds of its terms if a relation holds in a cell; `CellValues` puts relations together to what a mask
may be there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from sympy.core.relational import Relational

from cp_rewrite.sharding import Sharding

from .context import Leaf
from .symbolic import ONE, TOKENS, Expr, Select
from .worlds import (
    BOTH,
    END_K,
    END_Q,
    EVERYTHING,
    FROM_0,
    IK,
    IQ,
    LK,
    LQ,
    PK,
    PQ,
    START_K,
    START_Q,
    STARTS,
    WK,
    WQ,
    Cell,
    D,
    K,
    Linear,
    Ordinal,
    Pair,
    Q,
    Span,
    Trouble,
    World,
    maximal_terms,
    relations,
)

_IN_ROW = frozenset({Q, K, WQ, WK})
_MIN_TOKENS = 2
_POSITIONS = {PQ: PK, WQ: WK}


def turning_points(linear: Linear) -> set[int]:
    """Distances around which `linear` changes its sign: K - Q + 3 at 3.

    Only where it is made of indices alone, or of positions of one document alone; {} for anything else.
    """
    reduced = _reduce(linear, Cell(World.SAME, EVERYTHING), ())
    if set(reduced) - {D, ONE} or not reduced.get(D):
        return set()
    root = -reduced.get(ONE, sympy.S.Zero) / reduced[D]
    return {int(sympy.floor(root)), int(sympy.ceiling(root))}


def holds(op: str, linear: Linear, cell: Cell, ordinals: Iterable[Ordinal]) -> bool | None:
    """True if `linear op 0` holds for every pair of tokens of a cell, False if for none, None if that can't be said.

    `op` is the name of a sympy relation.
    """
    ordinals = tuple(ordinals)
    spans = _spans(cell, ordinals)
    low, high = EVERYTHING
    reduced = _reduce(linear, cell, ordinals)
    for relation in cell.relations:
        reduced = relation.regrouped(cell, reduced)
    for form in (linear, reduced):
        form_low, form_high = _bounds(form, spans)
        low, high = max(low, form_low), min(high, form_high)
        if _is_multiple_of_nonzero(form, cell) and op in ("Equality", "Unequality"):
            return op == "Unequality"
    return _compare(op, low, high)


def _compare(op: str, low: float, high: float) -> bool | None:
    always: dict[str, bool] = {
        "Equality": low == high == 0,
        "Unequality": low > 0 or high < 0,
        "StrictLessThan": high < 0,
        "LessThan": high <= 0,
        "StrictGreaterThan": low > 0,
        "GreaterThan": low >= 0,
    }
    opposite = {
        "Equality": "Unequality", "Unequality": "Equality", "StrictLessThan": "GreaterThan",
        "GreaterThan": "StrictLessThan", "LessThan": "StrictGreaterThan", "StrictGreaterThan": "LessThan",
    }  # fmt: skip
    return True if always[op] else False if always[opposite[op]] else None


_APART, _IDS = sympy.symbols("starts ids", integer=True)
"""start(query's document) - start(key's document); id(query's document) - id(key's document)."""
_BEFORE, _BEHIND = sympy.symbols("before behind", integer=True)
"""start(query's document) - K, of an earlier key; K - end(query's document), of a later one. The key may be padding."""


def _reduce(linear: Linear, cell: Cell, ordinals: Iterable[Ordinal]) -> Linear:
    """`linear` without the query's symbols: each is the key's and a difference, which the world may know.

    K - Q       ->  -D                in all worlds
    PQ - PK     ->  D                 of one document; D - starts of two. WQ and WK alike
    PQ          ->  D - before        of two, the key's the earlier one
    LQ          ->  LK - D            of one document; -D - behind of two, the key's the later one
    IQ - IK     ->  0                 of one document; ids of two
    """
    out: Linear = {}

    def add(term: Expr, coefficient: Expr) -> None:
        out[term] = out.get(term, sympy.S.Zero) + coefficient

    ordinal_of = {o.query: o for o in ordinals}
    done: set[Expr] = set().union(*(relation.reduced(cell, linear, add) for relation in cell.relations))
    for term, c in linear.items():
        if term in done:
            continue
        ordinal = ordinal_of.get(term)
        parts = _by_keys(term, linear, cell) if ordinal is None else _by_key_number(ordinal, cell)
        for part, factor in parts.items():
            add(part, c * factor)
    return {term: c for term, c in out.items() if c != 0}


def _by_keys(term: Expr, linear: Linear, cell: Cell) -> dict[Expr, int]:
    """A symbol of the query by those of the key: what it is made of, and how often; itself where nothing is known."""
    world, (low, high) = cell.world, cell.span
    if term == Q:
        return {K: 1, D: 1}
    if term in _POSITIONS:
        key = _POSITIONS[term]
        if world is World.ADJACENT:
            return {}
        if world is World.DIFFERENT and low > 0 and key not in linear:
            return {D: 1, _BEFORE: -1}
        if world in (World.SAME, World.DIFFERENT):
            return {key: 1, D: 1} | ({_APART: -1} if world is World.DIFFERENT else {})
    if term == LQ and world is World.SAME:
        return {LK: 1, D: -1}
    if term == LQ and world is World.DIFFERENT and high < 0:
        return {_BEHIND: -1, D: -1}
    if term == IQ and world is World.SAME:
        return {IK: 1}
    if term == IQ and linear.get(IK) == -linear[IQ]:
        return {IK: 1, _IDS: 1}
    return {term: 1}


def _by_key_number(ordinal: Ordinal, cell: Cell) -> dict[Expr, int]:
    """The number of the query's document, or group, by that of the key's."""
    same = cell.same or (cell.world is World.PADDING and ordinal.with_padding)
    step = {} if same and ordinal.of is None else {sympy.Symbol(f"Δ{ordinal.query.name}"): 1}
    return {ordinal.key: 1, **step}


def _spans(cell: Cell, ordinals: Iterable[Ordinal]) -> dict[Expr, Span]:
    """Bounds of the symbols in a cell.

    Starts and numbers of documents only grow along the row, so those of two documents differ as the distance does.
    """
    low, high = cell.span
    apart: Span = (1, math.inf) if low > 0 else (-math.inf, -1) if high < 0 else EVERYTHING
    row: Span = (0, math.inf)
    spans: dict[Expr, Span] = {ONE: (1, 1), D: cell.span, TOKENS: (_MIN_TOKENS, math.inf)}
    spans |= {Q: (max(0, low), math.inf), K: (max(0, -high), math.inf), PK: row, PQ: row, WK: row, WQ: row}
    spans[_APART] = apart
    for o in ordinals:
        step = sympy.Symbol(f"Δ{o.query.name}")
        if o.of is None:
            spans[step] = apart
        else:
            relation = cell.of(o.of)
            numbers = (cell.never_falls, FROM_0, FROM_0) if relation is None else relation.numbers(cell)
            spans |= dict(zip((step, o.query, o.key), numbers, strict=True))
    spans |= {_BEFORE: (1, math.inf), _BEHIND: row}
    if cell.world is World.SAME:
        spans |= {LQ: (1, math.inf), LK: (1, math.inf), BOTH: (1, 1)}
        spans |= dict.fromkeys((PQ, WQ), (max(0, low), math.inf)) | dict.fromkeys((PK, WK), (max(0, -high), math.inf))
        spans |= {IQ: row, IK: row}
        spans[STARTS] = (0, 0) if cell.span == (1, 1) else EVERYTHING
    elif cell.world is World.DIFFERENT:
        spans |= {IQ: row, LQ: (1, math.inf), BOTH: (0, 0)}
    elif cell.world is World.ADJACENT:
        spans |= {PQ: (0, 0), WQ: (0, 0), STARTS: (1, math.inf), END_K: (0, 0), START_Q: (0, 0)}
    elif cell.world is World.IN_PADDING:
        spans |= dict.fromkeys((PK, PQ, WK, WQ), EVERYTHING) | {IQ: (-math.inf, -1), IK: (-math.inf, -1)}
    else:
        spans |= dict.fromkeys((PK, PQ, WK, WQ), EVERYTHING) | {IQ: row}
    for relation in cell.relations:
        for term, (least, most) in relation.bounds(cell).items():
            known = spans.get(term, EVERYTHING)
            spans[term] = max(known[0], least), min(known[1], most)
    return spans


def _is_multiple_of_nonzero(form: Linear, cell: Cell) -> bool:
    """True if a form is a multiple of a number that is never 0: id - id of two documents, or a token less the one that
    documents end (start) with, where another token of its document follows (precedes) it."""
    low, high = cell.span
    if len(terms := {*form} - {ONE}) == 1:
        value = -form.get(ONE, 0) / form[term := terms.pop()]
        if any(relation.never(term, value) for relation in cell.relations):
            return True
    if cell.world is World.SAME:
        nonzero = {END_K, START_Q} if low > 0 else {END_Q, START_K} if high < 0 else set()
    else:
        nonzero = {_IDS} if cell.world in (World.DIFFERENT, World.ADJACENT) else set()
    return len(form) == 1 and set(form) <= nonzero.union(*(each.nonzero(cell) for each in cell.relations))


def _bounds(form: Linear, spans: Mapping[Expr, Span]) -> Span:
    return -_highest({t: -c for t, c in form.items()}, spans), _highest(form, spans)


def _highest(form: Linear, spans: Mapping[Expr, Span]) -> float:
    """The largest value of `form`, over rows of all lengths T from `_MIN_TOKENS` on.

    It is bounded by e·T + c: indices and positions end at T - 1, so each adds its coefficient to e and takes it off c.
    """
    per_token, constant = 0.0, 0.0
    for term, coefficient in form.items():
        c = float(coefficient)
        if term == TOKENS:
            per_token += c
            continue
        low, high = spans.get(term, EVERYTHING)
        edge = high if c > 0 else low
        if math.isinf(edge) and (term == D or (term in _IN_ROW and (low, high) != EVERYTHING)):
            # Indices reach T - 1; distances reach T - 1 either way.
            per_token += abs(c)
            constant -= abs(c)
        else:
            constant += c * edge
    return constant + (_MIN_TOKENS * per_token if per_token <= 0 else math.inf)


@dataclass
class CellValues:
    """Values of a mask's terms in a cell; terms are read as sums over Q, K, PQ, … of `worlds`.

    Args:
        sharding: the annotation; its packing says which argument tells documents apart.
        leaves: by the function that stands for each in the value.
        pair: what query, key and batch row are called in the value.
        token_size: the sizes that count tokens.
        ordinals: the numberings found so far, by the term with its token left open.
        troubles: the terms that can't be read, each with the reason.
        groupings: what groupings were read by, by their type.
        skips_end: marks of document starts, or the key's start, were read with the last document's end left out.
    """

    sharding: Sharding
    leaves: Mapping[Any, Leaf]
    pair: Pair
    token_size: frozenset[Expr]
    ordinals: dict[Expr, Ordinal] = field(default_factory=dict)
    troubles: dict[Expr, Trouble] = field(default_factory=dict)
    groupings: dict[type[Any], Any] = field(default_factory=dict)
    skips_end: bool = False
    _linears: dict[Expr, Linear] = field(default_factory=dict)

    def _term(self, term: Expr) -> Linear:
        """One term as a sum over Q, K, PQ, …; itself, with its trouble noted, where it can't be read."""
        raise NotImplementedError

    def beside(self, pair: Pair) -> CellValues:
        """A reader of the same batch that calls query and key otherwise."""
        return type(self)(self.sharding, self.leaves, pair, self.token_size)

    def unread(self, term: Expr, trouble: Trouble) -> Linear:
        """Notes why a term can't be read; the term itself."""
        # The same thing said of the query and of the key is one trouble.
        detail = re.sub(rf"\b{self.pair.key}\b", str(self.pair.query), trouble.detail)
        self.troubles[term] = replace(trouble, detail=detail)
        return {term: sympy.S.One}

    def token_of(self, term: Any, leaf: Leaf) -> tuple[Expr, ...] | None:
        """The symbols (`Pair.side`) of the token at which a read takes the leaf, in the attention's own row."""
        dim = self.sharding.tokens[leaf.name]
        if dim >= len(leaf.shape) or leaf.shape[dim] not in self.token_size:
            return None
        for d, index in enumerate(term.args):
            # Of several planes of positions, the first one tells documents apart.
            at_row = index == (0 if d < dim - 1 else self.pair.batch)
            if d != dim and not (leaf.shape[d] == 1 or at_row):
                return None
        return self.pair.side(term.args[dim])

    def linear(self, difference: Expr) -> Linear:
        """A difference of terms as a sum over Q, K, PQ, …, ordinals, and terms that no rule reads."""
        if difference not in self._linears:
            self._linears[difference] = self._read_linear(difference)
        return self._linears[difference]

    def _read_linear(self, difference: Expr) -> Linear:
        out: Linear = {}
        for term, coefficient in sympy.expand(difference).as_coefficients_dict().items():
            for part, factor in self._term(term).items():
                out[part] = out.get(part, sympy.S.Zero) + coefficient * factor
        return {term: c for term, c in out.items() if c != 0}

    def truths(self, condition: Any, cell: Cell) -> frozenset[bool]:
        """The truth values that a Boolean may have in a cell: both, where it holds for some pairs only."""
        if condition in (sympy.true, sympy.false):
            return frozenset({condition == sympy.true})
        if isinstance(condition, Relational):
            known = holds(type(condition).__name__, self.linear(condition.lhs), cell, self.ordinals.values())
            return frozenset({True, False}) if known is None else frozenset({known})
        values = [self.truths(arg, cell) for arg in condition.args]
        if isinstance(condition, sympy.Not):
            return frozenset(not v for v in values[0])
        absorbing = isinstance(condition, sympy.Or)
        if frozenset({absorbing}) in values:
            return frozenset({absorbing})
        return frozenset(v for options in values for v in options)

    def numbers(self, value: Any, cell: Cell) -> frozenset[float] | None:
        """The numbers that an expression may be in a cell; None: any."""
        if value.is_number:
            return frozenset({float(value)})
        if isinstance(value, Select):
            condition, x, y = value.args
            branches = [x if held else y for held in self.truths(condition, cell)]
            options = [self.numbers(branch, cell) for branch in branches]
            known = [o for o in options if o is not None]
            return frozenset().union(*known) if len(known) == len(options) else None
        if isinstance(value, sympy.Add | sympy.Mul):
            fold = (lambda a, b: a + b) if isinstance(value, sympy.Add) else (lambda a, b: a * b)
            total: frozenset[float] = frozenset({0.0 if isinstance(value, sympy.Add) else 1.0})
            for arg in value.args:
                options = self.numbers(arg, cell)
                if options is None:
                    return None
                total = frozenset(fold(a, b) for a in total for b in options)
            return total
        return None

    def blame(self, value: Any) -> list[Trouble]:
        """The troubles of every term that `value` reads.

        A term that is only added to logits is blamed for what its exact value reads: that it was rounded does no harm.
        """
        found: dict[Trouble, None] = {}
        compared = {term for relation in relations(value) for term in maximal_terms(relation)}
        for term in maximal_terms(value):
            leaf = self.leaves.get(term.func)
            if leaf is not None and leaf.inexact is not None and term not in compared:
                found |= dict.fromkeys(self.blame(leaf.inexact))
                continue
            for part in self._term(term):
                if part in self.troubles:
                    found.setdefault(self.troubles[part])
        return list(found)
