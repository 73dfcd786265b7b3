"""Writes at places of the row as choices, token by token, of a new value or the old one.

h[:, 0] = y              h.copy_(where(arange(T)[:, None] == 0, y[:, None], h))
h[:, 1:] += h[:, :-1]    h.copy_(where(arange(T)[:, None] >= 1, h + pad(h[:, :-1], by one in front), h))

Those are writes into tensors with one dim of T. What is written where a mask is true needs no place:

y[ids == PAD] = -100     y.masked_fill(ids == PAD, -100)

Where all that reads the memory later reads the very tensor, what it reads is the new one, and nothing is written: so a
write may read what it writes over, and what is written into may be a shifted copy. Whole numbers that come near
attention are left as they are: the pass that reads masks reads these writes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.new_nodes import maker
from cp_rewrite.passes.graph.nodes import bind, op_name
from cp_rewrite.passes.graph.regions import graph_modules
from cp_rewrite.passes.graph.writes import memory_of
from cp_rewrite.torch_internals import FakeTensorMode, HigherOrderOperator, expression, fake_mode_of

from .whole_writes import basic_entries, mask_write, replace_written, view_write

_ALL = slice(None)
_New = Callable[..., fx.Node]
"""A `maker`."""
_OUT_OF_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def place_writes(gm: fx.GraphModule, counts: Collection[Any]) -> None:
    """Rewrite those of a graph and its nested regions. counts: the number of tokens, in all its symbols."""
    mode = fake_mode_of(gm.graph.nodes)
    if mode is None:
        return
    for module in graph_modules(gm):
        for node in [*module.graph.nodes]:
            node = mask_write(view_write(node, mode), mode)
            write = None if node is None else _Write.of(node, counts)
            if write is not None and not _near_attention(write.x, counts):
                write.put(mode)


@dataclass(frozen=True)
class _Write:
    """One of them.

    Args:
        node: that writes. x: what it writes into. value: what. index: of each dim of `x`. dim: of the tokens.
        first, end: places, from the row's end below 0; end None: to the end. single: the value has no dim for it.
        in_place: `x` is written; else the node gives a copy.
    """

    node: fx.Node
    x: fx.Node
    value: Any
    index: tuple[Any, ...]
    dim: int
    first: int
    end: int | None
    single: bool
    in_place: bool

    @staticmethod
    def of(node: fx.Node, counts: Collection[Any]) -> _Write | None:
        given: Any = node.args
        if node.target is operator.setitem:
            (x, index, value), in_place = given, True
        elif node.target in (torch.select_scatter, torch.slice_scatter):
            names = ("input", "src", "dim") + (
                ("index",) if node.target is torch.select_scatter else ("start", "end", "step")
            )
            given = bind(node, names, dim=0)
            x, value, in_place = given["input"], given["src"], False
            at = given["index"] if "index" in given else slice(*(given.get(name) for name in names[3:]))
            ndim = x.meta["example_value"].ndim
            index = tuple(at if dim == given["dim"] % ndim else _ALL for dim in range(ndim))
        else:
            return None
        entries = basic_entries(x, index)
        dim = _token_dim(x, counts)
        if entries is None or dim is None or entries[dim] == _ALL:
            return None
        at = entries[dim]
        single = isinstance(at, int)
        first, end = (at, at + 1 or None) if single else (at.start or 0, at.stop)
        if end is not None and ((first < 0 <= end) or ((first < 0) == (end < 0) and end <= first)):
            return None  # from a place from behind to one from the front, or none
        return _Write(node, x, value, entries, dim, first, end, single, in_place)  # type: ignore[arg-type]

    def put(self, mode: FakeTensorMode) -> None:
        new, added, value = maker(self.node, mode), *self.joined()
        others = tuple(_ALL if dim == self.dim else entry for dim, entry in enumerate(self.index))
        view = self.x if all(entry == _ALL for entry in others) else new(operator.getitem, self.x, others)
        behind = view.meta["example_value"].ndim - 1 - (self.dim - sum(isinstance(e, int) for e in others[: self.dim]))
        tokens = new("size", self.x, self.dim)
        places = new(torch.arange, tokens, device=self.x.meta["example_value"].device)
        chosen = self.chosen(new, places, tokens)
        if behind:
            chosen = new(operator.getitem, chosen, (_ALL, *[None] * behind))
        if isinstance(value, fx.Node) and isinstance(value.meta["example_value"], Tensor):
            value = self.spread(new, value, behind, places, tokens)
        if added is not None:
            old = new("clone", view)  # which a product keeps for its gradient
            value = new(_OUT_OF_PLACE[added.target], old, value)
        chosen = new(torch.where, chosen, value, view)
        if not self.in_place:
            self.node.replace_all_uses_with(chosen)
        elif view is not self.x or not replace_written(self.node, self.x, chosen, mode):
            new("copy_", view, chosen)
        for node in (self.node,) if added is None else (self.node, added, added.args[0]):
            node.graph.erase_node(node)

    def chosen(self, new: _New, places: fx.Node, tokens: fx.Node) -> fx.Node:
        """(T,) bool: which places are written."""
        first = _counted(new, self.first, tokens)
        if self.single:
            return new(operator.eq, places, first)
        behind = new(operator.ge, places, first)
        if self.end is None:
            return behind
        return new(operator.and_, behind, new(operator.lt, places, _counted(new, self.end, tokens)))

    def spread(self, new: _New, value: fx.Node, behind: int, places: fx.Node, tokens: fx.Node) -> fx.Node:
        """The value with a dim of T, or of 1, for the tokens."""
        found: Tensor = value.meta["example_value"]
        if self.single:
            index = (Ellipsis, None, *[_ALL] * behind)
            return new(operator.getitem, value, index) if found.ndim > behind else value
        size: Any = found.shape[found.ndim - 1 - behind] if found.ndim > behind else 1
        if not isinstance(size, int):  # an entry for each token but for some at the ends: [:4096] reaches to the end
            amounts = [0, 0] * behind + [max(self.first, 0), max(-(self.end or 0), 0)]
            return new(torch.nn.functional.pad, value, amounts)
        if size == 1:
            return value
        own = new("clamp", new(operator.sub, places, _counted(new, self.first, tokens)), 0, size - 1)
        return new("index_select", value, found.ndim - 1 - behind, own)

    def joined(self) -> tuple[Any, Any]:
        """(None, what is written); of `h[:, :1] += y`, which writes a sum made in place, (that sum, y)."""
        value: Any = self.value
        if not isinstance(value, fx.Node) or value.target not in _OUT_OF_PLACE or [*value.users] != [self.node]:
            return None, value
        read: Any = value.args[0]
        same = read.target is operator.getitem and read.args[0] is self.x and [*read.users] == [value]
        if same and self.in_place and basic_entries(self.x, read.args[1]) == self.index:
            return value, value.args[1]
        return None, value


def _counted(new: _New, place: int, tokens: fx.Node) -> Any:
    """A place from the row's front."""
    return place if place >= 0 else new(operator.add, tokens, place)


def _token_dim(x: fx.Node, counts: Collection[Any]) -> int | None:
    dims = [dim for dim, size in enumerate(x.meta["example_value"].shape) if expression(size) in counts]
    return dims[0] if len(dims) == 1 else None


def _near_attention(x: fx.Node, counts: Collection[Any]) -> bool:
    """Whether whole numbers may be read by a mask: something behind them has two dims of T, or is attention."""
    if x.meta["example_value"].is_floating_point():
        return False
    memory = memory_of(x)
    behind = {n for n in x.graph.nodes if memory is not None and memory_of(n) == memory} | {x}
    for node in x.graph.nodes:
        if behind.isdisjoint((node, *node.all_input_nodes)) or op_name(node) == "embedding":
            continue
        behind.add(node)
        value = node.meta.get("example_value")
        pairs = isinstance(value, Tensor) and sum(expression(size) in counts for size in value.shape) > 1
        if pairs or isinstance(node.target, HigherOrderOperator) or "attention" in op_name(node):
            return True
    return False
