"""Ops that run a region tile by tile, so that what is wide for each token is there for one tile at a time.

A region makes of rows, each by itself, other rows, or sums over rows. It comes as ATen graphs, kept here under a name
that is made from what they do (`passes/rewrite/tile_rows.py` makes them).

Shapes: R local rows; a tile is some of them, in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.fx as fx
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.kernels.cuda import nvtx


@dataclass(frozen=True)
class RowDim:
    """The dim of a tensor that counts rows: `before` * R * `after` entries."""

    dim: int
    before: int = 1
    after: int = 1

    def rows(self, x: Tensor) -> int:
        """R, how many rows `x` has."""
        return x.shape[self.dim] // (self.before * self.after)

    def cut(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The entries of rows `start` to `stop`: a view, or a copy where rows of the batch stand side by side."""
        parts = x.unflatten(self.dim, (self.before, -1, self.after))
        return parts.narrow(self.dim + 1, start, stop - start).flatten(self.dim, self.dim + 2)

    def write(self, into: Tensor, x: Tensor, start: int, stop: int) -> None:
        """Put a tile's entries in their place among all rows'."""
        parts = into.unflatten(self.dim, (self.before, -1, self.after))
        found = x.unflatten(self.dim, (self.before, -1, self.after))
        parts.narrow(self.dim + 1, start, stop - start).copy_(found)

    def empty(self, tile: Tensor, tile_rows: int, rows: int) -> Tensor:
        """An unwritten tensor for all rows' entries, like those of a tile."""
        shape = [*tile.shape]
        shape[self.dim] = shape[self.dim] // max(1, tile_rows) * rows if tile_rows else 0
        return tile.new_empty(shape)


@dataclass
class Region:
    """The computation of one tile.

    Args:
        forward: (*rows, *wholes) -> results.
        gradients: (*rows, *wholes, *gradients of `differentiable` results) -> gradients of `needed` operands; None: no
            gradient is asked for, or `both` gives it.
        both: (*rows, *wholes) -> results and gradients of `needed` operands where that of the one differentiable
            result, a scalar, is 1.
        row_dims: of each operand that has rows. result_dims: of each result; None: it is a sum over rows.
        differentiable: which results gradients come to. needed: which operands gradients go to, rows first.
        inner: the compiler that gets these graphs.
        chunks: how many tiles there are; 0: as few as do.
    """

    forward: fx.GraphModule
    gradients: fx.GraphModule | None
    both: fx.GraphModule | None
    row_dims: tuple[RowDim, ...]
    result_dims: tuple[RowDim | None, ...]
    differentiable: tuple[int, ...]
    needed: tuple[int, ...]
    inner: str
    chunks: int = 0
    _compiled: dict[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])

    def run(self, which: str, tile: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        """One of the graphs, by name, on a tile's rows and what all tiles share."""
        if which not in self._compiled:
            graph: fx.GraphModule = getattr(self, which)
            again = fx.GraphModule(graph, graph.graph)  # Dynamo skips code that was made while it traced
            plain = self.inner == "eager"
            self._compiled[which] = graph if plain else torch.compile(again, backend=self.inner, fullgraph=True)
        for x, at in zip(tile, self.row_dims, strict=False):
            torch._dynamo.maybe_mark_dynamic(x, at.dim)
        with torch.no_grad():
            return list(self._compiled[which](*tile, *others))


REGIONS: dict[str, Region] = {}
"""Name -> region. A name is made from what the region does: equal names, equal regions."""


def run_tiles(
    region: Region,
    rows: Sequence[Tensor],
    wholes: Sequence[Tensor],
    tile: int,
    part: Literal["forward", "gradients", "both"] = "forward",
    dims: Sequence[RowDim | None] | None = None,
    grads: Sequence[tuple[Tensor, RowDim | None]] = (),
) -> list[Tensor]:
    """A part of the region on all tiles in turn: what has rows is put together, the rest is added up.

    Args:
        dims: of what the part gives; None: the results'. grads: read behind `wholes`, cut where they have rows.
    """
    dims = region.result_dims if dims is None else dims
    total, wholes = region.row_dims[0].rows(rows[0]), [x.contiguous() for x in wholes]
    out: list[Tensor] = []
    dtypes: list[torch.dtype] = []
    for place in _tiles(total, -(-total // region.chunks) if region.chunks else tile):
        cut = [at.cut(x, place.start, place.stop).contiguous() for x, at in zip(rows, region.row_dims, strict=True)]
        given = [x if at is None else at.cut(x, place.start, place.stop).contiguous() for x, at in grads]
        with nvtx("tile"):
            found = region.run(part, cut, [*wholes, *given])
        first = not out
        if first:
            dtypes = [x.dtype for x in found]
            out = [
                _wide(x) if at is None else at.empty(x, place.stop - place.start, total)
                for x, at in zip(found, dims, strict=True)
            ]
        _put(found, out, dims, place, add=not first)
        del found
    return [x.to(dtype) for x, dtype in zip(out, dtypes, strict=True)]


def _put(
    found: Sequence[Tensor], out: Sequence[Tensor], dims: Sequence[RowDim | None], place: slice, *, add: bool
) -> None:
    """Write a tile's rows into their place among all, and add what has none to the tiles before. A function of its
    own, behind which no name holds a gradient of a weight while the next tile runs."""
    for x, at, into in zip(found, dims, out, strict=True):
        if at is not None:
            at.write(into, x, place.start, place.stop)
        elif add:
            into += x


def _wide(x: Tensor) -> Tensor:
    """A copy to add tiles to: fp32 of 16-bit floats."""
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    return x.to(torch.float32 if narrow else x.dtype, copy=True, memory_format=torch.contiguous_format)


def _tiles(rows: int, tile: int) -> list[slice]:
    """As few runs of at most `tile` rows as do, as equal as they can be: no tile of a row or two is left over."""
    count = max(1, -(-rows // tile))
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::tiled", mutates_args=())
def tiled(rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int) -> list[Tensor]:
    """Results of a region, run over at most `tile` rows at a time; the backward runs each tile once more.

    Args:
        rows: tensors with R rows, where `row_dims` says. wholes: what all tiles read. region: its name in `REGIONS`.
    """
    return run_tiles(REGIONS[region], rows, wholes, tile)


@custom_op("cp_rewrite::tiled_backward", mutates_args=())
def tiled_backward(
    grads: Sequence[Tensor], rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int
) -> list[Tensor]:
    """Gradients of a region's `needed` operands, of those of its `differentiable` results.

    Gradients of operands that all tiles read are summed over tiles in fp32 (fp64 for fp64)."""
    found = REGIONS[region]
    given = [*zip(grads, [found.result_dims[i] for i in found.differentiable], strict=True)]
    return run_tiles(found, rows, wholes, tile, "gradients", _gradient_dims(found), given)


@custom_op("cp_rewrite::tiled_sum", mutates_args=())
def tiled_sum(rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int) -> list[Tensor]:
    """Results of a region of which one, a scalar sum, is differentiable; behind them the gradients of the `needed`
    operands where that of the sum is 1: nothing is run once more."""
    found = REGIONS[region]
    return run_tiles(found, rows, wholes, tile, "both", (*found.result_dims, *_gradient_dims(found)))


def _gradient_dims(region: Region) -> tuple[RowDim | None, ...]:
    return tuple(region.row_dims[i] if i < len(region.row_dims) else None for i in region.needed)


def _fakes(graph: fx.GraphModule, *operands: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in graph(*operands)]


@tiled.register_fake
def _(rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int) -> list[Tensor]:
    return _fakes(REGIONS[region].forward, *rows, *wholes)


@tiled_backward.register_fake
def _(
    grads: Sequence[Tensor], rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int
) -> list[Tensor]:
    operands = [*rows, *wholes]
    return [torch.empty_like(operands[i], memory_format=torch.contiguous_format) for i in REGIONS[region].needed]


@tiled_sum.register_fake
def _(rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int) -> list[Tensor]:
    operands, found = [*rows, *wholes], REGIONS[region]
    more = [torch.empty_like(operands[i], memory_format=torch.contiguous_format) for i in found.needed]
    return [*_fakes(found.forward, *operands), *more]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    rows, wholes, ctx.region, ctx.tile = inputs
    ctx.kinds = type(rows), type(wholes)
    ctx.save_for_backward(*rows, *wholes)
    _only_differentiable(ctx, output)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    rows, wholes, ctx.region, _ = inputs
    ctx.kinds, ctx.counts = (type(rows), type(wholes)), (len(rows), len(wholes))
    ctx.save_for_backward(*output[len(REGIONS[ctx.region].result_dims) :])
    _only_differentiable(ctx, output)


def _only_differentiable(ctx: Any, output: Sequence[Tensor]) -> None:
    wanted = REGIONS[ctx.region].differentiable
    ctx.mark_non_differentiable(*(x for i, x in enumerate(output) if i not in wanted))


def _once_more(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    region, saved = REGIONS[ctx.region], ctx.saved_tensors
    rows, wholes = list(saved[: len(region.row_dims)]), list(saved[len(region.row_dims) :])
    given = [grads[i].contiguous() for i in region.differentiable]
    found = _ops.tiled_backward.default(given, rows, wholes, ctx.region, ctx.tile)
    return _in_lists(ctx, region, found, len(rows), len(wholes))


def _scaled(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    region = REGIONS[ctx.region]
    scale = grads[region.differentiable[0]]
    found = [(x * scale.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype) for x in ctx.saved_tensors]
    return _in_lists(ctx, region, found, *ctx.counts)


def _in_lists(ctx: Any, region: Region, found: Sequence[Tensor], rows: int, wholes: int) -> tuple[Any, ...]:
    by_place = dict(zip(region.needed, found, strict=True))
    every = [by_place.get(i) for i in range(rows + wholes)]
    return ctx.kinds[0](every[:rows]), ctx.kinds[1](every[rows:]), None, None


register_autograd("cp_rewrite::tiled", _once_more, setup_context=_keep)
register_autograd("cp_rewrite::tiled_sum", _scaled, setup_context=_keep_gradients)
