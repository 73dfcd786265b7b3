"""The graph that the function has for as many tokens as the row has, where a shard of it decides otherwise.

    if T > window: mask = mask & near        one process has 32K tokens, a rank 4K, and the window is 8K
    for x in h.split(4096, 1): …             8 chunks, where a rank has one

Dynamo traced the function on a shard. It is traced once more, on tokens as long as the row, and that graph takes the
place of the shard's: its nodes are run on the shard's fake tensors, and each must give what the row's gives, with the
shard's number of tokens in the place of the row's. What the function returns and keeps beside its tensors is Dynamo's
to make, of the shard's trace, and must be the same in both.

Refuse models that decide by the number of tokens: traced on a shard, they decided for a shard's count. And models
that make something of how many chunks of tokens there are: a shard is cut into others than the row.

    losses = [entropy(m.head(x), y) for x, y in zip(h.split(512, 1), labels.split(512, 1))]
    sum(losses) / num_items        the graph of the row is that of a shard, once both loops are joined
    sum(losses) / len(losses)      the graph of a shard has 3 where that of the row has 12

A number in the graph may be whatever Python made of their number: 3, 1 / 3, log(3), and where it was 2 or more another
branch. So the function is traced once more, on as many tokens as the row has, and both graphs are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import SymInt, Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import (
    FakeTensorMode,
    expression,
    fake_mode_of,
    guard,
    guards_of,
    holds,
    in_example,
    simplified,
)

from .capture.capture import capture
from .graph.dynamo import Results, first_difference, input_value, source_name, source_of, traced_again
from .graph.new_nodes import autocasts_open, fake_value
from .graph.nodes import attribute_of, modes_of, nested_graphs, outputs_of, region_call
from .graph.tokens import TokenAxis
from .values.sizes import SizeConditions, size_places
from .values.state import State


def of_whole_row(state: State, mode: FakeTensorMode) -> State | None:
    """The state with the row's graph in the place of the shard's; None: there is none that would do."""
    shape_env = mode.shape_env
    ours = state.frame.results()
    longer = _longer(state, shape_env)
    if ours is None or longer is None or state.tokens.masks:
        return None

    def look(gm: fx.GraphModule) -> tuple[State, Results | None] | None:
        other = capture(gm, state.sharding, state.plan)
        given = [input_value(found.node) for found in other.tokens.inputs]
        reached = all(any(value is tensor for tensor in longer.values()) for value in given)
        return (other, other.frame.results()) if reached and len(given) == len(state.tokens.inputs) else None

    found = traced_again(longer, look)
    if found is None or found[1] is None or found[1].tree != ours.tree:
        return None
    row, theirs = found
    its_env = getattr(fake_mode_of(row.graph_module.graph.nodes), "shape_env", None)
    if its_env is None or not row.tokens.symbols:
        return None
    before = len(shape_env.guards)
    try:
        moved = _Moved.of(state, row, mode, its_env)
        outputs = _outputs(row, ours, theirs, len(outputs_of(state.graph_module)))
        module = moved.module(outputs)
    except _Otherwise:
        return None
    conditions = _conditions(state, shape_env, its_env, moved.sizes, before)
    if conditions is None:
        return None
    kept = {moved.nodes[node]: where for node, where in row.frame.kept.items() if node in moved.nodes}
    places = size_places(_inputs(module))
    return replace(
        state,
        graph_module=module,
        tokens=TokenAxis.read(module, state.sharding, state.plan.tokens),
        frame=replace(state.frame, kept=kept),
        size_conditions=SizeConditions(conditions, state.tokens.symbols, places),
    )


def _conditions(
    state: State, shape_env: Any, its_env: Any, sizes: Mapping[Any, Any], before: int
) -> dict[Any, str] | None:
    """What the row's graph decided by token counts, in the shard's symbols; None: not all of it holds for the row, or
    its nodes decided otherwise when they ran on the shard's sizes, after `before` guards."""
    tokens, world_size = state.tokens.symbols, state.sharding.world_size
    of_row = {size: world_size * size for size in tokens}
    run = [simplified(shape_env, condition) for condition, _ in guards_of(shape_env)[before:]]
    found = {simplified(its_env, condition).xreplace(sizes): where for condition, where in guards_of(its_env)}
    found = {condition: where for condition, where in found.items() if condition.free_symbols & tokens}
    decided = [*found, *(condition for condition in run if condition.free_symbols & tokens)]
    return found if all(holds(shape_env, condition.xreplace(of_row)) for condition in decided) else None


def _longer(state: State, shape_env: Any) -> dict[int, Tensor] | None:
    """The `id` of each token input -> one as long as the row, with as many symbols in its shape."""
    longer: dict[int, Tensor] = {}
    for found in state.tokens.inputs:
        given: Any = input_value(found.node)
        if not isinstance(given, Tensor) or not isinstance(found.tokens, SymInt):
            return None
        shape = list(given.shape)
        shape[found.dim] *= state.sharding.world_size
        longer[id(given)] = made = given.new_zeros(shape).requires_grad_(given.requires_grad)
        for dim, size in enumerate(found.value.shape):
            if isinstance(size, SymInt):
                torch._dynamo.maybe_mark_dynamic(made, dim)
    return longer


def _outputs(row: State, ours: Results, theirs: Results, count: int) -> list[fx.Node | None]:
    """What the row's graph gives for each result of the shard's."""
    given, places = outputs_of(row.graph_module), dict[int, int]()
    for here, there in zip(ours.tensors, theirs.tensors, strict=True):
        if isinstance(here, int) != isinstance(there, int) or (isinstance(here, str) and here != there):
            raise _Otherwise
        if isinstance(here, int) and places.setdefault(here, there) != there:  # type: ignore[arg-type]
            raise _Otherwise
    if {*places} != {*range(count)}:
        raise _Otherwise
    return [given[places[place]] for place in range(count)]


class _Otherwise(Exception):
    """The row's graph can't take the place of the shard's."""


@dataclass
class _Moved:
    """The row's graph, node by node on fake tensors of the shard's sizes.

    Args:
        root: its module. graph: the new one. mode: of the shard's fake tensors. its_env: the row's sizes.
        sizes: the row's symbols -> the shard's sizes. nodes: the row's -> new ones. entered: regions that were run.
    """

    root: fx.GraphModule
    graph: fx.Graph
    mode: FakeTensorMode
    its_env: Any
    sizes: Mapping[Any, Any]
    nodes: dict[fx.Node, fx.Node]
    entered: set[fx.GraphModule]

    @staticmethod
    def of(state: State, row: State, mode: FakeTensorMode, its_env: Any) -> _Moved:
        """With the inputs of the shard's graph; a token count that only the row's graph takes is read of these."""
        graph, root = fx.Graph(), row.graph_module
        inputs = {_name_of(node): graph.node_copy(node) for node in _inputs(state.graph_module)}
        theirs = [node for node in _inputs(root) if node.users or _name_of(node) in inputs]
        nodes = {node: inputs[name] for node in theirs if (name := _name_of(node)) in inputs}
        sizes: dict[Any, Any] = {}
        places = size_places([*nodes, *(node for node in theirs if node not in nodes)])
        for symbol, (place, dim) in places.items():
            if place >= len(nodes):
                raise _Otherwise
            value: Any = [*nodes.values()][place].meta["example_value"]
            sizes[symbol] = expression(value if dim is None else value.shape[dim])
        for node in theirs:
            if node not in nodes:
                number = node.meta["example_value"]
                if not isinstance(number, SymInt) or expression(number) not in places:
                    raise _Otherwise
                place, dim = places[expression(number)]
                nodes[node] = found = [*nodes.values()][place]
                if dim is not None:
                    nodes[node] = graph.call_method("size", (found, dim))
                    nodes[node].meta = dict(node.meta, example_value=found.meta["example_value"].shape[dim])
        return _Moved(root, graph, mode, its_env, sizes, nodes, set())

    def module(self, outputs: Sequence[fx.Node | None]) -> fx.GraphModule:
        """Runs all nodes; raises _Otherwise where one gives something else."""
        modes = modes_of(self.root.graph)
        for node in self.root.graph.nodes:
            if node.op == "output":
                result = [x if x is None else self.nodes[x] for x in outputs]
                self.graph.output(tuple(result)).meta = dict(node.meta)
            elif node.op != "placeholder":
                new = self.nodes[node] = self.graph.node_copy(node, self.nodes.__getitem__)
                with autocasts_open(modes[node][0]):
                    self.run(node, new)
        module = fx.GraphModule(self.root, self.graph)
        module.meta = dict(self.root.meta)
        return module

    def run(self, node: fx.Node, new: fx.Node) -> None:
        """Give a new node the value that it has on a shard. node: the one that it is of."""
        if node.op == "get_attr":
            if not isinstance(attribute_of(node), fx.GraphModule):
                raise _Otherwise
        elif (call := region_call(node)) is not None:
            operands = [
                self.nodes.get(x, x).meta["example_value"] if isinstance(x, fx.Node) else x for x in call.operands
            ]
            new.meta["example_value"] = self.entered_with(call.body, operands)
        elif nested_graphs(node):
            raise _Otherwise
        elif "example_value" in node.meta:
            new.meta["example_value"] = self.compared(node, new)

    def entered_with(self, body: fx.GraphModule, operands: Sequence[Any]) -> Any:
        """What a region gives for operands; its nodes get their values."""
        if body in self.entered:
            raise _Otherwise
        self.entered.add(body)
        for node, operand in zip(_inputs(body), operands, strict=True):
            node.meta["example_value"] = self.like(node.meta["example_value"], operand)
        modes = modes_of(body.graph)
        for node in body.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: n.meta["example_value"])
            if node.op != "placeholder":
                with autocasts_open(modes[node][0]):
                    self.run(node, node)
        raise AssertionError("a graph has an output")

    def compared(self, node: fx.Node, new: fx.Node) -> Any:
        try:
            value = fake_value(new, self.mode)
        except Exception as error:
            raise _Otherwise from error
        return self.like(node.meta["example_value"], value)

    def like(self, old: Any, new: Any) -> Any:
        """A value of the shard's sizes, which must be like one of the row's."""
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if (
                old.dtype != new.dtype
                or old.ndim != new.ndim
                or not self.same(
                    [*old.shape, *old.stride(), old.storage_offset()], [*new.shape, *new.stride(), new.storage_offset()]
                )
            ):
                raise _Otherwise
            return new if new.requires_grad == old.requires_grad else new.detach().requires_grad_(old.requires_grad)
        if isinstance(old, list | tuple):
            if not isinstance(new, list | tuple) or len(old) != len(new):
                raise _Otherwise
            return (
                type(old)(*map(self.like, old, new)) if hasattr(old, "_fields") else type(old)(map(self.like, old, new))
            )
        if not self.same(tree_leaves(old), tree_leaves(new)):
            raise _Otherwise
        return new

    def same(self, old: Sequence[Any], new: Sequence[Any]) -> bool:
        """Whether numbers are those of the row, in the shard's sizes."""
        return len(old) == len(new) and all(map(self.same_number, old, new))

    def same_number(self, old: Any, new: Any) -> bool:
        if not isinstance(old, _NUMBERS) or not isinstance(new, _NUMBERS):
            return type(old) is type(new) and (isinstance(old, Tensor) or old == new)
        moved = simplified(self.its_env, expression(old)).xreplace(self.sizes)
        row = simplified(self.mode.shape_env, expression(new))
        return moved == row or (isinstance(moved, sympy.Expr) and sympy.expand(moved - row) == 0)


_NUMBERS = int | float | torch.SymInt | torch.SymFloat


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="placeholder")


def _name_of(node: fx.Node) -> Any:
    """What an input is called in all traces of a function."""
    source = source_of(node)
    return node.name if source is None else source_name(source)


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
