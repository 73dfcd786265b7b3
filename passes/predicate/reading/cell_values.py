"""The value of a mask in a cell, once the terms of its symbolic value are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from sympy.core.relational import Relational

from cp_rewrite.passes.predicate.bounds import holds
from cp_rewrite.passes.predicate.context import Leaf
from cp_rewrite.passes.predicate.symbolic import Expr, Select
from cp_rewrite.passes.predicate.terms import Pair, Trouble, maximal_terms, relations
from cp_rewrite.passes.predicate.worlds import Cell, Linear, Ordinal
from cp_rewrite.sharding import Sharding


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
