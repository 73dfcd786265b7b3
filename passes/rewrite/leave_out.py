"""Wide outputs beside a loss are given by no graph: what they are computed of, row by row, is given in their place.

    return loss, logits          ->    return loss, None, h.detach()          logits = head(h), once someone asks

Then nothing holds the logits of all rows: the head and the loss run tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.fx as fx
from torch import SymInt, Tensor

from cp_rewrite.passes.graph.new_nodes import maker
from cp_rewrite.passes.graph.nodes import needs_gradient, value_of
from cp_rewrite.passes.graph.regions import outputs_of
from cp_rewrite.passes.locality.claims.tensor_state import Rows
from cp_rewrite.passes.tile.find_region import TileRegion, way_to
from cp_rewrite.passes.tile.rowwise import Rowwise
from cp_rewrite.passes.values.left_out import LeftOut
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.cost.constants import TILE_BYTES, TILE_GAIN, TILE_ROWS

from .traced_region import order_of, traced_region


def leaves_out(state: State) -> bool:
    """Whether a graph's wide outputs are left out where it gives a loss. With a capacity steps are replayed, which
    runs none of what would make them."""
    sharding = state.sharding
    asked = state.loss_alone or (sharding.tile is not None and not sharding.keep_outputs)
    return asked and sharding.capacity is None and bool(_losses(state.graph_module))


def leave_out(found: Rowwise, state: State) -> tuple[LeftOut, ...]:
    """Take wide outputs out of a graph, and have it give what they are made of."""
    gm, batch = found.gm, found.extents.batch
    assert isinstance(batch, int)
    given = outputs_of(gm)
    left: list[LeftOut] = []
    extra: dict[fx.Node, int] = {}
    output = gm.graph.output_node()
    new = maker(output, found.mode)
    for node, region in [*_ways(found, state)]:
        operands: list[fx.Node | int] = []
        for operand in (*region.rows, *region.wholes):
            if operand.op != "placeholder":
                extra.setdefault(operand, len(given) + len(extra))
            operands.append(extra.get(operand, operand))
        orders = tuple(tuple(order_of(operand)) for operand in (*region.rows, *region.wholes))
        order, value = tuple(order_of(node)), value_of(node)
        traced = traced_region(region, found.extents, found.mode, "eager")
        at = traced.result_dims[0]
        assert at is not None, "an output with rows"
        sizes = tuple(None if i == at.dim else int(value.shape[dim]) for i, dim in enumerate(order))
        tile = max(1, min(TILE_ROWS, TILE_BYTES // region.widest) // batch)
        facts = order, sizes, value.dtype, value.device, needs_gradient(node), tile
        places = [i for i, each in enumerate(given) if each is node]
        left += [LeftOut(place, traced, tuple(operands), orders, *facts) for place in places]
    if left:
        gone = {each.place for each in left}
        parts = [new("detach", operand) for operand in extra]
        found.place |= dict.fromkeys(parts, found.place[output])
        output.args = ((*(None if i in gone else each for i, each in enumerate(given)), *parts),)
        for node in [n for i, n in enumerate(given) if i in gone]:
            _drop(node, found)
    return tuple(left)


def _ways(found: Rowwise, state: State) -> Iterator[tuple[fx.Node, TileRegion]]:
    """Outputs that are worth it, and what makes each of narrow rows. One that no loss is computed of may be what a loss
    outside is."""
    given = outputs_of(found.gm)
    kept, losses = {given[place] for place in state.frame.places}, _losses(found.gm)
    for node in dict.fromkeys(given):
        if not isinstance(node, fx.Node) or node in kept or not isinstance(found.states.get(node), Rows):
            continue
        value: Any = value_of(node)
        region = way_to(node, found) if isinstance(value, Tensor) and value.is_floating_point() else None
        if region is None or any(n.op == "get_attr" for n in region.wholes):
            continue
        wide = [n for n in region.nodes if (found.row_bytes(n) or 0) >= region.widest / TILE_GAIN]
        if losses.isdisjoint(_behind(wide)):
            continue
        dims = found.states[node].dims  # type: ignore[union-attr]
        if all(dim or not isinstance(size, SymInt) for dim, size in zip(dims, value.shape, strict=True)):
            yield node, region


def _losses(gm: fx.GraphModule) -> set[fx.Node]:
    """Scalars that a graph gives; where gradients reach any output, those that they reach."""
    given = [node for node in outputs_of(gm) if isinstance(node, fx.Node)]
    trained = any(map(needs_gradient, given))
    return {node for node in given if _is_scalar(value_of(node)) and (needs_gradient(node) or not trained)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These, and all that is computed of them."""
    found, pending = set[fx.Node](), [*nodes]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.users
    return found


def _drop(node: fx.Node, found: Rowwise) -> None:
    """Erase what nothing reads any more: copies that were made for the output alone."""
    pending = [node]
    while pending:
        dead = pending.pop()
        if dead in found.alone and not dead.users and dead.op != "placeholder":
            pending += dead.all_input_nodes
            found.alone.discard(dead)
            del found.place[dead]
            found.gm.graph.erase_node(dead)
