"""Recognise the row's tokens in a mask's symbolic value: their index, their position, the document that holds them.

    term                                   packing      is read as
    q                                      any          Q, the query's index
    floor(q / 4)                           any          CQ, the number of the query's chunk of 4 tokens
    position_ids(b, k)                     PositionIds  PK, the key's position
    doc_ids(b, q)                          DocumentIds  IQ, the id of the query's document
    RunningSum(position_ids(b, j) == 0)    PositionIds  an Ordinal: a number that grows from document to document
    RunningSum(input_ids(b, j - 1) == 2)   EndOfDocument  an Ordinal
    SumOver(cu_seqlens(i) <= q)            CuSeqlens    an Ordinal
    cu_seqlens(the token's document)       CuSeqlens    Q - PQ, the index of its first token
    RunningMax(j where a document starts)  any          the same

Any other term stays what it is, with a Trouble that says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from cp_rewrite.packing import CuSeqlens, DocumentIds, EndOfDocument, StartOfDocument
from cp_rewrite.refusal import Reason
from cp_rewrite.sharding import Sharding

from .context import Leaf
from .offsets import Offsets
from .symbolic import ONE, TOKENS, Expr, RepeatIndex, RunningMax, RunningSum, Select, SumOver, outer_select
from .terms import GENERATORS, Pair, Trouble, maximal_terms, relations
from .worlds import (
    BOTH,
    CK,
    CQ,
    END_K,
    END_Q,
    PK,
    PQ,
    START_K,
    START_Q,
    STARTS,
    Cell,
    Chunks,
    K,
    Linear,
    Ordinal,
    Q,
    World,
    holds,
)

_TOKEN = sympy.Symbol("token", integer=True, nonnegative=True)


@dataclass
class Reader:
    """Turns relations between a mask's terms into relations between Q, K, PQ, … of `worlds`.

    Args:
        sharding: the annotation; its packing says which argument tells documents apart.
        leaves: by the function that stands for each in the value.
        pair: what query, key and batch row are called in the value.
        token_size: the sizes that count tokens.
        ordinals: the numberings found so far, by the term with its token left open.
        troubles: the terms that can't be read, each with the reason.
        chunks: the chunks whose numbers were read.
        skips_end: marks of document starts, or the key's start, were read with the last document's end left out.
    """

    sharding: Sharding
    leaves: Mapping[Any, Leaf]
    pair: Pair
    token_size: frozenset[Expr]
    ordinals: dict[Expr, Ordinal] = field(default_factory=dict)
    troubles: dict[Expr, Trouble] = field(default_factory=dict)
    chunks: Chunks | None = None
    skips_end: bool = False
    _linears: dict[Expr, Linear] = field(default_factory=dict)

    @cached_property
    def _offsets(self) -> Offsets:
        return Offsets(self.sharding.packing, self.leaves, self.pair)

    # -- values in a cell ------------------------------------------------------------------------------------

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

    # -- terms -----------------------------------------------------------------------------------------------

    def _term(self, term: Expr) -> Linear:
        """One term as a sum over Q, K, PQ, …; itself, with its trouble noted, where it can't be read."""
        if term == 1:
            return {ONE: sympy.S.One}
        if term == TOKENS:
            return {TOKENS: sympy.S.One}
        if term == self.pair.query:
            return {Q: sympy.S.One}
        if term == self.pair.key:
            return {K: sympy.S.One}
        if isinstance(term, AppliedUndef):
            return self._read(term)
        if isinstance(term, GENERATORS):
            return self._generator(term) or self._trouble(term, self._generator_trouble(term))
        if isinstance(term, sympy.floor | sympy.Mod):
            return self._chunk_number(term) or self._trouble(term, self._plain_trouble(term))
        return self._trouble(term, self._plain_trouble(term))

    def _trouble(self, term: Expr, trouble: Trouble) -> Linear:
        # The same thing said of the query and of the key is one trouble.
        detail = re.sub(rf"\b{self.pair.key}\b", str(self.pair.query), trouble.detail)
        self.troubles[term] = replace(trouble, detail=detail)
        return {term: sympy.S.One}

    def _plain_trouble(self, term: Expr) -> Trouble:
        for symbol, name in self.pair.others.items():
            if symbol in term.free_symbols:
                return Trouble(Reason.MASK_WRONG_DIM, f"the mask varies with the {name}, not with tokens alone")
        inner = [t for t in maximal_terms(term) if t != term]
        for part in inner:
            troubles = self.blame(part)
            if troubles:
                return troubles[0]
        return Trouble(Reason.MASK_NOT_PACKED, f"a term `{term}` is no difference of indices or positions")

    def _read(self, term: Any) -> Linear:
        """A read of a leaf: the batch's own argument at the query or the key is one symbol, anything else a trouble."""
        leaf = self.leaves.get(term.func)
        packing = self.sharding.packing
        assert leaf is not None
        if leaf.trouble:
            return self._trouble(term, Trouble(Reason.MASK_UNSUPPORTED_OP, leaf.trouble, leaf.node))
        if isinstance(packing, CuSeqlens) and leaf.name in (packing.arg, packing.padded_arg):
            start = self._offsets.document_bound(term)
            self.skips_end |= start is not None and PK in start and self._offsets.merges_padding(term)
            detail = f"`{term}` reads {leaf.name!r} at no document's start or end"
            return start or self._trouble(term, Trouble(Reason.MASK_NOT_PACKED, detail))
        if not isinstance(packing, CuSeqlens) and leaf.name == packing.arg:
            side = self._token_of(term, leaf)
            if side is not None:
                return self._value_at(side)
            detail = (
                f"{leaf.name!r} of shape {tuple(map(str, leaf.shape))} is read at [{', '.join(map(str, term.args))}], "
                f"but its token dim is {self.sharding.tokens[leaf.name]} and its row is the attention's own row"
            )
            return self._trouble(term, Trouble(Reason.MASK_WRONG_DIM, detail))
        return self._trouble(term, self._foreign(term, leaf))

    def _value_at(self, side: tuple[Expr, ...]) -> Linear:
        """What the packing's argument holds at a token, one number per token."""
        match self.sharding.packing:
            case DocumentIds(padding=padding):
                return {side[2]: sympy.S.One, ONE: sympy.Integer(padding + 1)}
            case EndOfDocument(token_id=token):
                return {END_Q if side[0] == Q else END_K: sympy.S.One, ONE: sympy.Integer(token)}
            case StartOfDocument(token_id=token):
                return {START_Q if side[0] == Q else START_K: sympy.S.One, ONE: sympy.Integer(token)}
            case _:
                return {side[1]: sympy.S.One}

    def _foreign(self, term: Any, leaf: Leaf) -> Trouble:
        """Why a read of another tensor than the packing's is a trouble."""
        at = {self.pair.side(i) for i in term.args}
        if any(s and s[0] == Q for s in at) and any(s and s[0] == K for s in at):
            return Trouble(Reason.MASK_OPAQUE, f"{leaf.name!r} already is a mask: its values are not in the graph")
        if leaf.name.startswith("%"):
            detail = f"the mask reads `{leaf.name[1:]}`, whose values come from the model, not from the batch"
            return Trouble(Reason.MASK_OPAQUE, detail, leaf.node)
        return Trouble(
            Reason.MASK_WRONG_SOURCE,
            f"the mask reads {leaf.name!r}, but the annotation's packing is {self.sharding.packing}",
        )

    def _token_of(self, term: Any, leaf: Leaf) -> tuple[Expr, ...] | None:
        """The symbols (`Pair.side`) of the token at which a read takes the leaf, in the attention's own row."""
        dim = self.sharding.tokens[leaf.name]
        if dim >= len(leaf.shape) or leaf.shape[dim] not in self.token_size:
            return None
        for d, index in enumerate(term.args):
            if d != dim and not (leaf.shape[d] == 1 or index == self.pair.batch):
                return None
        return self.pair.side(term.args[dim])

    def _chunk_number(self, term: Any) -> Linear | None:
        """The chunk of the query or the key, x // size, or its place there, x % size, of its index or position x."""
        x, size = cast(Any, term.args if isinstance(term, sympy.Mod) else term.args[0].as_numer_denom())
        linear = self.linear(x) if size.is_Integer and size > 0 else {}
        if list(linear.values()) != [1] or not set(linear) <= {Q, K, PQ, PK}:
            return None
        (token,) = linear
        chunks = Chunks(int(size), token in (Q, K))
        self.chunks = self.chunks or chunks
        if chunks != self.chunks:
            return None
        number = CQ if token in (Q, PQ) else CK
        return {number: ONE} if isinstance(term, sympy.floor) else {token: ONE, number: -size}

    # -- numberings of documents -----------------------------------------------------------------------------

    def _ordinal(self, key: Expr, side: Expr, with_padding: bool) -> Linear:
        """A numbering's value at the query or the key. `key`: the term, its token replaced by `_TOKEN`."""
        if key not in self.ordinals:
            n = len(self.ordinals)
            names = sympy.symbols(f"G{n}q G{n}k", integer=True)
            self.ordinals[key] = Ordinal(names[0], names[1], with_padding)
        ordinal = self.ordinals[key]
        return {ordinal.query if side == Q else ordinal.key: sympy.S.One}

    def _generator(self, term: Any) -> Linear | None:
        """A generator that numbers documents, or that is one number for the whole row; None for any other."""
        if isinstance(term, RunningSum):
            return self._running_sum(term)
        if isinstance(term, RunningMax):
            return self._running_max(term)
        if isinstance(term, SumOver):
            return {BOTH: ONE} if self._offsets.holds_both(term) else self._count_of_offsets(term)
        side = self.pair.side(term.args[3]) if isinstance(term, RepeatIndex) else None
        if side is None or not self._offsets.are_lengths(term):
            return None
        return self._ordinal(term.func(*term.args[:3], _TOKEN), side[0], with_padding=self._padded)

    def _running_sum(self, term: Any) -> Linear | None:
        """A running sum numbers documents where it adds 0 at every token but their first ones, and there 1 or more.

        position_ids                   0 1 2 0 1 0
        RunningSum(position_ids == 0)  1 1 1 2 2 3
        """
        inner, j, at = cast(tuple[Any, Any, Any], term.args)
        side = self.pair.side(at)
        # What is added is read as a mask is: of token j and the one before it.
        sub = Reader(self.sharding, self.leaves, Pair(j, j - 1, self.pair.batch), self.token_size)
        worlds = (World.SAME, World.ADJACENT, World.IN_PADDING)
        inside, first, padding = (sub.numbers(inner, Cell(world, (1, 1))) for world in worlds)
        key = RunningSum(inner, j, _TOKEN)
        if side is None or inside != frozenset({0.0}) or first is None:
            return None
        if first == frozenset({0.0}):  # one number for the whole row
            return {key: sympy.S.One}
        if not all(1 <= v < float("inf") for v in first):
            return None
        if isinstance(self.sharding.packing, DocumentIds) and not (padding and min(padding) >= 0):
            return None  # it might fall inside padding, back to an earlier document's number
        return self._ordinal(key, side[0], with_padding=sub.skips_end or self._padded)

    def _running_max(self, term: Any) -> Linear | None:
        """A running maximum of the index at documents' first tokens, 0 elsewhere, is where the document starts."""
        inner, j, at = cast(tuple[Any, Any, Any], term.args)
        side, choice = self.pair.side(at), outer_select(inner)
        if side is None or choice is None:
            return None
        condition: Any = choice.args[0]
        values = [sympy.expand(inner.xreplace({choice: value})) for value in choice.args[1:]]
        if values not in ([j, 0], [0, j]):
            return None
        sub = Reader(self.sharding, self.leaves, Pair(j, j - 1, self.pair.batch), self.token_size)
        at_start = [sub.truths(condition, Cell(world, (1, 1))) for world in (World.ADJACENT, World.SAME)]
        if at_start != [frozenset({values[0] == j}), frozenset({values[0] != j})]:
            return None
        return {side[0]: ONE, side[1]: -ONE}

    @property
    def _padded(self) -> bool:
        return isinstance(self.sharding.packing, CuSeqlens) and self.sharding.packing.padded_arg is not None

    def _count_of_offsets(self, term: Any) -> Linear | None:
        """How many offsets are <= the token's index (an Ordinal), or are that index (STARTS)."""
        found = self._offsets.counted(term)
        if found is None:
            return None
        # Offset 0 counts for every token, and the last one only tells the last document from what follows it.
        if found.first > 1 or not found.counts_starts:
            return None
        without_end = sympy.expand(found.last - found.size + 1) != 0
        if found.at_token:
            self.skips_end |= without_end
            return {STARTS: sympy.S.One} if found.side == Q else None
        key = term.xreplace({self.pair.at(found.side): _TOKEN})
        return self._ordinal(key, found.side, with_padding=self._padded or without_end)

    def _generator_trouble(self, term: Any) -> Trouble:
        """Why a generator numbers no documents: what it adds up can't be read, or is something else."""
        inner: Any = term.args[0]
        bound: Any = term.args[1]
        pair = Pair(bound, bound - 1, self.pair.batch, self.pair.others)
        sub = Reader(self.sharding, self.leaves, pair, self.token_size)
        troubles = sub.blame(inner)
        for trouble in troubles:
            # What a count reads at the query is no wrong place: only its own tokens were looked at.
            if trouble.reason is not Reason.MASK_NOT_PACKED and (
                trouble.reason is not Reason.MASK_WRONG_DIM or not isinstance(term, SumOver)
            ):
                return trouble
        what = {RunningSum: "a running sum", RunningMax: "a running maximum", SumOver: "a count (sum, any or all)"}
        name = what.get(term.func, "a repeated index")
        detail = f"{name} over tokens does not number the documents of {self.sharding.packing}"
        if len(str(inner)) < 60:
            detail += f": it adds up `{inner}`"
        if isinstance(self.sharding.packing, EndOfDocument | StartOfDocument):
            detail += "; EndOfDocument's token is a document's last one, StartOfDocument's its first"
        return Trouble(Reason.MASK_NOT_PACKED, detail)
