"""What an op runs for a region of a graph: the region's nodes as ATen graphs, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_map

from cp_rewrite.ops.tiles import Region, RowDim
from cp_rewrite.passes.graph.new_nodes import autocasts_open, call, traced, tracing
from cp_rewrite.passes.graph.nodes import needs_gradient, value_of
from cp_rewrite.passes.locality.claims.dims import T
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.claims.tensor_state import Rows
from cp_rewrite.passes.tile.find_region import TileRegion
from cp_rewrite.torch_internals import FakeTensorMode, enable_python_dispatcher, hint


def traced_region(found: TileRegion, extents: Extents, mode: FakeTensorMode, inner: str) -> Region:
    """What the op runs: the region's nodes as ATen graphs, with autocast decided, and their gradients."""
    body = _Body(found, extents)
    result_dims = tuple(
        _row_dim(state, n, extents) if isinstance(state := found.states[n], Rows) else None for n in found.results
    )
    examples = [_contiguous(value_of(n).permute(order_of(n)), mode) for n in body.operands]
    with autocasts_open(found.mode[0]):
        with tracing(mode), mode, enable_python_dispatcher(), torch.enable_grad():
            out = body.run(*(x.detach().requires_grad_(i in body.needed) for i, x in enumerate(examples)))
        of = body.differentiable = tuple(i for i, x in enumerate(out) if x.requires_grad)
        # Where all is computed again, gradients that are made at once would be made twice.
        scalar = len(of) == 1 and result_dims[of[0]] is None and out[of[0]].ndim == 0 and not found.again
        upstream = [_contiguous(out[i], mode) for i in of]
        forward = _plain(traced(body.run, examples, mode))
        gradients = _plain(traced(body.gradients, [*examples, *upstream], mode)) if of and not scalar else None
        both = _plain(traced(body.both, examples, mode)) if scalar else None
    needed = body.needed if of else ()
    return Region(forward, gradients, both, body.row_dims, result_dims, of, needed, inner, found.chunks)


class _Body:
    """A region's nodes as functions of its operands, rows first. needed: operands that gradients go to.

    Operands and results lie in memory as they do in the graph, and come with their dims in that order: a view that is
    taken of them there can be taken of them here.
    """

    def __init__(self, found: TileRegion, extents: Extents) -> None:
        self.found, self.extents = found, extents
        self.operands = [*found.rows, *found.wholes]
        self.numbers = {n for x in found.nodes for n in x.all_input_nodes} - {*found.nodes, *self.operands}
        assert not any(isinstance(value_of(n), Tensor) for n in self.numbers), (
            "a region names all tensors that it reads"
        )
        self.row_dims = tuple(_row_dim(found.states[n], n, extents) for n in found.rows)
        self.needed = tuple(i for i, n in enumerate(self.operands) if found.mode[1] and _may_need_gradient(n))
        self.differentiable: tuple[int, ...] = ()

    def run(self, *values: Any) -> list[Tensor]:
        """Results of some rows."""
        rows = self.row_dims[0].rows(values[0])
        env: dict[fx.Node, Any] = {n: _in_order(x, n) for n, x in zip(self.operands, values, strict=True)}
        env |= {n: tree_map(lambda x: _number(x, rows, self.extents), value_of(n)) for n in self.numbers}
        for node in self.found.nodes:
            env[node] = call(node, env.__getitem__)
        return [env[node].permute(order_of(node)) for node in self.found.results]

    def both(self, *values: Any) -> list[Tensor]:
        """Results, and gradients of what needs them; those of results come behind the operands, or are 1."""
        given = [x.detach().requires_grad_(i in self.needed) for i, x in enumerate(values[: len(self.operands)])]
        with torch.enable_grad():
            out = self.run(*given)
        wanted, of = [given[i] for i in self.needed], [out[i] for i in self.differentiable]
        upstream = values[len(self.operands) :] or [torch.ones_like(x) for x in of]
        found = torch.autograd.grad(of, wanted, upstream, allow_unused=True)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
        return [x.detach() for x in out] + grads

    def gradients(self, *values: Any) -> list[Tensor]:
        """Gradients alone."""
        return self.both(*values)[len(self.found.results) :]


def _plain(module: fx.GraphModule) -> fx.GraphModule:
    """The same as a module that Dynamo reads: make_fx gives one that writes its code when it is first called."""
    return fx.GraphModule(module, module.graph)


def _may_need_gradient(node: fx.Node) -> bool:
    """Whether gradients reach a node's tensor; of one that the rewrite made, whether they reach what it is made of."""
    if needs_gradient(node) or "cp_rewrite" not in node.meta:
        return needs_gradient(node)
    value = value_of(node)
    differentiable = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return differentiable and any(map(_may_need_gradient, node.all_input_nodes))


def _contiguous(value: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def order_of(node: fx.Node) -> list[int]:
    """The dims of a node's tensor, those with the largest strides first."""
    strides = [hint(stride) for stride in value_of(node).stride()]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _in_order(x: Any, node: fx.Node) -> Any:
    """The inverse of `order_of`, of a tensor that came in that order."""
    order = order_of(node)
    return x.permute([order.index(dim) for dim in range(len(order))])


def _row_dim(state: Rows, node: fx.Node, extents: Extents) -> RowDim:
    factors = state.dims[state.token_dim] or ()
    where = factors.index(T)
    before, after = (_product(part, extents) for part in (factors[:where], factors[where + 1 :]))
    return RowDim(order_of(node).index(state.token_dim), before, after)


def _product(factors: Sequence[Any], extents: Extents) -> int:
    count: Any = 1
    for factor in factors:
        count = count * extents.of(factor)
    return int(count)


def _number(value: Any, rows: Any, extents: Extents) -> Any:
    """A number of the graph among `rows` rows."""
    if not isinstance(value, torch.SymInt):
        return value
    found = extents.token_count(value)
    assert found is not None, f"{value} is no number of rows"
    return found.of(rows)
