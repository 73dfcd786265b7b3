"""Which nodes still matter once attention no longer reads its masks."""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload

from .sites import Site

_IN_PLACE = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv)
_IN_PLACE_BITS = (operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imod, operator.imatmul)


def live_nodes(gm: fx.GraphModule, sites: Sequence[Site]) -> set[fx.Node]:
    """Nodes of the graph and its nested regions that outputs or effects depend on, masks of `sites` left out.

    A nested region's operand is live when the region's placeholder is. A node that writes into memory is live when
    something else that reads this memory is, or when the memory belongs to an input.
    """
    walk = _Liveness({site.node: site for site in sites})
    walk.enter(gm, root=True)
    walk.run()
    return walk.live


class _Liveness:
    def __init__(self, sites: Mapping[fx.Node, Site]) -> None:
        self.sites = sites
        self.live: set[fx.Node] = set()
        self.pending: list[fx.Node] = []
        self.writers: dict[int, list[fx.Node]] = defaultdict(list)
        self.operands: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self.entered: set[fx.GraphModule] = set()

    def enter(self, gm: fx.GraphModule, *, root: bool = False) -> None:
        if gm in self.entered:
            return
        self.entered.add(gm)
        for node in gm.graph.nodes:
            if node.op == "output":
                self.pending.append(node)
            for target in written_nodes(node):
                memory = memory_of(target)
                if memory is None or target.op in ("placeholder", "get_attr"):
                    self.pending.append(node)
                else:
                    self.writers[memory].append(node)

    def run(self) -> None:
        while self.pending:
            node = self.pending.pop()
            if node in self.live:
                continue
            self.live.add(node)
            memory = memory_of(node)
            if memory is not None:
                self.pending.extend(self.writers[memory])
            self.pending.extend(self._inputs(node))

    def _inputs(self, node: fx.Node) -> Sequence[fx.Node]:
        site = self.sites.get(node)
        if site is not None:
            return site.operands
        if node.op == "placeholder":
            return self.operands[node]
        if is_attention(node.target):
            # Refused elsewhere for its mask, which need not be looked at once more.
            return [arg for arg in node.args[:3] if isinstance(arg, fx.Node)] or node.all_input_nodes
        body = nested_body(node)
        if body is None:
            return node.all_input_nodes
        self.enter(body[0])
        for placeholder, operand in zip(placeholders(body[0]), body[1], strict=True):
            if isinstance(operand, fx.Node):
                self.operands[placeholder].append(operand)
                if placeholder in self.live:
                    self.pending.append(operand)
        return []


_ATTENTION = frozenset({"scaled_dot_product_attention", "flex_attention", "_varlen_attn"})


def is_attention(target: Any) -> bool:
    """Whether a node's target is one of the attention functions that a rewrite looks for."""
    called = target.name() if callable(getattr(target, "name", None)) else getattr(target, "__name__", "")
    return str(called).split("::")[-1].split(".")[0] in _ATTENTION


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def nested_body(node: fx.Node) -> tuple[fx.GraphModule, Sequence[Any]] | None:
    """The graph that a region node runs, and the operands for its placeholders; None for any other node."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in REGIONS:
        return None
    for arg in node.args:
        if isinstance(arg, fx.Node) and arg.op == "get_attr":
            module = getattr(arg.graph.owning_module, str(arg.target), None)
            if isinstance(module, fx.GraphModule):
                count = len(placeholders(module))
                return module, node.args[len(node.args) - count :] if count else ()
    return None


REGIONS = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "invoke_subgraph"})
"""Higher-order ops that run their body once on their operands."""


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory this node writes into."""
    if node.op not in ("call_function", "call_method"):
        return []
    out = node.kwargs.get("out")
    if out is not None:
        return [out] if isinstance(out, fx.Node) else [n for n in node.all_input_nodes]
    if not _writes(node):
        return []
    if isinstance(node.target, OpOverload):
        return list(node.all_input_nodes)
    return [node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else list(node.all_input_nodes)


def writers_between(nodes: Sequence[fx.Node], start: fx.Node, end: fx.Node) -> list[fx.Node]:
    """What changes the memory of `nodes` in place between two nodes of their graph."""
    memory = {memory_of(node) for node in nodes} - {None}
    found: list[fx.Node] = []
    node = start.next
    while node is not end and node.op != "root":
        if any(memory_of(target) in memory for target in written_nodes(node)):
            found.append(node)
        node = node.next
    return found


def _writes(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return (target.endswith("_") and not target.endswith("__")) or target == "__setitem__"
    if isinstance(target, OpOverload):
        return target._schema.is_mutable
    if target in _IN_PLACE or target in _IN_PLACE_BITS:
        return True
    name = getattr(target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or _asked_in_place(node, target)


def _asked_in_place(node: fx.Node, target: Callable[..., Any]) -> bool:
    position = _inplace_position(target)
    given = node.args[position] if position is not None and position < len(node.args) else node.kwargs.get("inplace")
    return bool(given)


@lru_cache(maxsize=1024)
def _inplace_position(target: Callable[..., Any]) -> int | None:
    """Place of an `inplace` parameter in a function's signature."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def memory_of(node: fx.Node) -> int | None:
    """Identity of the storage of a node's fake tensor."""
    value = node.meta.get("example_value")
    while isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata
