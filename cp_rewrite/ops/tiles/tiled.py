"""Ops that run a region tile by tile, so that what is wide for each token is there for one tile at a time.

Shapes: R local rows; a tile is some of them, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.library import custom_op, register_autograd

from .region import REGIONS, Region, RowDim, run_tiles

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::tiled", mutates_args=())
def tiled(rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int) -> list[Tensor]:
    """Results of a region, run over at most `tile` rows at a time; the backward runs each tile once more.

    Args:
        rows: tensors with R rows, where `row_dims` says. wholes: what all tiles read. region: its name in `REGIONS`.
    """
    return run_tiles(REGIONS[region], rows, wholes, tile, _forward)


@custom_op("cp_rewrite::tiled_backward", mutates_args=())
def tiled_backward(
    grads: Sequence[Tensor], rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int
) -> list[Tensor]:
    """Gradients of a region's `needed` operands, of those of its `differentiable` results.

    Those of what all tiles read are summed over tiles in fp32 (fp64 for fp64)."""
    found = REGIONS[region]
    dims = [found.result_dims[i] for i in found.differentiable]

    def gradients(region: Region, tile_rows: Sequence[Tensor], wholes: Sequence[Tensor], place: slice) -> list[Tensor]:
        of_tile = [
            x if at is None else at.cut(x, place.start, place.stop).contiguous()
            for x, at in zip(grads, dims, strict=True)
        ]
        return region.run("gradients", tile_rows, [*wholes, *of_tile])

    return run_tiles(found, rows, wholes, tile, gradients, _gradient_dims(found))


@custom_op("cp_rewrite::tiled_sum", mutates_args=())
def tiled_sum(rows: Sequence[Tensor], wholes: Sequence[Tensor], region: str, tile: int) -> list[Tensor]:
    """Results of a region of which one, a scalar sum, is differentiable; behind them the gradients of the `needed`
    operands where that of the sum is 1: nothing is run once more."""
    found = REGIONS[region]
    return run_tiles(found, rows, wholes, tile, _both, (*found.result_dims, *_gradient_dims(found)))


def _both(region: Region, tile_rows: Sequence[Tensor], wholes: Sequence[Tensor], _: slice) -> list[Tensor]:
    return region.run("both", tile_rows, wholes)


def _forward(region: Region, tile_rows: Sequence[Tensor], wholes: Sequence[Tensor], _: slice) -> list[Tensor]:
    return region.run("forward", tile_rows, wholes)


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
