"""Regions of graphs that run over some of a rank's rows at a time, and how all tiles are run in turn.

A region makes of rows, each by itself, other rows, or sums over rows. It comes as ATen graphs, kept here under a name
that is made from what they do (`passes/rewrite/tile_rows.py` makes them).

Shapes: R local rows; a tile is some of them, in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.kernels.nvtx import nvtx


@dataclass(frozen=True)
class RowDim:
    """The dim of a tensor that counts rows: `before` * R * `after` entries."""

    dim: int
    before: int = 1
    after: int = 1

    def rows(self, x: Tensor) -> int:
        """R."""
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
    """What runs over one tile.

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
    one: Callable[[Region, Sequence[Tensor], Sequence[Tensor], slice], list[Tensor]],
    dims: Sequence[RowDim | None] | None = None,
) -> list[Tensor]:
    """All tiles in turn: what has rows is put together, the rest is added up."""
    dims = region.result_dims if dims is None else dims
    total, wholes = region.row_dims[0].rows(rows[0]), [x.contiguous() for x in wholes]
    out: list[Tensor] = []
    dtypes: list[torch.dtype] = []
    for place in _tiles(total, -(-total // region.chunks) if region.chunks else tile):
        cut = [at.cut(x, place.start, place.stop).contiguous() for x, at in zip(rows, region.row_dims, strict=True)]
        with nvtx("tile"):
            found = one(region, cut, wholes, place)
        if not out:
            dtypes = [x.dtype for x in found]
            out = [
                _wide(x) if at is None else at.empty(x, place.stop - place.start, total)
                for x, at in zip(found, dims, strict=True)
            ]
        elif place.start:
            for x, at, into in zip(found, dims, out, strict=True):
                if at is None:
                    into += x
        for x, at, into in zip(found, dims, out, strict=True):
            if at is not None:
                at.write(into, x, place.start, place.stop)
        del found
    return [x.to(dtype) for x, dtype in zip(out, dtypes, strict=True)]


def _wide(x: Tensor) -> Tensor:
    """A copy to add tiles to: fp32 of 16-bit floats."""
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    return x.to(torch.float32 if narrow else x.dtype, copy=True, memory_format=torch.contiguous_format)


def _tiles(rows: int, tile: int) -> list[slice]:
    """As few runs of at most `tile` rows as do, as equal as they can be: no tile of a row or two is left over."""
    count = max(1, -(-rows // tile))
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]
