"""A region of the graph becomes one op that runs it tile by tile; wide outputs beside a loss are left out.

traced_region          a region's nodes as the ATen graphs that the op runs, with their gradients
leaves_out, leave_out  wide outputs beside a loss
tile_rows              the pass
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import SymInt, Tensor
from torch.utils._pytree import tree_map

from cp_rewrite.ops.tiles import REGIONS, Region, RowDim
from cp_rewrite.passes.capture.chunks import CHUNKS
from cp_rewrite.passes.graph.new_nodes import autocasts_open, call, maker, position_of, traced, tracing
from cp_rewrite.passes.graph.nodes import (
    RegionCall,
    attribute_of,
    erase_unread_numbers,
    graph_modules,
    is_function,
    needs_gradient,
    nested_graphs,
    outputs_of,
    reached,
    region_call,
    region_calls,
    value_of,
)
from cp_rewrite.passes.locality.claims import Extents, Rows, T
from cp_rewrite.passes.locality.ends import read_extents
from cp_rewrite.passes.tile import Rowwise, TileRegion, find_regions, way_to
from cp_rewrite.passes.values.state import LeftOut, State
from cp_rewrite.planning.cost.constants import TILE_BYTES, TILE_GAIN, TILE_ROWS
from cp_rewrite.torch_internals import FakeTensorMode, enable_python_dispatcher, fake_mode_of, hint


def traced_region(found: TileRegion, extents: Extents, mode: FakeTensorMode, inner: str) -> Region:
    """The Region that the op runs: its nodes as ATen graphs, with autocast decided, and their gradients."""
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
    """A module of the same graph that Dynamo can read: make_fx gives one that writes its code at its first call."""
    return fx.GraphModule(module, module.graph)


def _may_need_gradient(node: fx.Node) -> bool:
    """True if gradients reach a node's tensor; of a node that the rewrite made, if they reach what it is made of."""
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


def leaves_out(state: State) -> bool:
    """True if a graph that gives a loss leaves out its wide outputs. Not with a capacity: replayed steps run nothing
    that would make them."""
    sharding = state.sharding
    asked = state.loss_alone or (sharding.tile is not None and not sharding.keep_outputs)
    return asked and sharding.capacity is None and bool(_losses(state.graph_module))


def leave_out(found: Rowwise, state: State) -> tuple[LeftOut, ...]:
    """Take wide outputs out of a graph, and have it give what they are made of, row by row, in their place.

    return loss, logits          ->    return loss, None, h.detach()          logits = head(h), once someone asks

    Then nothing holds the logits of all rows: the head and the loss run tile by tile.
    """
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
        if losses.isdisjoint(reached(wide, lambda n: n.users)):
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
        erase_unread_numbers(gm)  # a tensor that is asked for them would be a result of its region
        found = Rowwise(state, gm, extents, mode)
        state = replace(state, left_out=leave_out(found, state) if leaves else ())
        _tile_graph(found, state, region_calls(gm))
    return state


def _has_loops(gm: fx.GraphModule) -> bool:
    return any(CHUNKS in node.meta for module in graph_modules(gm) for node in module.graph.nodes)


def _tile_graph(found: Rowwise, state: State, calls: Mapping[fx.Graph, Sequence[fx.Node]]) -> None:
    """Tile a graph, and the bodies of the regions and functions that it alone calls, and in one way, once each."""
    extents, mode = found.extents, found.mode
    for node in [*found.gm.graph.nodes]:
        if same := _calls_alike(node, calls, found):
            _tile_graph(Rowwise(state, same[0].body, extents, mode, found, same), state, calls)
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


def _calls_alike(node: fx.Node, calls: Mapping[fx.Graph, Sequence[fx.Node]], found: Rowwise) -> list[RegionCall]:
    """All calls of the body that a node is the first to call; none where another graph, or another mode, has some."""
    call = region_call(node)
    same = [] if call is None else calls[call.body.graph]
    alike = same[:1] == [node] and all(n in found.modes and found.modes[n] == found.modes[node] for n in same)
    return [each for n in same if (each := region_call(n)) is not None] if alike else []


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
