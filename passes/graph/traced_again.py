"""Trace the function that is compiled now once more, on other tensors, and compare what comes of it.

Python's own arithmetic leaves but its results in a graph: in `total / len(chunks)` nobody sees that the 3 counts what a
shard is cut into. In the graph of a longer row it is another number.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .dynamo_frame import frame_call
from .dynamo_internals import source_name, source_of
from .regions import attribute_of


def traced_again(others: Mapping[int, Tensor], look: Callable[[fx.GraphModule], Any]) -> Any:
    """What `look` says of the function's graph with other tensors; None: it can't be traced so, or no backend runs.

    Args:
        others: the `id` of a tensor among the function's arguments -> what takes its place.
    """
    call = frame_call(lambda values: _with_others(values, others))
    if call is None:
        return None
    found: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        try:
            found.append(look(gm))
        except Exception as error:
            found.append(error)
        raise _Stop

    try:
        function, args, kwargs = call
        with torch._dynamo.config.patch(suppress_errors=False):
            torch.compile(function, backend=backend, fullgraph=True)(*args, **kwargs)
    except Exception:  # _Stop inside of one of Dynamo's, or what the function has against these tensors
        pass
    if found and isinstance(found[0], Exception):
        raise found[0]
    return found[0] if found else None


def _with_others(value: Any, others: Mapping[int, Tensor], depth: int = 3) -> Any:
    """With other tensors, also in the attributes of objects, which are copied then: a dataclass, a UserDict."""

    def other(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return others.get(id(leaf), leaf)
        if not depth or isinstance(leaf, nn.Module | type | ModuleType | FunctionType) or not hasattr(leaf, "__dict__"):
            return leaf
        changed = {name: new for name, part in vars(leaf).items() if (new := inside(part)) is not part}
        if not changed:
            return leaf
        found = copy.copy(leaf)
        vars(found).update(changed)
        return found

    def inside(part: Any) -> Any:
        found = _with_others(part, others, depth - 1)
        return part if all(map(operator.is_, tree_leaves(found), tree_leaves(part))) else found

    return tree_map(other, value)


class _Stop(Exception):
    """The graph is known; nothing need run."""


Same = Callable[[Any, Any], bool]
"""Whether two numbers are the same, of which one, or both, may be made of sizes."""


def first_difference(ours: fx.GraphModule, other: fx.GraphModule, same: Same) -> fx.Node | None:
    """The first node of `ours` that `other` computes otherwise; None: both are the same.

    Nodes that give numbers are not compared, but those that read them are.
    """
    pairs: dict[fx.Node, fx.Node] = {}

    def alike(a: Any, b: Any) -> bool:
        a, b = _number(a), _number(b)
        if isinstance(a, fx.Node):
            return pairs.get(a) is b
        if isinstance(a, list | tuple):
            return isinstance(b, list | tuple) and len(a) == len(b) and all(map(alike, a, b))
        if isinstance(a, dict):
            return isinstance(b, dict) and [*a] == [*b] and all(alike(a[key], b[key]) for key in a)
        if isinstance(a, slice):
            return isinstance(b, slice) and alike((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        if isinstance(a, _SYMBOLIC) or isinstance(b, _SYMBOLIC):
            return all(isinstance(x, int | float | _SYMBOLIC) for x in (a, b)) and same(a, b)
        return type(a) is type(b) and bool(a == b)

    theirs = [node for node in other.graph.nodes if _number(node) is node]
    for place, node in enumerate(node for node in ours.graph.nodes if _number(node) is node):
        like = theirs[place] if place < len(theirs) else None
        if like is None or node.op != like.op or not _same_target(node, like, same):
            return node
        if not alike((node.args, node.kwargs), (like.args, like.kwargs)):
            return node
        pairs[node] = like
    return None if len(theirs) == len(pairs) else next(reversed(pairs))


_SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool


def _number(value: Any) -> Any:
    """The numbers that a node gives; of another node, or no node, what was given."""
    if not isinstance(value, fx.Node):
        return value
    leaves = tree_leaves(given := value.meta.get("example_value"))
    return given if leaves and all(isinstance(leaf, int | float | _SYMBOLIC) for leaf in leaves) else value


def _same_target(ours: fx.Node, other: fx.Node, same: Same) -> bool:
    if ours.op == "placeholder":
        sources = source_of(ours), source_of(other)
        return sources == (None, None) or (None not in sources and len({*map(source_name, sources)}) == 1)
    if ours.op != "get_attr":
        return ours.target == other.target
    a, b = attribute_of(ours), attribute_of(other)
    if isinstance(a, fx.GraphModule) and isinstance(b, fx.GraphModule):
        return first_difference(a, b, same) is None
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape:
        return a is b or torch.equal(a, b)
    return a is b
