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
    prompt_ids(b, k), completion_ids(b, k)  Tree        IK, CNK; tin and tout: TIN_K, TOUT_K, see `within`
    segment_ids(b, k), parents(b, segment_ids(b, q))  Tree  NODE0 of the key, NODE1 of the query
    span_ids(b, q)                         any          SQ; a running sum of spans' first tokens: an Ordinal of spans
    RunningMax(j where a document starts)  any          the same

Any other term stays what it is, with a Trouble that says why.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import sympy
from sympy.core.function import AppliedUndef

from cp_rewrite.packing import (
    CuSeqlens,
    DocumentIds,
    EndOfDocument,
    PaddingMask,
    PositionIds,
    Spans,
    StartOfDocument,
    Tree,
    packing_args,
    whole_args,
)
from cp_rewrite.passes.predicate.context import Leaf
from cp_rewrite.passes.predicate.symbolic import ONE, TOKENS, Expr, Select
from cp_rewrite.passes.predicate.terms import GENERATORS, Trouble, maximal_terms
from cp_rewrite.passes.predicate.within import CNK, CNQ, SK, SQ, TIN_K, TIN_Q, TOUT_K, TOUT_Q, node_above
from cp_rewrite.passes.predicate.worlds import (
    BOTH,
    CK,
    CQ,
    END_K,
    END_Q,
    PK,
    PQ,
    START_K,
    START_Q,
    WK,
    WQ,
    Chunks,
    K,
    Linear,
    Q,
)
from cp_rewrite.refusal import Reason

from .numberings import Numberings, marks_of


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
        if leaf.role:
            return self._given_document(term, leaf)
        if isinstance(packing, CuSeqlens) and leaf.name in (packing.arg, packing.padded_arg):
            start = self._offsets.document_bound(term)
            self.skips_end |= start is not None and WK in start and self._offsets.merges_padding(term)
            detail = f"`{term}` reads {leaf.name!r} at no document's start or end"
            return start or self._trouble(term, Trouble(Reason.MASK_NOT_PACKED, detail))
        if isinstance(packing, Tree) and leaf.name == packing.parents:
            return self._node_above(packing, term, leaf)
        spans = self.sharding.spans
        if leaf.name in self._per_token:
            side = self._token_of(term, leaf)
            if side is not None and spans is not None and leaf.name == spans.arg:
                return self._mark_at(spans, side, leaf)
            if side is not None:
                return self._node_at(packing, side, leaf) if isinstance(packing, Tree) else self._value_at(side)
            detail = (
                f"{leaf.name!r} of shape {tuple(map(str, leaf.shape))} is read at [{', '.join(map(str, term.args))}], "
                f"but its token dim is {self.sharding.tokens[leaf.name]} and its row is the attention's own row"
            )
            return self._trouble(term, Trouble(Reason.MASK_WRONG_DIM, detail))
        return self._trouble(term, self._foreign(term, leaf))

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
            return self._trouble(term, Trouble(Reason.MASK_WRONG_DIM, detail))
        return self._ordinal(sympy.Symbol("documents of a mask"), side[0], with_padding=False)

    @property
    def _per_token(self) -> set[str]:
        """The arguments that tell documents, nodes or spans apart by a value per token."""
        packing, spans = self.sharding.packing, self.sharding.spans
        named = {*packing_args(packing)} - {*whole_args(packing)}
        return named if spans is None else named | {spans.arg}

    def _mark_at(self, spans: Spans, side: tuple[Expr, ...], leaf: Leaf) -> Linear:
        """What the spans' argument holds at a token."""
        self.marks = marks_of(spans, leaf)
        return {SQ if side[0] == Q else SK: sympy.S.One, ONE: sympy.Integer(self.marks.base)}

    def _node_at(self, tree: Tree, side: tuple[Expr, ...], leaf: Leaf) -> Linear:
        """What a tree's argument holds at a token."""
        query = side[0] == Q
        if tree.parents is not None:
            self.levels = self.levels or 0
            return {node_above(0, query): sympy.S.One}
        if leaf.name == tree.completion:
            return {CNQ if query else CNK: sympy.S.One}
        if leaf.name == tree.tin:
            return {TIN_Q if query else TIN_K: sympy.S.One}
        if tree.completion is None:
            return {TOUT_Q if query else TOUT_K: sympy.S.One}
        return {side[2]: sympy.S.One}

    def _node_above(self, tree: Tree, term: Any, leaf: Leaf) -> Linear:
        """The parent of a node that is the query's or the key's, or above it: `parents[parents[segment_ids]]`."""
        query, level = self._level_of(tree, term, leaf)
        if level is None:
            detail = f"`{term}` reads {leaf.name!r}, (nodes,) or (rows, nodes), at no node of the query or the key"
            return self._trouble(term, Trouble(Reason.MASK_WRONG_DIM, detail))
        self.levels = max(self.levels or 0, level)
        return {node_above(level, query): sympy.S.One}

    def _level_of(self, tree: Tree, term: Any, leaf: Leaf) -> tuple[bool, int | None]:
        """(whether it is the query's, how many levels up); None where a term is no node."""
        if leaf.name == tree.arg:
            side = self._token_of(term, leaf)
            return (False, None) if side is None else (side[0] == Q, 0)
        *rows, node = cast(tuple[Any, ...], term.args)
        if leaf.name != tree.parents or len(rows) > 1:
            return False, None
        at_row = all(leaf.shape[0] == 1 or row == self.pair.batch for row in rows)
        parts: tuple[Any, ...] = node.args
        if node.func is Select and parts[0] == sympy.Ge(parts[1], 0, evaluate=False):
            node = parts[1]  # as `clamp` makes it: nodes of documents' tokens count from 0
        inner = self.leaves.get(node.func) if at_row else None
        if inner is None or inner.trouble:
            return False, None
        query, level = self._level_of(tree, node, inner)
        return query, None if level is None else level + 1

    def _value_at(self, side: tuple[Expr, ...]) -> Linear:
        """What the packing's argument holds at a token, one number per token."""
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

    def _token_of(self, term: Any, leaf: Leaf) -> tuple[Expr, ...] | None:
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

    def _chunk_number(self, term: Any) -> Linear | None:
        """The chunk of the query or the key, x // size, or its place there, x % size, of its index or position x."""
        x, size = cast(Any, term.args if isinstance(term, sympy.Mod) else term.args[0].as_numer_denom())
        linear = self.linear(x) if size.is_Integer and size > 0 else {}
        key_of = {Q: K, K: K, PQ: PK, PK: PK, WQ: WK, WK: WK}
        if list(linear.values()) != [1] or not set(linear) <= set(key_of):
            return None
        (token,) = linear
        if token in (WQ, WK) and isinstance(self.sharding.packing, PositionIds):
            return None  # chunks of documents are counted from where these begin, which may be before the row
        chunks = Chunks(int(size), key_of[token])
        self.chunks = self.chunks or chunks
        if chunks != self.chunks:
            return None
        number = CQ if token in (Q, PQ, WQ) else CK
        return {number: ONE} if isinstance(term, sympy.floor) else {token: ONE, number: -size}
