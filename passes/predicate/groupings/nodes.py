"""Nodes of trees: a query sees its own node and those above it.

CNQ, CNK    numbers of completions: 0 on the prompt.
NODEi       the number of the node i levels above the query's, that of its own for 0, where nodes tell their parents.
            A root is its own parent. NODEi of the key alike.
TIN, TOUT   ranges of nodes. Nodes are numbered along the row, so that [TIN, TOUT) of two nodes lie inside of one
            another where one is above the other, and apart otherwise. Without an argument `tin`, numbers are places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import sympy

from cp_rewrite.packing import Tree, packing_args
from cp_rewrite.passes.predicate.cells import CellValues
from cp_rewrite.passes.predicate.context import Leaf
from cp_rewrite.passes.predicate.symbolic import Expr, Select
from cp_rewrite.passes.predicate.worlds import ABOVE_0, BELOW_0, FROM_0, UP_TO_0, Cell, D, K, Linear, Q, Span, Trouble
from cp_rewrite.refusal import Reason

from .grouping import Form, Grouping, Kept, Relation, differs, sides

_CNQ, _CNK = sympy.symbols("CNQ CNK", integer=True)
_TIN_Q, _TIN_K, _TOUT_Q, _TOUT_K = sympy.symbols("TINq TINk TOUTq TOUTk", integer=True)
_COMPLETIONS = sympy.Symbol("completions", integer=True)
"""CNQ - CNK of two completions."""
_TINS, _TOUTS, _KEYS_END, _QUERYS_END = sympy.symbols("tins touts keysend querysend", integer=True)
"""TIN_Q - TIN_K; TOUT_Q - TOUT_K; TOUT_K - TIN_Q; TOUT_Q - TIN_K."""


class Kin(Enum):
    """How the key's node stands to the query's, in one tree."""

    NODE = " of its own node"
    ABOVE = " of a node above"
    BELOW = " of a node below"
    APART = " of another branch"


def _node_above(level: int, query: bool) -> sympy.Symbol:
    """NODEi of the query or of the key."""
    return sympy.Symbol(f"NODE{level}{'q' if query else 'k'}", integer=True)


def _nodes_apart(level: int) -> sympy.Symbol:
    """NODEi of the query - NODE0 of the key."""
    return sympy.Symbol(f"nodes{level}", integer=True)


@dataclass(frozen=True)
class NodeRelation(Relation):
    """kin: of two tokens of one tree; None: of two. depth: the key's node is so many levels above the query's."""

    nodes: TreeNodes
    kin: Kin | None = None
    depth: int | None = None

    def __str__(self) -> str:
        levels = self.nodes.levels
        deep = "" if self.depth is None else f", {self.depth} levels up"
        deep += " or more" if self.depth is not None and levels is not None and self.depth > levels else ""
        return ("" if self.kin is None else self.kin.value) + deep

    @property
    def plain(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kin in (None, Kin.NODE)

    @property
    def special(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kin not in (None, Kin.NODE)

    def _apart(self, cell: Cell) -> bool:
        """No node is above the other. A later key of no node of the tree may be padding, which has no range."""
        return self.kin is Kin.APART or (cell.other and cell.span[0] > 0)

    def reduced(self, cell: Cell, linear: Linear, add: Callable[[Expr, Expr], None]) -> set[Expr]:
        places, done = self.nodes.places, set[Expr]()
        tin = (K, D) if places else (_TIN_K, _TINS)
        pairs: dict[Expr, tuple[Expr, ...]] = self._parents(linear)
        if self.kin is Kin.NODE:
            pairs[_CNQ] = (_CNK,)
        elif sides(linear, _CNQ, _CNK):
            pairs[_CNQ] = (_CNK, _COMPLETIONS)
        if self.kin is not None or cell.other:
            if sides(linear, _TOUT_Q, _TOUT_K):
                pairs[_TOUT_Q] = (_TOUT_K, _TOUTS)
            elif _TOUT_Q in linear:
                pairs[_TOUT_Q] = (K if places else _TIN_K, _QUERYS_END)
            if _TOUT_K in linear and pairs.get(_TOUT_Q, (None,))[0] is not _TOUT_K:
                pairs[_TOUT_K] = (*tin, _KEYS_END)
            if not places:
                pairs[_TIN_Q] = tin
        for term, parts in pairs.items():
            if term in linear:
                done.add(term)
                for part in parts:
                    add(part, linear[term])
        return done

    def _parents(self, linear: Linear) -> dict[Expr, tuple[Expr, ...]]:
        """NODEi of the query, less the key's node, as that one and a difference."""
        key = _node_above(0, query=False)
        for level in self.nodes.read:
            term = _node_above(level, query=True)
            if term in linear and sides(linear, term, key):
                own = self.kin is Kin.NODE and level == 0
                equal = own or (self.kin is Kin.ABOVE and level == self.depth)
                return {term: (key,) if equal else (key, _nodes_apart(level))}
        return {}

    def _is_another_node(self, cell: Cell, level: int) -> bool:
        """True if the node `level` levels above the query's is never the key's. A root is above itself."""
        match self.kin:
            case Kin.NODE:
                return False
            case Kin.ABOVE:
                return self.depth is not None and level < self.depth
            case None:
                return cell.other and not cell.padding
            case _:
                return True

    def bounds(self, cell: Cell) -> dict[Expr, Span]:
        found = self._of_completions()
        if self.kin is Kin.NODE:
            found |= {_TINS: cell.never_falls, _TOUTS: (0.0, 0.0), _KEYS_END: ABOVE_0, _QUERYS_END: ABOVE_0}
        elif self.kin in (Kin.ABOVE, Kin.BELOW):
            above = self.kin is Kin.ABOVE
            found |= {_TINS: ABOVE_0 if above else BELOW_0, _TOUTS: UP_TO_0 if above else FROM_0}
            found |= {_KEYS_END: ABOVE_0, _QUERYS_END: ABOVE_0}
        elif self._apart(cell):
            first = cell.span[0] > 0
            found |= {_TINS: cell.by_order, _TOUTS: cell.by_order}
            found |= {_KEYS_END: UP_TO_0 if first else ABOVE_0, _QUERYS_END: ABOVE_0 if first else UP_TO_0}
        if self.kin is not None:
            found |= {_node_above(level, query): FROM_0 for level in self.nodes.read for query in (True, False)}
            found |= {_TIN_Q: FROM_0, _TIN_K: FROM_0, _TOUT_Q: ABOVE_0, _TOUT_K: ABOVE_0}
        return found

    def _of_completions(self) -> dict[Expr, Span]:
        match self.kin:
            case Kin.NODE:
                return {_CNQ: FROM_0, _CNK: FROM_0}
            case Kin.ABOVE:
                return {_CNQ: ABOVE_0, _CNK: (0.0, 0.0)}
            case Kin.BELOW:
                return {_CNQ: (0.0, 0.0), _CNK: ABOVE_0}
            case Kin.APART:
                return {_CNQ: ABOVE_0, _CNK: ABOVE_0}
            case None:
                return {}

    def nonzero(self, cell: Cell) -> set[Expr]:
        found = {_COMPLETIONS} if self.kin is Kin.APART else set[Expr]()
        return found | {_nodes_apart(level) for level in self.nodes.read if self._is_another_node(cell, level)}

    def expected(self, cell: Cell, form: Form) -> bool | type[Relation] | None:
        if not form.fields.get("tree") or self.plain:
            return Relation
        levels = form.fields["levels"]
        return self.kin is Kin.ABOVE and (levels is None or (self.depth or 0) <= levels)

    def alike(self, cell: Cell, form: Form) -> Relation:
        return NodeRelation(self.nodes, Kin.NODE)


@dataclass(frozen=True)
class TreeNodes(Grouping):
    """places: ranges of nodes count places in the row. levels: how many the mask reads nodes' parents up; None: it
    reads none."""

    places: bool
    levels: int | None = None
    relation = NodeRelation

    @property
    def read(self) -> range:
        """The levels of nodes that the mask reads."""
        return range(0 if self.levels is None else self.levels + 1)

    @classmethod
    def given(cls, reader: CellValues) -> TreeNodes | None:
        tree = reader.sharding.packing
        return cls(tree.tin is None) if isinstance(tree, Tree) else None

    @classmethod
    def at_token(cls, reader: CellValues, side: tuple[Expr, ...], leaf: Leaf) -> Linear | None:
        tree, query = reader.sharding.packing, side[0] == Q
        if not isinstance(tree, Tree) or leaf.name not in packing_args(tree):
            return None
        if tree.parents is not None:
            cls._reads(reader, 0)
            return {_node_above(0, query): sympy.S.One}
        if leaf.name == tree.completion:
            return {_CNQ if query else _CNK: sympy.S.One}
        if leaf.name == tree.tin:
            return {_TIN_Q if query else _TIN_K: sympy.S.One}
        if tree.completion is None:
            return {_TOUT_Q if query else _TOUT_K: sympy.S.One}
        return {side[2]: sympy.S.One}

    @classmethod
    def _reads(cls, reader: CellValues, level: int) -> None:
        """Note that the nodes so many levels up are read."""
        known = cast(TreeNodes | None, reader.groupings.get(cls) or cls.given(reader))
        assert known is not None
        reader.groupings[cls] = replace(known, levels=max(known.levels or 0, level))

    @classmethod
    def of_leaf(cls, reader: CellValues, term: Any, leaf: Leaf) -> Linear | None:
        """The parent of a node that is the query's or the key's, or above it: `parents[parents[segment_ids]]`."""
        tree = reader.sharding.packing
        if not isinstance(tree, Tree) or leaf.name != tree.parents:
            return None
        query, level = cls._level_of(reader, tree, term, leaf)
        if level is None:
            detail = f"`{term}` reads {leaf.name!r}, (nodes,) or (rows, nodes), at no node of the query or the key"
            return reader.unread(term, Trouble(Reason.MASK_WRONG_DIM, detail))
        cls._reads(reader, level)
        return {_node_above(level, query): sympy.S.One}

    @classmethod
    def _level_of(cls, reader: CellValues, tree: Tree, term: Any, leaf: Leaf) -> tuple[bool, int | None]:
        """(whether it is the query's, how many levels up); None where a term is no node."""
        if leaf.name == tree.arg:
            side = reader.token_of(term, leaf)
            return (False, None) if side is None else (side[0] == Q, 0)
        *rows, node = cast(tuple[Any, ...], term.args)
        if leaf.name != tree.parents or len(rows) > 1:
            return False, None
        at_row = all(leaf.shape[0] == 1 or row == reader.pair.batch for row in rows)
        parts: tuple[Any, ...] = node.args
        if node.func is Select and parts[0] == sympy.Ge(parts[1], 0, evaluate=False):
            node = parts[1]  # as `clamp` makes it: nodes of documents' tokens count from 0
        inner = reader.leaves.get(node.func) if at_row else None
        if inner is None or inner.trouble:
            return False, None
        query, level = cls._level_of(reader, tree, node, inner)
        return query, None if level is None else level + 1

    def relations(self, cell: Cell) -> Sequence[Relation | None]:
        """Nodes above come before those below; where a mask reads parents, by each of the levels that it reads, and all
        further ones."""
        if not cell.same:
            return (self.unknown,)
        low, high = cell.span
        kins = (Kin.NODE, *(Kin.ABOVE,) * (low > 0), *(Kin.BELOW,) * (high < 0), *(Kin.APART,) * (low > 0 or high < 0))
        levels = self.levels
        return [
            NodeRelation(self, kin, depth)
            for kin in kins
            for depth in (range(1, levels + 2) if kin is Kin.ABOVE and levels is not None else (None,))
        ]

    @property
    def unknown(self) -> Relation:
        return NodeRelation(self)

    def fields(self, kept: Kept, plain: Kept) -> dict[str, Any]:
        """levels: how many a query sees above its own node, by the last one; None: all, or no parents are read."""
        depths = [r.depth or 0 for cell, seen in kept.items() if seen and (r := cell.of(NodeRelation)) is not None]
        last = max(depths, default=0)
        levels = last if self.levels is not None and last <= self.levels else None
        return {"tree": differs(kept, plain, NodeRelation), "levels": levels}
