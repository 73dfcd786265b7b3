"""Take a node apart into ATen ops, and change those that its `Lowering` names."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from cp_rewrite.passes.graph.new_nodes import autocasts_open, call, paste, traced
from cp_rewrite.passes.graph.nodes import bind_op, value_of
from cp_rewrite.passes.locality.node.call import COPIES, METADATA, op_name
from cp_rewrite.passes.values.resolution import Lowering, Ranks, Step
from cp_rewrite.refusal import Reason, Refusal, RewriteRefused
from cp_rewrite.sharding import Sharding, group_of
from cp_rewrite.torch_internals import FakeTensorMode, TorchDispatchMode

from .plan_inputs import Inputs


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
    """Of a node that torch takes apart into other ops than when they were looked at."""
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
        if op_name(func) in COPIES and getattr(self.steps.get(self.place), "op", None) != op_name(func):
            return func(*args, **kwargs)
        step = self.steps.pop(self.place, None)
        self.place += op_name(func) not in COPIES
        if step is None:
            return func(*args, **kwargs)
        if op_name(func) != step.op:
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
