"""A region of the graph becomes one op that runs it tile by tile: its nodes are traced to ATen with their gradients."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from cp_rewrite.ops.tiles import REGIONS, Region
from cp_rewrite.passes.capture.join_regions import CHUNKS
from cp_rewrite.passes.graph.new_nodes import maker, position_of
from cp_rewrite.passes.graph.regions import (
    attribute_of,
    graph_modules,
    is_function,
    nested_graphs,
    region_call,
    region_calls,
)
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.inputs import read_extents
from cp_rewrite.passes.tile.find_region import TileRegion, find_regions
from cp_rewrite.passes.tile.rowwise import Rowwise
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.cost.constants import TILE_BYTES, TILE_ROWS
from cp_rewrite.torch_internals import FakeTensorMode, fake_mode_of

from .leave_out import leave_out, leaves_out
from .traced_region import order_of, traced_region

_ops: Any = torch.ops.cp_rewrite
_WHY = "tile by tile"


def tile_rows(state: State) -> State:
    """Let regions of the rewritten graph that are wide inside and narrow at their ends run tile by tile. Without
    `Sharding(tile=…)` those of the model's own loops over chunks of tokens do, in as many tiles as it has chunks.

    Wide outputs beside a loss would hold all rows, and are left out."""
    gm, leaves = state.graph_module, leaves_out(state)
    if state.sharding.tile is None and not leaves and not _has_loops(gm):
        return state
    mode = fake_mode_of(gm.graph.nodes)
    extents = None if mode is None else read_extents(state.tokens, mode.shape_env)
    if mode is not None and extents is not None and isinstance(extents.batch, int):
        found = Rowwise(state, gm, extents, mode)
        state = replace(state, left_out=leave_out(found, state) if leaves else ())
        _tile_graph(found, state, region_calls(gm))
    return state


def _has_loops(gm: fx.GraphModule) -> bool:
    return any(CHUNKS in node.meta for module in graph_modules(gm) for node in module.graph.nodes)


def _tile_graph(found: Rowwise, state: State, calls: Mapping[fx.Graph, Sequence[fx.Node]]) -> None:
    """Tile a graph, and the bodies of the regions and functions that it alone calls, once each."""
    extents, mode = found.extents, found.mode
    for node in [*found.gm.graph.nodes]:
        call = region_call(node)
        if call is not None and len(calls[call.body.graph]) == 1:
            _tile_graph(Rowwise(state, call.body, extents, mode, found, call), state, calls)
        if is_function(node) and not found.modes[node][0]:
            for body in nested_graphs(node).values():
                _tile_graph(Rowwise(state, body, extents, mode), state, calls)
    made: dict[fx.Node, fx.Node] = {}
    tile, batch = state.sharding.tile, extents.batch
    assert isinstance(batch, int)
    for region in find_regions(found, loops=tile is None):
        region = _after(region, made)
        rows = tile if isinstance(tile, int) else min(TILE_ROWS, TILE_BYTES // region.widest)
        made |= _put(region, found.gm, extents, mode, max(1, rows // batch), state.sharding.inner)
    found.gm.recompile()


def _after(region: TileRegion, made: Mapping[fx.Node, fx.Node]) -> TileRegion:
    """A region that may read what took the place of others' results."""
    rows, wholes = (tuple(made.get(n, n) for n in nodes) for nodes in (region.rows, region.wholes))
    states = {made.get(n, n): state for n, state in region.states.items()}
    return replace(region, rows=rows, wholes=wholes, states=states)


def _put(
    found: TileRegion, gm: fx.GraphModule, extents: Extents, mode: FakeTensorMode, tile: int, inner: str
) -> dict[fx.Node, fx.Node]:
    """Put one op in the place of a region's nodes. `tile`: its rows. Returns what took the place of its results."""
    region = traced_region(found, extents, mode, inner)
    name = _register(region)
    first = min((user for n in found.results for user in n.users if user not in found.nodes), key=_place(gm))
    new = maker(first, mode)
    given = [[new("permute", n, order_of(n)) for n in nodes] for nodes in (found.rows, found.wholes)]
    op = _ops.tiled.default if region.both is None else _ops.tiled_sum.default
    made = new(op, *given, name, tile)
    replaced: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(found.results):
        order = order_of(node)
        part = new("permute", new(operator.getitem, made, i), [order.index(dim) for dim in range(len(order))])
        part.meta["example_value"].requires_grad_(i in region.differentiable)
        part.meta.update(position_of(node), cp_rewrite=_WHY)
        node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in found.nodes)
        replaced[node] = part
    made.meta.update(position_of(found.results[0]), cp_rewrite=_WHY)
    for node in reversed(found.nodes):
        gm.graph.erase_node(node)
    return replaced


def _place(gm: fx.GraphModule) -> Callable[[fx.Node], int]:
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    return place.__getitem__


def _register(region: Region) -> str:
    """The region's name, under which the op finds it."""
    graphs = [g for g in (region.forward, region.gradients, region.both) if g is not None]
    text = [g.print_readable(print_output=False) for g in graphs]
    # Constants, as of `x[..., [1, 3]]`, are in no text of a graph.
    held = [attribute_of(n) for g in graphs for n in g.graph.find_nodes(op="get_attr")]
    constants = [(x.dtype, x.shape, x.tolist()) for x in held]
    dims = region.row_dims, region.result_dims
    facts = (*text, constants, *dims, region.differentiable, region.needed, region.inner, region.chunks)
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    REGIONS.setdefault(name, region)
    return name
