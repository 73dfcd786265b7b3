"""Erase what only masks read. Never a general dead-code elimination: on a Dynamo graph that deletes in-place ops."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from .inputs import Inputs

_PURE_MODULES = ("torch", "math", "torch._C._nn", "torch._tensor", "torch.functional", "torch.nn.functional")
_IMPURE_OPERATORS = frozenset(
    getattr(operator, f"i{name}")
    for name in ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
) | {operator.setitem, operator.delitem}
_RANDOM = {"rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "dropout", "manual_seed"}


def erase_dead(stale: Iterable[fx.Node], inputs: Inputs) -> None:
    """Erase those of the nodes that nobody reads any more, and what only they read: pure ones, back to the inputs."""
    pending = list(dict.fromkeys(stale))
    erased: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in erased or node.users:
            continue
        if node.op == "placeholder":
            graph = node.graph
            passed = inputs.drop_unused(graph, node)
            erased |= {node} if passed else set()
            pending.extend(passed)
        elif is_pure(node):
            parents = list(node.all_input_nodes)
            node.graph.erase_node(node)
            erased.add(node)
            pending.extend(parents)


def is_pure(node: fx.Node) -> bool:
    """Known to have no effect: no in-place method or function, no random number, no toggle of global state."""
    if node.op in ("get_attr", "call_method"):
        return not str(node.target).endswith("_")
    if node.op != "call_function" or "out" in node.kwargs:
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if module == "_operator":
        return target not in _IMPURE_OPERATORS
    if module in ("torch._C", "builtins", "torch._VariableFunctions"):
        module = "torch"
    return module in _PURE_MODULES and not name.startswith("_") and not name.endswith("_") and name not in _RANDOM
