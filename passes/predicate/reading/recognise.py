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
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from cp_rewrite.packing import (
    CuSeqlens,
    DocumentIds,
    EndOfDocument,
    PaddingMask,
    StartOfDocument,
    packing_args,
    whole_args,
)
from cp_rewrite.passes.predicate.context import Leaf
from cp_rewrite.passes.predicate.groupings.table import GROUPINGS
from cp_rewrite.passes.predicate.symbolic import ONE, TOKENS, Expr
from cp_rewrite.passes.predicate.terms import GENERATORS, Trouble, maximal_terms
from cp_rewrite.passes.predicate.worlds import (
    BOTH,
    END_K,
    END_Q,
    START_K,
    START_Q,
    WK,
    K,
    Linear,
    Q,
)
from cp_rewrite.refusal import Reason

from .numberings import Numberings


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
