"""What takes the place of a node that shifts, rolls or convolves tokens, on graph proxies.

x (B, T_l, C)  ->  rows (B T_l, C)  ->  neighbour_rows (E, C)  ->  (B, T_l, C)
                                          |
                                          convolve_rows (B T_l, C')

Tensors of fewer tokens than the row, as of x[:, :-1]: on a rank they keep a row for each of its tokens.

    a = x[:, :-1]            S - 1 rows           a = x                S rows
    b = a.view(-1, n)        B (S - 1)     ->     b = a.view(-1, n)    B S
    n = a.shape[1]           S - 1                n = S - 1            as it was

Nodes that make such tensors are run again; numbers that are made from their sizes stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.new_nodes import fake_value, insert, size_of
from cp_rewrite.passes.graph.nodes import bind, needs_gradient, value_of
from cp_rewrite.passes.graph.regions import RegionCall, outputs_of
from cp_rewrite.passes.values.locality import NeighbourRead
from cp_rewrite.passes.values.sizes import token_count
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.plan_input import HAS_TOKEN, NEIGHBOURS
from cp_rewrite.planning.token_reads.token_count import TokenCount

from .plan_inputs import Inputs

Proxies = Callable[[fx.Node], Any]


def read_neighbours(read: NeighbourRead, proxy: Proxies, plan: Sequence[Any]) -> Any:
    """The new value of `read.node`. Args: proxy: of a node. plan: the tensors of `PlanInput.of_neighbours`."""
    if read.read is None:
        return _cut_off(read, proxy(read.source))
    dims = [dim for dim in (read.batch_dim, read.token_dim) if dim is not None]
    ndim = value_of(read.source).ndim
    x = proxy(read.source).movedim(dims, list(range(len(dims))))
    rows = _rows(x, len(dims), ndim)
    extras = [_extra(of, count, rows, dims, ndim, proxy) for of, count in read.extras]
    others = torch.cat(extras, 1) if extras else rows.narrow(1, 0, 0)
    tables = plan[: len(NEIGHBOURS)]
    op: Any = torch.ops.cp_rewrite.neighbour_rows.default
    found = op(rows.flatten(0, 1), others.flatten(0, 1), *tables, read.group)
    if read.conv is None:
        found = found.view_as(x).movedim(list(range(len(dims))), dims)
    else:
        batch = size_of(proxy(read.source), 0)
        found = _convolved(read.conv, found, plan[-1], proxy).unflatten(0, (batch, -1)).transpose(1, 2)
    return _cut_off(read, found)


def _cut_off(read: NeighbourRead, x: Any) -> Any:
    """Without a gradient, where the node has none."""
    cut = not needs_gradient(read.node) and value_of(read.node).is_floating_point()
    return x.detach() if cut else x


def _rows(x: Any, leading: int, ndim: int) -> Any:
    """(B, T, C) of a tensor of `ndim` dims, whose `leading` ones are (B, T) or (T,)."""
    x = x.flatten(leading) if ndim > leading + 1 else x.unsqueeze(-1) if ndim == leading else x
    return x if leading == 2 else x.unsqueeze(0)


def _extra(of: fx.Node | float, count: int, rows: Any, dims: Sequence[int], ndim: int, proxy: Proxies) -> Any:
    """(B, count, C): rows that all ranks have."""
    if not isinstance(of, fx.Node):
        return torch.full_like(rows.narrow(1, 0, 1), of)
    own = proxy(of).narrow(dims[-1], 0, count).movedim(list(dims), list(range(len(dims))))
    return _rows(own, len(dims), ndim)


def _convolved(node: fx.Node, rows_EC: Any, out_rows: Any, proxy: Proxies) -> Any:
    """(B T_l, channels): a conv1d node on the entries of each token."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = bind(node, names, bias=None, dilation=1, groups=1)
    weight, bias = (proxy(x) if isinstance(x, fx.Node) else x for x in (given["weight"], given["bias"]))
    dilation = given["dilation"] if isinstance(given["dilation"], int) else given["dilation"][0]
    dtype = value_of(node).dtype  # autocast casts what a convolution is given, but no op of ours
    rows, weight, bias = (x if x is None else x.to(dtype) for x in (rows_EC, weight, bias))
    op: Any = torch.ops.cp_rewrite.convolve_rows.default
    return op(rows, weight, bias, out_rows, dilation, given["groups"])


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
