"""Tensors of fewer tokens than the row: whether their nodes may run on all rows, see `passes/rewrite/keep_rows.py`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.locality.claims.dims import fewer
from cp_rewrite.passes.locality.claims.tensor_state import Rows
from cp_rewrite.passes.values.sizes import token_count


def fewer_of(state: Any) -> int:
    """By how many tokens fewer than the row a node's tensors have; 0 where they have as many."""
    rows = [leaf for leaf in (tree_leaves(state) if isinstance(state, list) else [state]) if isinstance(leaf, Rows)]
    return next((by for leaf in rows if (by := fewer(leaf.dims))), 0)


def why_not_kept(node: fx.Node, states: Any, env: Mapping[fx.Node, Any], tokens: TokenAxis) -> str | None:
    """Why a node that makes such tensors, or reads them, can't run on all rows."""
    operands = [n for n in node.all_input_nodes if fewer_of(env.get(n))]
    if not operands and not fewer_of(states):
        return None
    size = tokens.inputs[0].tokens
    value = value_of(node)
    asked = node.users if isinstance(value, torch.Size) else [] if isinstance(value, Tensor | list | tuple) else [node]
    if any(n.target is not operator.getitem and n is not node for n in asked):
        return "reads all sizes of a tensor of fewer tokens than the row at once: read them one by one"
    given = [n for n in node.all_input_nodes if isinstance(value_of(n), torch.SymInt | torch.Size)]
    if any(token_count(value_of(n), size) is None for n in (*given, *asked)):
        return "takes a number that is made from fewer tokens than the row in another way than by adding"
    return None
