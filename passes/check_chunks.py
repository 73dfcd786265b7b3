"""Refuse models that make something of how many chunks of tokens there are: a shard is cut into others than the row.

    losses = [entropy(m.head(x), y) for x, y in zip(h.split(512, 1), labels.split(512, 1))]
    sum(losses) / num_items        the graph of the row is that of a shard, once both loops are joined
    sum(losses) / len(losses)      the graph of a shard has 3 where that of the row has 12

A number in the graph may be whatever Python made of their number: 3, 1 / 3, log(3), and where it was 2 or more another
branch. So the function is traced once more, on as many tokens as the row has, and both graphs are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.dynamo_internals import input_value
from cp_rewrite.passes.graph.traced_again import first_difference, traced_again
from cp_rewrite.passes.values.sizes import SizeConditions, size_places
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression, fake_mode_of, guards_of, holds, in_example, simplified

from .capture.capture import capture

_Row = Mapping[Any, Any]
"""Symbols of a shard's tokens -> how many the row has."""


def check_chunks(state: State, conditions: Sequence[Any], shape_env: Any) -> State:
    """The whole row must have the graph that the shard has. conditions: on which the shard has it.

    A shard is one of rows that fill all ranks, or of such as lack a token on each rank but one: both are looked at.
    Where the conditions of a graph hold for a row, that is its graph, and need not be traced.
    """
    world_size, known, exact = state.sharding.world_size, [conditions], list[Any]()
    for less in (0, world_size - 1):
        row = {symbol: world_size * symbol - less for symbol in state.tokens.symbols}
        found = next((each for each in known if all(holds(shape_env, c.xreplace(row)) for c in each)), None)
        if found is None:
            found = _of_row(state, shape_env, row)
            if isinstance(found, Refusal):
                return replace(state, refusals=(*state.refusals, found))
            known.append(found)
        exact += [condition.xreplace(row) for condition in found]
    return replace(state, size_conditions=SizeConditions({}, set(), {}, tuple(dict.fromkeys(exact))))


def _of_row(state: State, shape_env: Any, row: _Row) -> Sequence[Any] | Refusal:
    """On what conditions a shard as long as the row would have the same graph."""
    found, fixed = _of_shard(state, shape_env, row, 0)
    if fixed and not isinstance(found, Refusal):  # its last chunk has one token, which torch takes for a fixed size
        found, fixed = _of_shard(state, shape_env, row, 1)
    if isinstance(found, Refusal):
        return found
    return _refusal(None) if fixed else [c for c in found if holds(shape_env, c.xreplace(row))]


def _of_shard(state: State, shape_env: Any, row: _Row, more: int) -> tuple[Sequence[Any] | Refusal, bool]:
    """On what conditions a shard as long as the row, and by `more` tokens longer, has the same graph; and whether torch
    took its length for a fixed size."""
    longer: dict[int, Tensor] = {}
    for found in state.tokens.inputs:
        given: Any = input_value(found.node)
        if isinstance(given, Tensor):
            shape = list(given.shape)
            shape[found.dim] = int(in_example(shape_env, expression(found.tokens).xreplace(row))) + more
            longer[id(given)] = given.new_zeros(shape).requires_grad_(given.requires_grad)
            torch._dynamo.maybe_mark_dynamic(longer[id(given)], found.dim)

    def look(gm: fx.GraphModule) -> tuple[Sequence[Any] | Refusal, bool]:
        other = capture(gm, state.sharding, state.plan)
        if not all(
            any(input_value(found.node) is tensor for tensor in longer.values()) for found in other.tokens.inputs
        ):
            return _refusal(None), False  # some are out of reach: the graph may be that of the shard once more
        return _compared(state, other, shape_env, row)

    return traced_again(longer, look) or (_refusal(None), False)


def _compared(ours: State, other: State, shape_env: Any, row: _Row) -> tuple[Sequence[Any] | Refusal, bool]:
    """On what conditions the other graph, of more tokens, is ours; and whether their number is fixed in it."""
    graph, inputs = other.graph_module, ours.graph_module.graph.find_nodes(op="placeholder")
    mode, fixed = fake_mode_of(graph.graph.nodes), not other.tokens.symbols
    its_env = None if mode is None else mode.shape_env
    places = size_places(graph.graph.find_nodes(op="placeholder"))
    renamed = {symbol: _size(inputs[at], dim) for symbol, (at, dim) in places.items()}

    def same(a: Any, b: Any) -> bool:
        mine, its = simplified(shape_env, expression(a)), simplified(its_env, expression(b)).xreplace(renamed)
        return sympy.expand(mine - its) == 0 or (fixed and holds(shape_env, sympy.Eq(mine.xreplace(row), its)))

    different = first_difference(ours.graph_module, graph, same)
    if different is not None or its_env is None:
        return _refusal(different), fixed
    return [simplified(its_env, condition).xreplace(renamed) for condition, _ in guards_of(its_env)], fixed


def _size(node: fx.Node, dim: int | None) -> Any:
    value: Any = node.meta["example_value"]
    return expression(value if dim is None else value.shape[dim])


def _refusal(node: fx.Node | None) -> Refusal:
    """Of a loop over chunks of tokens whose number counts in the graph, at this node; None: torch can't tell."""
    detail = (
        "a shard is cut into other chunks of tokens than the row, and something is made of how many there are: cut "
        "into as many for any number of tokens (`chunk`), or leave their number out"
    )
    return Refusal(Reason.TOKEN_COUNT, detail, node)
