"""Recognise the row's tokens in a mask's symbolic value: their index, their position, the document that holds them.

    term                                   packing      is read as
    q                                      any          Q, the query's index
    floor(q / 4)                           any          CQ, the number of the query's chunk of 4 tokens
    position_ids(b, k)                     PositionIds  PK, the key's position
    doc_ids(b, q)                          DocumentIds  IQ, the id of the query's document
    RunningSum(position_ids(b, j) == 0)    PositionIds  an Ordinal: a number that grows from document to document
    RunningSum(input_ids(b, j - 1) == 2)   EndOfDocument  an Ordinal
    SumOver(cu_seqlens(i) <= q)            CuSeqlens    an Ordinal
    cu_seqlens(the token's document)       CuSeqlens    Q - WQ, the index of its first token
    prompt_ids(b, k), completion_ids(b, k)  Tree        IK, CNK; tin and tout: TIN_K, TOUT_K, see `groupings.nodes`
    segment_ids(b, k), parents(b, segment_ids(b, q))  Tree  NODE0 of the key, NODE1 of the query
    span_ids(b, q)                         any          SQ; a running sum of spans' first tokens: an Ordinal of spans
    RunningMax(j where a document starts)  any          the same

Any other term stays what it is, with a Trouble that says why.

    Count, Offsets    how masks read the offsets at which documents start (`CuSeqlens`)
    Numberings        terms that number documents, or say where one starts
    Reader            all terms
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from cp_rewrite.packing import (
    CuSeqlens,
    DocumentIds,
    EndOfDocument,
    Packing,
    PaddingMask,
    StartOfDocument,
    Tree,
    packing_args,
    whole_args,
)
from cp_rewrite.refusal import Reason

from .cells import CellValues
from .context import Leaf
from .groupings.table import GROUPINGS
from .symbolic import ONE, TOKENS, Expr, RepeatIndex, RunningMax, RunningSum, Select, SumOver, outer_select
from .worlds import (
    BOTH,
    END_K,
    END_Q,
    GENERATORS,
    LK,
    LQ,
    START_K,
    START_Q,
    STARTS,
    WK,
    WQ,
    Cell,
    K,
    Linear,
    Ordinal,
    Pair,
    Q,
    Trouble,
    World,
    maximal_terms,
)


@dataclass(frozen=True)
class Count:
    """A count of offsets up to a token, or (`at_token`) at it.

    Args:
        first, last: which offsets are counted. size: how many there are.
        side: Q or K, the token.
    """

    first: Expr
    last: Expr
    size: Expr
    side: Expr
    at_token: bool

    @property
    def counts_starts(self) -> bool:
        """True if the starts of all documents are counted: all offsets from `first` on, but perhaps the last."""
        return sympy.expand(self.last - self.size + 2).is_negative is False


@dataclass(frozen=True)
class Offsets:
    """The offsets that `packing` names, among the leaves that a mask reads.

    cu_seqlens                             0 3 5 6       documents of 3, 2 and 1 tokens
    q                                      0 1 2 3 4 5
    SumOver(cu_seqlens(i) <= q)            1 1 1 2 2 3   counts the offsets up to the token: `counted`
    RepeatIndex(cu_seqlens(i + 1) - …(i))  0 0 0 1 1 2   repeats each document's number: `are_lengths`
    cu_seqlens(that number)                0 0 0 3 3 5   is where the token's document starts: `document_bound`
    """

    packing: Packing
    leaves: Mapping[Any, Leaf]
    pair: Pair

    def leaf(self, term: Any) -> Leaf | None:
        """The leaf, if `term` reads the offsets; None for other terms."""
        packing = self.packing
        leaf = self.leaves.get(term.func)
        if not isinstance(packing, CuSeqlens) or leaf is None or len(term.args) != 1:
            return None
        return leaf if leaf.name == (packing.padded_arg or packing.arg) else None

    def are_lengths(self, term: Any) -> bool:
        """True if a RepeatIndex repeats each document's number as often as it has tokens."""
        lengths, i, count = term.args[:3]
        reads = [t for t in maximal_terms(lengths) if isinstance(t, AppliedUndef)]
        leaves = [self.leaf(t) for t in reads]
        if len(reads) != 2 or any(leaf is None for leaf in leaves) or leaves[0] is not leaves[1]:
            return False
        read = reads[0].func
        assert leaves[0] is not None
        return sympy.expand(lengths - read(i + 1) + read(i)) == 0 and leaves[0].shape[0] - count == 1

    def counted(self, term: Any) -> Count | None:
        """The offsets that a SumOver counts; None: it counts none, or not by the query's or the key's token."""
        inner, i, count = term.args
        if not (isinstance(inner, Select) and isinstance(inner.args[0], Relational) and inner.args[1:] == (1, 0)):
            return None
        found = self._bound(inner.args[0])
        if found is None or found[0] == "StrictGreaterThan":
            return None
        op, place, side, size = found
        first = sympy.expand(place - i)
        if not first.is_Integer or first.is_negative:
            return None
        return Count(first, first + count - 1, size, side, op == "Equality")

    def _bound(self, relation: Any) -> tuple[str, Expr, Expr, Expr] | None:
        """(op, place, side, size) of a relation `offsets[place] op token at Q or K`, of `size` offsets."""
        reads = [t for t in maximal_terms(relation.lhs) if isinstance(t, AppliedUndef)]
        leaf = self.leaf(reads[0]) if len(reads) == 1 else None
        if leaf is None:
            return None
        slope = relation.lhs.coeff(reads[0])
        rest = sympy.expand(-(relation.lhs - slope * reads[0]) / slope) if slope in (1, -1) else sympy.nan
        op = type(relation).__name__ if slope == 1 else type(relation.reversed).__name__
        # Of integers, offset < x is offset <= x - 1, and offset >= x is offset > x - 1.
        moved = {"StrictLessThan": "LessThan", "GreaterThan": "StrictGreaterThan"}
        if op in moved:
            op, rest = moved[op], sympy.expand(rest - 1)
        side = self.pair.side(rest) if op in ("LessThan", "StrictGreaterThan", "Equality") else None
        return None if side is None else (op, reads[0].args[0], side[0], leaf.shape[0])

    def holds_both(self, term: Any) -> bool:
        """True if a SumOver counts the documents that hold query and key:
        offsets[i] <= q < offsets[i + 1] and the same of k."""
        inner, i, count = term.args
        if not (isinstance(inner, Select) and isinstance(inner.args[0], sympy.And) and inner.args[1:] == (1, 0)):
            return False
        bounds = [self._bound(relation) for relation in inner.args[0].args if isinstance(relation, Relational)]
        known = [bound for bound in bounds if bound is not None]
        asked = {(op, place, side) for op, place in (("LessThan", i), ("StrictGreaterThan", i + 1)) for side in (Q, K)}
        whole = len(known) == len(inner.args[0].args) and {bound[:3] for bound in known} == asked
        return whole and not self._padded and all(sympy.expand(size - count - 1) == 0 for *_, size in known)

    def document_bound(self, term: Any) -> Linear | None:
        """offsets[number of the token's document], as the token's index less its place in the document, or the offset
        behind it, as the index and the tokens from there to the end; None for other reads."""
        if self.leaf(term) is None:
            return None
        for number in maximal_terms(term.args[0]):
            index = sympy.expand(term.args[0] - number)
            side, start = None, sympy.S.Zero
            if isinstance(number, RepeatIndex) and self.are_lengths(number):
                side = self.pair.side(number.args[3])
            found = self.counted(number) if isinstance(number, SumOver) else None
            # All starts must be counted, the one at offset 0 aside.
            if found is not None and not found.at_token and found.first in (0, 1) and found.counts_starts:
                side, start = (found.side,), found.first - 1
            if side is not None and index == start:
                return {side[0]: sympy.S.One, WQ if side[0] == Q else WK: -sympy.S.One}
            if side is not None and index == start + 1 and not self._padded:
                return {side[0]: sympy.S.One, LQ if side[0] == Q else LK: sympy.S.One}
        return None

    def merges_padding(self, term: Any) -> bool:
        """True if a document's bound is that of the padding behind it too: the last offset ends no document there."""
        counts = [self.counted(number) for number in maximal_terms(term.args[0]) if isinstance(number, SumOver)]
        return self._padded or any(found is None or sympy.expand(found.last - found.size) != -1 for found in counts)

    @property
    def _padded(self) -> bool:
        """True if documents end before the next offset."""
        return isinstance(self.packing, CuSeqlens) and self.packing.padded_arg is not None


_TOKEN = sympy.Symbol("token", integer=True, nonnegative=True)


class Numberings(CellValues):
    """Reads terms that number documents, or say where one starts: counts, running sums and maxima, repeated indices."""

    @cached_property
    def _offsets(self) -> Offsets:
        return Offsets(self.sharding.packing, self.leaves, self.pair)

    def _ordinal(self, key: Expr, side: Expr, with_padding: bool, of: type[Any] | None = None) -> Linear:
        """A numbering's value at the query or the key. `key`: the term, its token replaced by `_TOKEN`."""
        if key not in self.ordinals:
            n = len(self.ordinals)
            names = sympy.symbols(f"G{n}q G{n}k", integer=True)
            self.ordinals[key] = Ordinal(names[0], names[1], with_padding, of)
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
        sub = self.beside(Pair(j, j - 1, self.pair.batch))
        worlds = (World.SAME, World.ADJACENT, World.IN_PADDING)
        inside, first, padding = (sub.numbers(inner, self._side_by_side(world)) for world in worlds)
        key = RunningSum(inner, j, _TOKEN)
        numbered = next((each for each in GROUPINGS if side and each.is_numbered(self, inner, j)), None)
        if side is not None and numbered is not None:
            return self._ordinal(key, side[0], with_padding=False, of=numbered.relation)
        if side is None or inside != frozenset({0.0}) or first is None:
            return None
        if first == frozenset({0.0}):  # one number for the whole row
            return {key: sympy.S.One}
        if not all(1 <= v < float("inf") for v in first):
            return None
        if isinstance(self.sharding.packing, DocumentIds | Tree) and not (padding and min(padding) >= 0):
            return None  # it might fall inside padding, back to an earlier document's number
        return self._ordinal(key, side[0], with_padding=sub.skips_end or self._padded)

    def _side_by_side(self, world: World) -> Cell:
        """The cell of a token and the one before it, of whose groups nothing is known."""
        given = (grouping.given(self) for grouping in GROUPINGS)
        unknown = (each.unknown for each in given if each is not None)
        return Cell(world, (1, 1), tuple(each for each in unknown if each is not None))

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
        sub = self.beside(Pair(j, j - 1, self.pair.batch))
        at_start = [sub.truths(condition, self._side_by_side(world)) for world in (World.ADJACENT, World.SAME)]
        if at_start != [frozenset({values[0] == j}), frozenset({values[0] != j})]:
            return None
        return {side[0]: ONE, WQ if side[0] == Q else WK: -ONE}

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
        sub = self.beside(pair)
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


class Reader(Numberings):
    """Turns relations between a mask's terms into relations between Q, K, PQ, … of `worlds`."""

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
            return self._generator(term) or self.unread(term, self._generator_trouble(term))
        if isinstance(term, sympy.floor | sympy.Mod):
            found = (grouping.of_term(self, term) for grouping in GROUPINGS)
            return next(filter(None, found), None) or self.unread(term, self._plain_trouble(term))
        return self.unread(term, self._plain_trouble(term))

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
            return self.unread(term, Trouble(Reason.MASK_UNSUPPORTED_OP, leaf.trouble, leaf.node))
        if leaf.role:
            return self._given_document(term, leaf)
        if isinstance(packing, CuSeqlens) and leaf.name in (packing.arg, packing.padded_arg):
            start = self._offsets.document_bound(term)
            self.skips_end |= start is not None and WK in start and self._offsets.merges_padding(term)
            detail = f"`{term}` reads {leaf.name!r} at no document's start or end"
            return start or self.unread(term, Trouble(Reason.MASK_NOT_PACKED, detail))
        found = next(filter(None, (grouping.of_leaf(self, term, leaf) for grouping in GROUPINGS)), None)
        if found is not None:
            return found
        if leaf.name in self._per_token:
            side = self.token_of(term, leaf)
            if side is not None:
                found = (grouping.at_token(self, side, leaf) for grouping in GROUPINGS)
                return next(filter(None, found), None) or self._value_at(side)
            detail = (
                f"{leaf.name!r} of shape {tuple(map(str, leaf.shape))} is read at [{', '.join(map(str, term.args))}], "
                f"but its token dim is {self.sharding.tokens[leaf.name]} and its row is the attention's own row"
            )
            return self.unread(term, Trouble(Reason.MASK_WRONG_DIM, detail))
        return self.unread(term, self._foreign(term, leaf))

    def _given_document(self, term: Any, leaf: Leaf) -> Linear:
        """The number of the query's or the key's document in a mask of the batch, at [row, token]."""
        row, token = term.args
        side = self.pair.side(token)
        if (
            side is None
            or (side[0] == Q) != (leaf.role == "query")
            or not (leaf.shape[0] == 1 or row == self.pair.batch)
        ):
            detail = f"the mask reads {leaf.name} at [{row}, {token}], not at the attention's own row and tokens"
            return self.unread(term, Trouble(Reason.MASK_WRONG_DIM, detail))
        return self._ordinal(sympy.Symbol("documents of a mask"), side[0], with_padding=False)

    @property
    def _per_token(self) -> set[str]:
        """The arguments that tell documents, or groups of their tokens, apart by a value per token."""
        packing = self.sharding.packing
        named = {*packing_args(packing)} - {*whole_args(packing)}
        return named.union(*(grouping.arguments(self) for grouping in GROUPINGS))

    def _value_at(self, side: tuple[Expr, ...]) -> Linear:
        """The value of the packing's argument at a token, one number per token."""
        match self.sharding.packing:
            case DocumentIds(padding=padding):
                return {side[2]: sympy.S.One, ONE: sympy.Integer(padding + 1)}
            case EndOfDocument(token_id=token):
                return {END_Q if side[0] == Q else END_K: sympy.S.One, ONE: sympy.Integer(token)}
            case StartOfDocument(token_id=token):
                return {START_Q if side[0] == Q else START_K: sympy.S.One, ONE: sympy.Integer(token)}
            case PaddingMask():  # keys of other documents are padding
                return {ONE if side[0] == Q else BOTH: sympy.S.One}
            case _:
                return {side[1]: sympy.S.One}

    def _foreign(self, term: Any, leaf: Leaf) -> Trouble:
        """Why a read of another tensor than the packing's is a trouble."""
        at = {self.pair.side(i) for i in term.args}
        if any(s and s[0] == Q for s in at) and any(s and s[0] == K for s in at):
            return self._table(leaf)
        if leaf.name.startswith("%"):
            detail = f"the mask reads `{leaf.name[1:]}`, whose values come from the model, not from the batch"
            return Trouble(Reason.MASK_OPAQUE, detail, leaf.node)
        return Trouble(
            Reason.MASK_WRONG_SOURCE,
            f"the mask reads {leaf.name!r}, but the annotation's packing is {self.sharding.packing}"
            + ("" if self.sharding.spans is None else f", its spans are {self.sharding.spans}"),
        )

    def _table(self, leaf: Leaf) -> Trouble:
        """Why numbers for pairs of tokens that are read off a leaf are a trouble."""
        if leaf.node is None or leaf.node.op in ("placeholder", "get_attr"):
            return Trouble(Reason.MASK_OPAQUE, f"{leaf.name!r} already is a mask: its values are not in the graph")
        detail = (
            f"`{leaf.node.name}`, which is added to the logits, comes from the model's weights: a bias that is "
            "learned, or keys that are chosen by scores"
        )
        return Trouble(Reason.MASK_NOT_PACKED, detail, leaf.node)
