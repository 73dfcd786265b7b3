"""Edits of nodes that are not the same on a shard: each gives a node, or what stands in its place, for a rank's tokens.

read_neighbours           nodes that shift, roll or convolve tokens
keep_sizes, keep_rows,    nodes that make tensors of fewer tokens than the row
enter_region, leave_region
lower_node                nodes taken apart into ATen ops, of which those that a `Lowering` names are changed
globalize,                positions of the shard made global: for all rows of the batch at once, or, where these are
keep_rows_apart           cut in different orders, for each row by itself (`shared_by_rows` in `locality/walk.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.proxy import GraphAppendingTracer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from cp_rewrite.passes.graph.new_nodes import autocasts_open, call, fake_value, insert, paste, size_of, traced
from cp_rewrite.passes.graph.nodes import RegionCall, bind, bind_op, needs_gradient, outputs_of, reached, value_of
from cp_rewrite.passes.locality.call import COPIES, METADATA, aten_name
from cp_rewrite.passes.values.edits import READ, Lowering, NeighbourRead, PositionGenerator, Ranks, RowPositions, Step
from cp_rewrite.passes.values.sizes import token_count
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.plan_input import HAS_TOKEN, NEIGHBOURS, ROW_INDEX, TOKEN_INDEX
from cp_rewrite.planning.row_map import TokenCount
from cp_rewrite.refusal import Reason, Refusal, RewriteRefused
from cp_rewrite.sharding import Sharding, group_of
from cp_rewrite.torch_internals import FakeTensorMode, TorchDispatchMode, matmul

from .inputs import Inputs

Proxies = Callable[[fx.Node], Any]


def read_neighbours(read: NeighbourRead, proxy: Proxies, plan: Sequence[Any]) -> Any:
    """The new value of `read.node`, which shifts, rolls or convolves tokens, on graph proxies.

    x (B, T_l, C)  ->  rows (B T_l, C)  ->  neighbour_rows (E, C)  ->  (B, T_l, C)
                                              |
                                              convolve_rows (B T_l, C')

    Args: proxy: of a node. plan: the tensors of `PlanInput.of_neighbours`.
    """
    if read.read is None:
        return _ended(read, proxy(read.source), proxy)
    dims = [dim for dim in (read.batch_dim, read.token_dim) if dim is not None]
    ndim = value_of(read.source).ndim
    x = proxy(read.source).movedim(dims, list(range(len(dims))))
    rows = _rows(x, len(dims), ndim)
    ranks = Ranks(read.group, 0, {})  # sums ask for no more
    extras: list[Any] = []
    for of, count, conversions in read.extras:
        if isinstance(of, fx.Node):
            own = proxy(of).narrow(dims[-1], 0, count)
            for convert in conversions:
                own = convert(own, ranks)
            extras.append(_rows(own.movedim(dims, list(range(len(dims)))), len(dims), ndim))
        else:
            extras.append(torch.full_like(rows.narrow(1, 0, 1), of))
    others = torch.cat(extras, 1) if extras else rows.narrow(1, 0, 0)
    tables = plan[: len(NEIGHBOURS)]
    op: Any = torch.ops.cp_rewrite.neighbour_rows.default
    found = op(rows.flatten(0, 1), others.flatten(0, 1), *tables, read.group)
    if read.conv is None:
        found = found.view_as(x).movedim(list(range(len(dims))), dims)
    else:
        batch = size_of(proxy(read.source), 0)
        found = _convolved(read.conv, found, plan[-1], proxy).unflatten(0, (batch, -1)).transpose(1, 2)
    return _ended(read, found, proxy)


def _ended(read: NeighbourRead, x: Any, proxy: Proxies) -> Any:
    """Without a gradient, where the node has none; and with one of zero for what no row is read of."""
    for node in read.unread:
        x = x + proxy(node).reshape(-1).narrow(0, 0, 0).sum().to(value_of(read.node).dtype)
    cut = not needs_gradient(read.node) and value_of(read.node).is_floating_point()
    return x.detach() if cut else x


def _rows(x: Any, leading: int, ndim: int) -> Any:
    """(B, T, C) of a tensor of `ndim` dims, whose `leading` ones are (B, T) or (T,)."""
    x = x.flatten(leading) if ndim > leading + 1 else x.unsqueeze(-1) if ndim == leading else x
    return x if leading == 2 else x.unsqueeze(0)


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


def keep_sizes(state: State, inputs: Inputs) -> None:
    """Let numbers that are read off tensors of fewer tokens than the row be computed without them: such tensors keep,
    on a rank, a row for each of its tokens (`keep_rows`).
    """
    asked = [user for node in state.locality.fewer for user in node.users if not isinstance(value_of(user), Tensor)]
    numbers = [user for node in asked for user in ([node] if _is_number(node) else node.users)]
    for node in dict.fromkeys(numbers):
        if found := _of_tokens(node, state):
            node.replace_all_uses_with(_number(found, state, inputs, node))


def keep_rows(node: fx.Node, state: State, inputs: Inputs) -> None:
    """Run a node that makes a tensor of fewer tokens than the row, as x[:, :-1], again on operands that keep all rows;
    sizes among its arguments are those of all rows, numbers that are made from its sizes stay what they are.

        a = x[:, :-1]            S - 1 rows           a = x                S rows
        b = a.view(-1, n)        B (S - 1)     ->     b = a.view(-1, n)    B S
        n = a.shape[1]           S - 1                n = S - 1            as it was
    """
    by = state.locality.fewer[node]

    def changed(given: fx.Node) -> fx.Node:
        found = _of_tokens(given, state)
        return _number(found + TokenCount(found.times * by), state, inputs, node) if found else given

    node.args = fx.map_arg(node.args, changed)
    node.kwargs = fx.map_arg(node.kwargs, changed)
    node.meta["example_value"] = _with_gradients(value_of(node), fake_value(node, inputs.mode))


def enter_region(call: RegionCall, state: State) -> None:
    """Let a nested region be given all rows."""
    for placeholder, operand in call.filled.items():
        if placeholder in state.locality.fewer:
            placeholder.meta["example_value"] = value_of(operand)


def leave_region(call: RegionCall, state: State) -> None:
    """Let a nested region's call give all rows; they are those that the region returns."""
    if call.node in state.locality.fewer:
        returned = [value_of(x) if isinstance(x, fx.Node) else x for x in outputs_of(call.body)]
        value = value_of(call.node)
        new = type(value)(returned) if isinstance(value, list | tuple) else returned[0]
        call.node.meta["example_value"] = _with_gradients(value, new)


def _of_tokens(node: fx.Node, state: State) -> TokenCount | None:
    """The number that a node gives, if it changes with the tokens."""
    found = token_count(value_of(node), state.tokens.inputs[0].tokens) if _is_number(node) else None
    return found if found is not None and found.times else None


def _number(count: TokenCount, state: State, inputs: Inputs, before: fx.Node) -> fx.Node:
    """A node for a number, from the tokens of an input."""
    first, graph = state.tokens.inputs[0], before.graph
    source, dim = (first.node, first.dim) if graph is inputs.root.graph else (inputs.node(graph, HAS_TOKEN), 1)

    def emit() -> Any:
        return count.of(fx.Proxy(source).size(dim))

    return insert(before, emit, inputs.mode, "sizes of all rows")


def _is_number(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.SymInt | int)


def _with_gradients(old: Any, new: Any) -> Any:
    if isinstance(new, list | tuple):
        return type(new)(_with_gradients(a, b) for a, b in zip(old, new, strict=True))
    return new.detach().requires_grad_(old.requires_grad) if isinstance(new, Tensor) else new


def lower_node(lowering: Lowering, inputs: Inputs, sharding: Sharding) -> dict[fx.Node, fx.Node]:
    """Put a node's ATen ops in its place. Returns what became of it, or of the nodes that took its results apart."""
    node, graph = lowering.node, lowering.node.graph
    plan = [inputs.node(graph, key) for key in lowering.reads]
    operands = [*dict.fromkeys([*node.all_input_nodes, *plan])]
    module = _traced(lowering, operands, plan, inputs.mode, sharding)
    return _replace(node, paste(module, operands, node, node, lowering.why))


def _traced(
    lowering: Lowering, operands: list[fx.Node], plan: list[fx.Node], mode: FakeTensorMode, sharding: Sharding
) -> fx.GraphModule:
    node = lowering.node

    def run(*values: Any) -> Any:
        given = dict(zip(operands, values, strict=True))
        ranks = Ranks(
            group_of(sharding),
            sharding.world_size,
            dict(zip(lowering.reads, (given[key] for key in plan), strict=True)),
        )
        with Changes(lowering, ranks) as changes:
            out = call(node, given.__getitem__)
        if changes.steps:
            raise _other_ops(node)
        return out

    with autocasts_open(lowering.autocasts):
        return traced(run, [value_of(n) for n in operands], mode)


def _other_ops(node: fx.Node) -> RewriteRefused:
    """The error for a node that torch takes apart into other ops than when they were looked at."""
    detail = "torch takes it apart into other ops here than when it was looked at: write it out in simpler ones"
    return RewriteRefused([Refusal(Reason.TOKEN_MIXING, detail, node)])


class Changes(TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """Runs the ops of a node, counted as the locality check counts them, those with a step in the changed way."""

    def __init__(self, lowering: Lowering, ranks: Ranks) -> None:
        super().__init__()
        self.node, self.steps = lowering.node, {step.place: step for step in lowering.steps}
        self.ranks, self.casts = ranks, bool(lowering.autocasts)
        self.place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in METADATA:
            return func(*args, **kwargs)
        if aten_name(func) in COPIES and getattr(self.steps.get(self.place), "op", None) != aten_name(func):
            return func(*args, **kwargs)
        step = self.steps.pop(self.place, None)
        self.place += aten_name(func) not in COPIES
        if step is None:
            return func(*args, **kwargs)
        if aten_name(func) != step.op:
            raise _other_ops(self.node)
        args, kwargs = self._converted(step, args, kwargs)
        if step.run is None:
            return func(*args, **kwargs)
        out = step.run(self.ranks, func, bind_op(func, args, kwargs))
        if not self.casts:
            return out
        # These ops stand in an autocast region, where some of them get another dtype: what was asked for is said.
        leaves, spec = tree_flatten(out)
        cast = torch.ops.aten._to_copy.default
        return tree_unflatten([cast(x, dtype=x.dtype) if isinstance(x, Tensor) else x for x in leaves], spec)

    def _converted(self, step: Step, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for number, conversions in step.converted:
            for convert in conversions:
                leaves[tensors[number]] = convert(leaves[tensors[number]], self.ranks)
        return tree_unflatten(leaves, spec)


def _replace(node: fx.Node, result: Any) -> dict[fx.Node, fx.Node]:
    """Let the readers of a node read its new results."""
    value, name = node.meta["example_value"], node.name
    parts = isinstance(value, list | tuple)
    found: dict[fx.Node, fx.Node] = {user: result[user.args[1]] for user in node.users} if parts else {node: result}
    for old, new in found.items():
        old.replace_all_uses_with(new)
        _keep(old, new)
        if parts:
            node.graph.erase_node(old)
    node.graph.erase_node(node)
    if not parts:
        result.name = name
    return found


def _keep(old: fx.Node, new: fx.Node) -> None:
    """An example says whether a gradient reaches it."""
    new.meta["example_value"] = new.meta["example_value"].requires_grad_(old.meta["example_value"].requires_grad)


_WHY = "positions of each row of the batch"


def globalize(position: PositionGenerator, inputs: Inputs) -> fx.Node:
    """Positions of the shard become the plan's, which all rows of the batch share. Returns their node."""
    node, tracer = position.node, GraphAppendingTracer(position.node.graph)
    index = fx.Proxy(inputs.node(node.graph, ROW_INDEX), tracer)
    table = None if position.table is None else fx.Proxy(position.table, tracer)
    new = insert(node, lambda: position.at(index, table), inputs.mode, "rewrite_sites")
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def keep_rows_apart(rows: RowPositions, inputs: Inputs, sharding: Sharding) -> None:
    """Let readers read what is computed for each row; what nothing reads any more goes."""
    made: dict[fx.Node, fx.Node] = {}
    generators = {generator.node: generator for generator in rows.generators}
    for reader in rows.readers:
        if reader.source not in made:
            made[reader.source] = _by_rows(reader.source, generators, rows, inputs, sharding)
        new = _placed(made[reader.source], reader.node, reader.dim, inputs.mode)
        reader.node.replace_input_with(reader.source, new)
    for node in reversed(rows.shared):
        if not node.users:
            node.graph.erase_node(node)


def _by_rows(
    source: fx.Node,
    generators: dict[fx.Node, PositionGenerator],
    rows: RowPositions,
    inputs: Inputs,
    sharding: Sharding,
) -> fx.Node:
    """(B, …) a shared node's value for each row, behind it in the graph."""
    graph = source.graph
    shared = {*rows.shared}
    found = reached([source], lambda node: [n for n in _read(node, generators) if n in shared])
    needed = [node for node in source.graph.nodes if node in found]
    lowered = {lowering.node: lowering for lowering in rows.lowered if lowering.node in needed}
    plan = {key: inputs.node(graph, key) for key in READ if lowered}
    operands = [n for node in needed for n in _read(node, generators) if n not in needed]
    operands = [inputs.node(graph, TOKEN_INDEX), *dict.fromkeys([*plan.values(), *operands])]

    def run(index_BT: Tensor, *others: Any) -> Tensor:
        def one(index_T: Tensor) -> Tensor:
            env = dict(zip(operands[1:], others, strict=True))
            ranks = Ranks(group_of(sharding), sharding.world_size, {key: env[n] for key, n in plan.items()})
            for node in needed:
                with Changes(lowered[node], ranks) if node in lowered else nullcontext():
                    env[node] = _run(node, generators.get(node), index_T, env)
            return env[source]

        with _Products():
            return torch.vmap(one)(index_BT)

    module = traced(run, [value_of(n) for n in operands], inputs.mode)
    module.graph.eliminate_dead_code()  # sizes that vmap asked for
    result: fx.Node = paste(module, operands, source.next, source, _WHY)
    result.meta["example_value"].requires_grad_(value_of(source).requires_grad)
    return result


class _Products(TorchFunctionMode):
    """Products in Python: torch 2.11's C++ code can't read symbolic sizes under vmap."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        products = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        return (matmul if func in products else func)(*args, **(kwargs or {}))


def _read(node: fx.Node, generators: dict[fx.Node, PositionGenerator]) -> Sequence[fx.Node]:
    generator = generators.get(node)
    if generator is None:
        return node.all_input_nodes
    return [] if generator.table is None else [generator.table]


def _run(node: fx.Node, generator: PositionGenerator | None, index_T: Tensor, env: dict[fx.Node, Any]) -> Any:
    if generator is None:
        return call(node, env.__getitem__)
    return generator.at(index_T, None if generator.table is None else env[generator.table])


def _placed(x: fx.Node, reader: fx.Node, dim: int, mode: FakeTensorMode) -> fx.Node:
    """The rows' dim where the reader has it."""
    proxy = fx.Proxy(x, GraphAppendingTracer(reader.graph))

    def emit() -> fx.Proxy:
        if dim >= 0:
            return proxy.squeeze(dim + 1).movedim(0, dim)
        new = proxy
        for _ in range(-1 - dim):
            new = new.unsqueeze(1)
        return new

    new = insert(reader, emit, mode, _WHY)
    new.meta["example_value"].requires_grad_(x.meta["example_value"].requires_grad)
    return new
