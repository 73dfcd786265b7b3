"""Positions of the shard made global: for all rows of the batch at once, or, where these are cut in different orders,
for each row by itself (`locality/row_positions.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.proxy import GraphAppendingTracer
from torch.overrides import TorchFunctionMode

from cp_rewrite.passes.graph.new_nodes import call, insert, paste, traced
from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.values.locality import PositionGenerator, RowPositions
from cp_rewrite.passes.values.resolution import READ, Ranks
from cp_rewrite.planning.plan_input import ROW_INDEX, TOKEN_INDEX
from cp_rewrite.sharding import Sharding, group_of
from cp_rewrite.torch_internals import FakeTensorMode, matmul

from .lower import Changes
from .plan_inputs import Inputs

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
    needed = _needed(source, generators, set(rows.shared))
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


def _needed(source: fx.Node, generators: dict[fx.Node, PositionGenerator], shared: set[fx.Node]) -> list[fx.Node]:
    found: set[fx.Node] = set()
    pending = [source]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [n for n in _read(node, generators) if n in shared]
    return [node for node in source.graph.nodes if node in found]


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
