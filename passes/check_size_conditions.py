"""Refuse models that decide by the number of tokens: traced on a shard, they decided for a shard's count. And models
that make something of how many chunks of tokens there are: a shard is cut into others than the row.

    losses = [entropy(m.head(x), y) for x, y in zip(h.split(512, 1), labels.split(512, 1))]
    sum(losses) / num_items        the graph of the row is that of a shard, once both loops are joined
    sum(losses) / len(losses)      the graph of a shard has 3 where that of the row has 12

A number in the graph may be whatever Python made of their number: 3, 1 / 3, log(3), and where it was 2 or more another
branch. So the function is traced once more, on as many tokens as the row has, and both graphs are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from cp_rewrite.torch_internals import expression, fake_mode_of, guard, guards_of, holds, in_example, simplified

from .capture.capture import capture
from .whole_row import of_whole_row

_DIVISIONS = {"FloorDiv", "Mod", "PythonMod", "ModularIndexing", "CeilDiv"}
"""Names of torch's integer divisions."""


def check_size_conditions(state: State) -> State:
    """Every condition on token counts that Dynamo recorded must hold for the whole row as it does for the shard; else
    the row's graph takes the place of the shard's.

    Runs before any pass puts guards of its own on sizes.
    """
    world_size, mode = state.sharding.world_size, fake_mode_of(state.graph_module.graph.nodes)
    sizes = state.tokens.symbols | state.tokens.mask_symbols
    if world_size == 1 or not sizes or mode is None or mode.shape_env is None:
        return state
    found = _checked(state, mode.shape_env)
    return found if found.refusals == state.refusals else of_whole_row(state, mode) or found


def _checked(state: State, shape_env: Any) -> State:
    """With a refusal of each condition that does not hold for the row."""
    world_size, sizes = state.sharding.world_size, state.tokens.symbols | state.tokens.mask_symbols
    recorded = [(simplified(shape_env, condition), where) for condition, where in guards_of(shape_env)]
    recorded = [(condition, where) for condition, where in recorded if condition.free_symbols & sizes]
    if state.chunked:
        return _check_chunks(state, [condition for condition, _ in recorded], shape_env)
    refusals: list[Refusal] = []
    divided: list[str] = []
    for condition, where in recorded:
        if not holds(shape_env, _of_row(condition, sizes, world_size)):
            if {part.func.__name__ for part in condition.atoms(sympy.Function)} & _DIVISIONS:
                divided.append(where)
                continue
            detail = f"`{where}` needs {condition}, which holds for a shard's tokens but not for the row's"
            detail += _reached(condition, sizes, world_size, "[" in where)
            refusals.append(Refusal(Reason.TOKEN_COUNT, detail))
    if divided:
        refusals.append(Refusal(Reason.TOKEN_COUNT, _divided(divided)))
    places = size_places(state.graph_module.graph.find_nodes(op="placeholder"))
    found = SizeConditions(dict(recorded), sizes, places) if recorded else None
    return replace(state, size_conditions=found, refusals=(*state.refusals, *refusals))


def guard_size_conditions(state: State) -> State:
    """Have a batch for which a condition turns out otherwise for the whole row compiled, and checked, anew.

    Torch takes long to prove and guard what is written with divisions: a dry run that is refused goes without.
    """
    found, mode = state.size_conditions, fake_mode_of(state.graph_module.graph.nodes)
    if found is not None and mode is not None:
        for condition in found.conditions:
            tokens = condition.free_symbols & found.tokens
            guard(mode.shape_env, _of_row(condition, tokens, state.sharding.world_size))
        for condition in found.exact:
            guard(mode.shape_env, condition)
    return state


def _of_row(condition: Any, tokens: Iterable[Any], world_size: int) -> Any:
    """A condition on a shard's tokens, said of the whole row's."""
    return condition.xreplace({size: world_size * size for size in tokens})


def _reached(condition: Any, sizes: Iterable[Any], world_size: int, places: bool) -> str:
    """From how many tokens on a condition is the same for a shard and for the row, where it compares their number with
    one of the model; "" elsewhere."""
    if not isinstance(condition, sympy.StrictLessThan | sympy.LessThan | sympy.StrictGreaterThan | sympy.GreaterThan):
        return ""
    sides: Any = condition.args
    difference = sympy.expand(sides[0] - sides[1])
    if len(difference.free_symbols) != 1 or (size := next(iter(difference.free_symbols))) not in sizes:
        return ""
    root = sympy.solve(difference, size)
    if len(root) != 1 or not root[0].is_Integer or root[0] <= 0:
        return ""
    least = int(root[0])
    least += bool(condition.xreplace({size: sympy.Integer(least)}))
    chosen = (
        f"; tokens at places, as h[:, :{least}], may be chosen by `torch.where(torch.arange(T)[:, None] < {least}, "
    )
    return (
        f". Rows of {least * world_size} tokens and more have shards of {least}, for which it is the same: make rows "
        f"longer, or pass Sharding(pad_to_multiple={least}){chosen + 'new, h)` in any row' if places else ''}"
    )


def _divided(places: Sequence[str]) -> str:
    """What a model does that decides by a share of a shard's tokens, or how many chunks they are, at these places."""
    lines = "line" if len(places) == 2 else "lines"
    more = f", and {len(places) - 1} more {lines}," if len(places) > 1 else ""
    return (
        f"`{places[0]}`{more} divides the number of tokens, as a count of chunks does, and decides one thing by a "
        "shard's and another by the row's"
    )


_Row = Mapping[Any, Any]
"""Symbols of a shard's tokens -> how many the row has."""


def _check_chunks(state: State, conditions: Sequence[Any], shape_env: Any) -> State:
    """The whole row must have the graph that the shard has. conditions: on which the shard has it.

    A shard is one of rows that fill all ranks, or of such as lack a token on each rank but one: both are looked at.
    Where the conditions of a graph hold for a row, that is its graph, and need not be traced.
    """
    world_size, known, exact = state.sharding.world_size, [conditions], list[Any]()
    for less in (0, world_size - 1):
        row = {symbol: world_size * symbol - less for symbol in state.tokens.symbols}
        found = next((each for each in known if all(holds(shape_env, c.xreplace(row)) for c in each)), None)
        if found is None:
            found = _conditions_of(state, shape_env, row)
            if isinstance(found, Refusal):
                return replace(state, refusals=(*state.refusals, found))
            known.append(found)
        exact += [condition.xreplace(row) for condition in found]
    return replace(state, size_conditions=SizeConditions({}, set(), {}, tuple(dict.fromkeys(exact))))


def _conditions_of(state: State, shape_env: Any, row: _Row) -> Sequence[Any] | Refusal:
    """On what conditions a shard as long as the row would have the same graph."""
    found, fixed = _conditions_of_shard(state, shape_env, row, 0)
    if fixed and not isinstance(found, Refusal):  # its last chunk has one token, which torch takes for a fixed size
        found, fixed = _conditions_of_shard(state, shape_env, row, 1)
    if isinstance(found, Refusal):
        return found
    return _chunks_refusal(None) if fixed else [c for c in found if holds(shape_env, c.xreplace(row))]


def _conditions_of_shard(state: State, shape_env: Any, row: _Row, more: int) -> tuple[Sequence[Any] | Refusal, bool]:
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
            return _chunks_refusal(None), False  # some are out of reach: the graph may be that of the shard once more
        return _compared(state, other, shape_env, row)

    return traced_again(longer, look) or (_chunks_refusal(None), False)


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
        return _chunks_refusal(different), fixed
    return [simplified(its_env, condition).xreplace(renamed) for condition, _ in guards_of(its_env)], fixed


def _size(node: fx.Node, dim: int | None) -> Any:
    value: Any = node.meta["example_value"]
    return expression(value if dim is None else value.shape[dim])


def _chunks_refusal(node: fx.Node | None) -> Refusal:
    """Of a loop over chunks of tokens whose number counts in the graph, at this node; None: torch can't tell."""
    detail = (
        "a shard is cut into other chunks of tokens than the row, and something is made of how many there are: cut "
        "into as many for any number of tokens (`chunk`), or leave their number out"
    )
    return Refusal(Reason.TOKEN_COUNT, detail, node)
