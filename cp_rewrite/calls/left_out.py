"""Stand-ins for outputs that a rewritten graph no longer gives, made in each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.batch.marks import mark_token_axes, mark_token_dim, version_of
from cp_rewrite.batch.stand_in import StandIn, gone
from cp_rewrite.ops.tiles import run_tiles
from cp_rewrite.passes.values.state import LeftOut, State

SHARDS_AGAIN = (
    "the weights that make it are shards again, as after the backward, and after its forward those of a block that "
    "FSDP shards by itself"
)
Read = Callable[[], Tensor]
"""Gives a tensor as it was in a call, or raises."""
Input = Callable[[Sequence[Any]], Read]
"""Gives that of one of the graph's inputs, of a call's arguments."""


class LeftOutputs:
    """Outputs that one graph leaves out. `weight`: how an input of the graph is read that is none of a call's
    arguments; None of others."""

    def __init__(self, state: State, weight: Callable[[fx.Node], Input | None] = lambda _: None) -> None:
        self.left, self.given = state.left_out, len(state.locality.outputs)
        places = {node: i for i, node in enumerate(state.graph_module.graph.find_nodes(op="placeholder"))}
        read = [n for each in self.left for n in each.operands if isinstance(n, fx.Node)]
        self._places = places
        self._inputs = {node: weight(node) or partial(_argument, places[node]) for node in read}
        self._marks = [(state.locality.outputs[each.place], state.locality.axes[each.place]) for each in self.left]

    def graphs_own(self, out: Sequence[Any]) -> list[Any]:
        """The captured graph's outputs, None in the place of those left out."""
        return list(out[: self.given])

    def put(self, found: list[Any], out: Sequence[Any], args: Sequence[Any]) -> None:
        """Put stand-ins into a call's results `found`. `out`: all that the rewritten graph gave."""
        for each, (dim, axes) in zip(self.left, self._marks, strict=True):
            first = each.operands[0]
            rows = _rows(each, out[first] if isinstance(first, int) else args[self._places[first]])
            stand_in = _stand_in(each, rows, [self._read(operand, out, args) for operand in each.operands])
            if dim is not None:
                mark_token_dim(stand_in, dim)
            elif axes is not None:
                mark_token_axes(stand_in, axes)
            found[each.place] = stand_in

    def _read(self, operand: fx.Node | int, out: Sequence[Any], args: Sequence[Any]) -> Read:
        return as_given(out[operand]) if isinstance(operand, int) else self._inputs[operand](args)


def _argument(place: int, args: Sequence[Any]) -> Read:
    return as_given(args[place])


def as_given(value: Tensor) -> Read:
    """A tensor that nobody may have written to when it is read. torch does not count all writes, as those of fused
    optimizers and through `.data`: its sum tells of them."""
    version, total = version_of(value), _total(value)

    def read() -> Tensor:
        if value.numel() and not value.untyped_storage().nbytes():
            raise gone(SHARDS_AGAIN)
        if version_of(value) != version or not torch.equal(_total(value).nan_to_num(), total.nan_to_num()):
            raise gone("what it is computed of, as the weights in optimizer.step(), was changed since")
        return value

    return read


@torch.no_grad()
def _total(value: Tensor) -> Tensor:
    """The sum of 16-bit and wider floats, which takes no memory; 0 of others."""
    if not value.is_floating_point() or value.itemsize < 2:
        return torch.zeros(())
    return value.sum(dtype=torch.promote_types(value.dtype, torch.float32))


def _rows(left: LeftOut, first: Tensor) -> int:
    return left.region.row_dims[0].rows(first.permute(left.orders[0]))


def _stand_in(left: LeftOut, rows: int, reads: Sequence[Read]) -> StandIn:
    region, dim = left.region, left.region.result_dims[0]
    assert dim is not None, "an output with rows"
    sizes = [dim.before * rows * dim.after if size is None else size for size in left.sizes]
    back = [left.order.index(i) for i in range(len(left.order))]

    def make() -> Tensor:
        operands = [read().detach().permute(order) for read, order in zip(reads, left.orders, strict=True)]
        count = len(region.row_dims)
        (made,) = run_tiles(region, operands[:count], operands[count:], left.tile)
        return made.permute(back)

    return StandIn.of([sizes[i] for i in back], left.dtype, left.device, left.trained, make)
