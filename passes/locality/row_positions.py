"""Positions that `arange` makes once for all rows of a batch, where each row is cut in an order of its own.

Tensors that are computed of them have no dim of rows; they get one, up to where they meet tensors that have it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import is_transformed, modes_of, op_name, region_call, value_of
from cp_rewrite.passes.graph.writes import written_nodes
from cp_rewrite.passes.values.edits import Lowering, PositionGenerator, RowPositions, RowReader

from .claims import B, Rows, has

_BROADCASTS = frozenset(
    "add sub mul div truediv multiply true_divide eq ne lt le gt ge where and or logical_and logical_or maximum "
    "minimum expand masked_fill".split()
)
"""Ops that give the same where an operand of size 1 in a dim, or without it, is expanded there before."""


def shared_by_rows(
    gm: fx.GraphModule,
    generators: Sequence[PositionGenerator],
    env: Mapping[fx.Node, Any],
    live: Collection[fx.Node],
    changed: Collection[fx.Node],
    inserted: Collection[tuple[fx.Node, fx.Node]],
    counted: Mapping[fx.Node, Lowering],
) -> RowPositions | None:
    """Nodes that follow from positions and have no rows of the batch, and who reads them; None where they can't be told
    apart by rows.

    Args:
        env: what is known of the nodes. live: those that outputs depend on, not only masks.
        changed: nodes that will be replaced. inserted: (node, operand) where something is put between both.
        counted: nodes that count with the row's tokens.
    """
    shared = {generator.node: None for generator in generators}
    readers: list[RowReader] = []
    if any(node.graph is not gm.graph for node in shared) or _casts(gm):
        return None
    for node in gm.graph.nodes:
        sources = [n for n in node.all_input_nodes if n in shared]
        if not sources or node in shared or (node not in live and node.op != "output") or _asks_for_sizes(node):
            continue
        state = env.get(node)
        if not isinstance(state, Rows) or node in changed or not _can_run_again(node):
            return None
        own = [operand for reader, operand in inserted if reader is node]
        if not any(has(dim, B) for dim in state.dims):
            if own:
                return None
            shared[node] = None
            continue
        found = [_reader(node, source, state) for source in sources]
        if node in counted or any(operand in shared for operand in own) or None in found:
            return None
        readers += [reader for reader in found if reader is not None]
    lowered = tuple(counted[node] for node in shared if node in counted)
    return RowPositions(tuple(generators), tuple(shared), tuple(readers), lowered)


def _can_run_again(node: fx.Node) -> bool:
    """Whether a node gives one tensor, by itself, and changes nothing."""
    alone = not written_nodes(node) and not is_transformed(node) and region_call(node) is None
    return alone and node.op != "output" and isinstance(value_of(node), Tensor)


def _reader(node: fx.Node, source: fx.Node, state: Rows) -> RowReader | None:
    if op_name(node) not in _BROADCASTS or (B,) not in state.dims:
        return None
    value: Tensor = value_of(source)
    dim = state.dims.index((B,)) - (len(state.dims) - value.ndim)
    return RowReader(node, source, dim) if dim < 0 or value.shape[dim] == 1 else None


def _asks_for_sizes(node: fx.Node) -> bool:
    return isinstance(value_of(node), int | torch.SymInt | torch.Size)


def _casts(gm: fx.GraphModule) -> bool:
    """Whether a graph has autocast on anywhere: what is computed by rows would run outside of it."""
    return any(bool(cast[2]) for casts, _ in modes_of(gm.graph).values() for cast in casts if len(cast) > 2)
