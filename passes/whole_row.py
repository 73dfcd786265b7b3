"""The graph that the function has for as many tokens as the row has, where a shard of it decides otherwise.

    if T > window: mask = mask & near        one process has 32K tokens, a rank 4K, and the window is 8K
    for x in h.split(4096, 1): …             8 chunks, where a rank has one

Dynamo traced the function on a shard. It is traced once more, on tokens as long as the row, and that graph takes the
place of the shard's: its nodes are run on the shard's fake tensors, and each must give what the row's gives, with the
shard's number of tokens in the place of the row's. What the function returns and keeps beside its tensors is Dynamo's
to make, of the shard's trace, and must be the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import SymInt, Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.dynamo_frame import Results
from cp_rewrite.passes.graph.dynamo_internals import input_value, source_name, source_of
from cp_rewrite.passes.graph.modes import modes_of
from cp_rewrite.passes.graph.new_nodes import autocasts_open, fake_value
from cp_rewrite.passes.graph.regions import attribute_of, nested_graphs, outputs_of, region_call
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.graph.traced_again import traced_again
from cp_rewrite.passes.values.sizes import SizeConditions, size_places
from cp_rewrite.passes.values.state import State
from cp_rewrite.torch_internals import (
    FakeTensorMode,
    expression,
    fake_mode_of,
    guards_of,
    holds,
    simplified,
)

from .capture.capture import capture


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
