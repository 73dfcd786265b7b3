"""Tensors of fewer tokens than the row, as of x[:, :-1]: on a rank they keep a row for each of its tokens.

    a = x[:, :-1]            S - 1 rows           a = x                S rows
    b = a.view(-1, n)        B (S - 1)     ->     b = a.view(-1, n)    B S
    n = a.shape[1]           S - 1                n = S - 1            as it was

Nodes that make such tensors are run again; numbers that are made from their sizes stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.new_nodes import fake_value, insert
from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.graph.regions import RegionCall, outputs_of
from cp_rewrite.passes.values.sizes import token_count
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.plan_input import HAS_TOKEN
from cp_rewrite.planning.token_reads.token_count import TokenCount

from .plan_inputs import Inputs


def keep_sizes(state: State, inputs: Inputs) -> None:
    """Let numbers that are read off such tensors be computed without them."""
    asked = [user for node in state.locality.fewer for user in node.users if not isinstance(value_of(user), Tensor)]
    numbers = [user for node in asked for user in ([node] if _is_number(node) else node.users)]
    for node in dict.fromkeys(numbers):
        if found := _of_tokens(node, state):
            node.replace_all_uses_with(_number(found, state, inputs, node))


def keep_rows(node: fx.Node, state: State, inputs: Inputs) -> None:
    """Run a node again on operands that keep all rows; sizes among its arguments are those of all rows."""
    by = state.locality.fewer[node]

    def changed(given: fx.Node) -> fx.Node:
        found = _of_tokens(given, state)
        return _number(found + TokenCount(found.times * by), state, inputs, node) if found else given

    node.args = fx.map_arg(node.args, changed)
    node.kwargs = fx.map_arg(node.kwargs, changed)
    node.meta["example_value"] = _with_gradients(value_of(node), fake_value(node, inputs.mode))


def enter_region(call: RegionCall, state: State) -> None:
    """Let a nested region be given all rows."""
    for placeholder, operand in call.filled.items():
        if placeholder in state.locality.fewer:
            placeholder.meta["example_value"] = value_of(operand)


def leave_region(call: RegionCall, state: State) -> None:
    """Let a nested region's call give all rows; they are those that the region returns."""
    if call.node in state.locality.fewer:
        returned = [value_of(x) if isinstance(x, fx.Node) else x for x in outputs_of(call.body)]
        value = value_of(call.node)
        new = type(value)(returned) if isinstance(value, list | tuple) else returned[0]
        call.node.meta["example_value"] = _with_gradients(value, new)


def _of_tokens(node: fx.Node, state: State) -> TokenCount | None:
    """The number that a node gives, if it changes with the tokens."""
    found = token_count(value_of(node), state.tokens.inputs[0].tokens) if _is_number(node) else None
    return found if found is not None and found.times else None


def _number(count: TokenCount, state: State, inputs: Inputs, before: fx.Node) -> fx.Node:
    """A node for a number, from the tokens of an input."""
    first, graph = state.tokens.inputs[0], before.graph
    source, dim = (first.node, first.dim) if graph is inputs.root.graph else (inputs.node(graph, HAS_TOKEN), 1)

    def emit() -> Any:
        return count.of(fx.Proxy(source).size(dim))

    return insert(before, emit, inputs.mode, "sizes of all rows")


def _is_number(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.SymInt | int)


def _with_gradients(old: Any, new: Any) -> Any:
    if isinstance(new, list | tuple):
        return type(new)(_with_gradients(a, b) for a, b in zip(old, new, strict=True))
    return new.detach().requires_grad_(old.requires_grad) if isinstance(new, Tensor) else new
