"""What takes the place of a node that shifts, rolls or convolves tokens, on graph proxies.

x (B, T_l, C)  ->  rows (B T_l, C)  ->  neighbour_rows (E, C)  ->  (B, T_l, C)
                                          |
                                          convolve_rows (B T_l, C')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from cp_rewrite.passes.graph.new_nodes import size_of
from cp_rewrite.passes.graph.nodes import bind, needs_gradient, value_of
from cp_rewrite.passes.values.locality import NeighbourRead
from cp_rewrite.planning.plan_input import NEIGHBOURS

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
