"""Writes to some entries of a tensor as choices, token by token.

view_write, mask_write    writes by views and masks, brought into writes at places or by a mask
replace_written           a tensor in the place of one that was written into
part_masked_scatter       rows that are put in the place of some tokens, one after another
place_writes              writes at places of the row
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.new_nodes import Maker, maker
from cp_rewrite.passes.graph.nodes import bind, graph_modules, memory_of, modes_of, needs_gradient, op_name
from cp_rewrite.torch_internals import (
    FakeTensorMode,
    HigherOrderOperator,
    expression,
    fake_mode_of,
    memory_id,
    unwrapped,
)

_ALL = slice(None)
_OPERATORS = {"add_": operator.iadd, "sub_": operator.isub, "mul_": operator.imul, "div_": operator.itruediv}
_ENTRYWISE = ("abs_", "clamp_", "exp_", "neg_", "relu_", "sigmoid_", "sqrt_", "tanh_")


def view_write(node: fx.Node, mode: FakeTensorMode) -> fx.Node:
    """Bring a write into some entries of a tensor, by a view that nothing reads later, into one at their places.

    h[:, 1:].mul_(3)         h[:, 1:] *= 3
    u = h[:, 1:]; u[:] = y   h[:, 1:] = y
    """
    target, given = _OPERATORS.get(str(node.target), node.target), node.args
    joined, index = target in _OPERATORS.values(), _ALL
    if target is operator.setitem:
        index = given[1]
    elif not (joined or target in ("fill_", "zero_", "copy_", *_ENTRYWISE)):
        return node
    if (node.kwargs and target != "clamp_") or not isinstance(given[0], fx.Node):
        return node
    base = _base(node, given[0])
    places = None if base is None else _within(basic_entries(*base), basic_entries(given[0], index))
    if base is None or places is None:
        return node
    new = maker(node, mode)
    if joined:
        value = new(target, *given)
    elif target in _ENTRYWISE:
        value = new(str(target)[:-1], *given, **node.kwargs)
    else:
        value = 0 if target == "zero_" else given[-1]
    written = new(operator.setitem, base[0], places, value)
    node.graph.erase_node(node)
    return written


def mask_write(node: fx.Node, mode: FakeTensorMode) -> fx.Node | None:
    """Bring a write by a mask into a node that writes nothing; what is left to write, at places perhaps, or None.

    y[m] = -100              y.masked_fill(m, -100)
    y[:, :-1][m] = -100      y[:, :-1] = y[:, :-1].masked_fill(m, -100)
    h.masked_scatter(m, x)   where(m, x[place], h)
    """
    given: Any = node.args
    if node.target is operator.setitem:
        x, mask, value = given
    elif node.target == "masked_fill_" and len(given) == 3:
        x, mask, value = given
    else:
        return node
    if not _is_mask(x, mask):
        return node
    rows = node.target is operator.setitem and _is_row(x, mask, value)
    if not rows and not _fits(x, value):
        return node
    base = _base(node, x)
    if base is None and not _alone(node, x):
        return node
    new, behind = maker(node, mode), x.meta["example_value"].ndim - mask.meta["example_value"].ndim
    if behind > 0 and node.target is operator.setitem:
        mask = new(operator.getitem, mask, (Ellipsis, *[None] * behind))
    filled = new(torch.where, new("expand_as", mask, x), value, x) if rows else new("masked_fill", x, mask, value)
    if base is not None:
        written = new(operator.setitem, *base, filled)
        node.graph.erase_node(node)
        return written
    if not replace_written(node, x, filled, mode):
        node.graph.erase_node(filled)
        return node
    node.graph.erase_node(node)
    return None


def replace_written(node: fx.Node, x: fx.Node, new: fx.Node, mode: FakeTensorMode) -> bool:
    """Let what reads `x` behind `node`, which writes `new` into it, read `new`; False: something else shares it."""
    old, value = x.meta["example_value"], new.meta["example_value"]
    alike = old.dtype == value.dtype and _geometry(old) == _geometry(value)
    if not alike or not _alone(node, x):
        return False
    recorded = modes_of(node.graph)[node][1]
    with mode:  # later views of it are known by their memory, which is that of `x`
        new.meta["example_value"] = old.detach().requires_grad_(value.requires_grad and recorded)
    for written in {x, node}:
        written.replace_all_uses_with(new, delete_user_cb=lambda user: user > node)
    return True


def _alone(node: fx.Node, x: fx.Node) -> bool:
    """True if, of all that shares the memory of `x` before `node` writes into it, `x` alone is read behind `node`."""
    memory = memory_of(x)
    shared = [n for n in node.graph.nodes if memory is not None and memory in _memories(n)]
    if not shared or any(n.op in ("placeholder", "get_attr") for n in shared):
        return False
    if not modes_of(node.graph)[node][1] and needs_gradient(x):  # no gradient flows by what is written
        return False
    return not any(user > node for n in shared if n < node and n is not x for user in n.users)


def _base(node: fx.Node, x: fx.Node) -> tuple[Any, Any] | None:
    """(base, index) where a tensor that is written into is `base[index]`, which nothing reads later."""
    if x.target is not operator.getitem or node.users or any(user > node for user in x.users):
        return None
    base, index = x.args
    return (base, index) if basic_entries(base, index) is not None else None


def _within(view: tuple[Any, ...] | None, entries: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """The index that picks `entries` of what an index picks as a view; None where both pick some of a dim."""
    if view is None or entries is None:
        return None
    rest = iter(entries)
    pairs = [(entry, _ALL if isinstance(entry, int) else next(rest)) for entry in view]
    if any(_ALL not in pair for pair in pairs):
        return None
    return tuple(inner if outer == _ALL else outer for outer, inner in pairs)


def _is_mask(x: Any, mask: Any) -> bool:
    """True if `mask` holds bools, one for each entry of the first dims of `x`, or of all."""
    if not isinstance(x, fx.Node) or not isinstance(mask, fx.Node):
        return False
    held, told = x.meta.get("example_value"), mask.meta.get("example_value")
    if not isinstance(held, Tensor) or not isinstance(told, Tensor):
        return False
    return told.dtype is torch.bool and 0 < told.ndim <= held.ndim


def _fits(x: fx.Node, value: Any) -> bool:
    """True if the dtype of `x` holds the number `value` as it is."""
    held: Tensor = x.meta["example_value"]
    if isinstance(value, fx.Node):
        value = value.meta.get("example_value")
        return isinstance(value, Tensor) and value.ndim == 0 and value.dtype == held.dtype
    kinds = (int, float) if held.is_floating_point() else (bool,) if held.dtype is torch.bool else (int,)
    return type(value) in kinds


def _is_row(x: fx.Node, mask: fx.Node, value: Any) -> bool:
    """True if `value` is one row, of the dims of `x` behind the mask's."""
    held, row = x.meta["example_value"], value.meta.get("example_value") if isinstance(value, fx.Node) else None
    behind = held.ndim - mask.meta["example_value"].ndim
    return isinstance(row, Tensor) and row.dtype == held.dtype and 0 < row.ndim <= behind


def _memories(node: fx.Node) -> list[int]:
    """Identities of the storages of a node's tensors."""
    tensors = [unwrapped(x) for x in tree_leaves(node.meta.get("example_value")) if isinstance(x, Tensor)]
    return [memory_id(x) for x in tensors if x.layout == torch.strided]


def _geometry(x: Tensor) -> list[Any]:
    """Sizes and strides, where there are several entries."""
    sizes: Any = x.shape
    return [
        (expression(n), 1 if isinstance(n, int) and n == 1 else expression(step))
        for n, step in zip(sizes, x.stride(), strict=True)
    ]


def basic_entries(x: Any, index: Any) -> tuple[Any, ...] | None:
    """The index of each dim; None where it is no basic one with plain numbers."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(x, fx.Node) or not isinstance(x.meta.get("example_value"), Tensor):
        return None
    numbers = [n for i in given if isinstance(i, slice) for n in (i.start, i.stop, i.step)]
    plain = all(isinstance(i, slice) or i is Ellipsis or type(i) is int for i in given)
    if not plain or any(n is not None and type(n) is not int for n in numbers):
        return None
    if any(isinstance(i, slice) and i.step not in (None, 1) for i in given):
        return None
    missing = x.meta["example_value"].ndim - sum(i is not Ellipsis for i in given)
    place = given.index(Ellipsis) if Ellipsis in given else len(given)
    given[place : place + 1] = [_ALL] * missing
    return tuple(_ALL if isinstance(i, slice) and (i.start or 0) == 0 and i.stop is None else i for i in given)


_SCATTERS = ("masked_scatter", torch.masked_scatter)


def part_masked_scatter(gm: fx.GraphModule, counts: Collection[Any], kept: Collection[fx.Node]) -> None:
    """Make rows that are put in the place of some tokens, one after another, each token's choice.

    h.masked_scatter((ids == IMAGE)[..., None], image)

        ids == IMAGE         . x x . . x        of the whole row
        place in `image`     0 0 1 1 1 2        running sum - 1, not below 0
        chosen               h a b h h c        where(ids == IMAGE, image[place], h)

    Args:
        gm: with its nested regions. counts: the number of tokens, in all its symbols. kept: nodes that are read beside
            the graph.
    """
    mode = fake_mode_of(gm.graph.nodes)
    if mode is None:
        return
    for module in graph_modules(gm):
        for node in [*module.graph.nodes]:
            given: Any = node.args
            if node not in kept and node.target in _SCATTERS and len(given) == 3 and _is_by_token(given, counts):
                _put(node, mode, counts)


def _is_by_token(given: Sequence[Any], counts: Collection[Any]) -> bool:
    """True if a scatter fills whole tokens of a floating-point tensor from rows that are not cut over ranks."""
    values: list[Any] = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in given]
    x, mask, source = values
    if not all(isinstance(value, Tensor) for value in values) or not x.is_floating_point():
        return False
    tokens = [dim for dim, size in enumerate(x.shape) if expression(size) in counts]
    if len(tokens) != 1 or tokens[0] > 1 or mask.ndim != x.ndim or x.ndim == tokens[0] + 1:
        return False
    if any(expression(size).free_symbols & {*counts} for size in source.shape):
        return False
    behind = range(tokens[0] + 1, x.ndim)
    if not all(isinstance(x.shape[dim], int) for dim in behind):
        return False
    return expression(mask.shape[tokens[0]]) in counts and all(
        mask.shape[d] == 1 or mask.stride(d) == 0 for d in behind
    )


def _put(node: fx.Node, mode: FakeTensorMode, counts: Collection[Any]) -> None:
    x, mask, source = node.args
    assert isinstance(x, fx.Node)
    new, value = maker(node, mode), x.meta["example_value"]
    behind = value.ndim - 1 - next(dim for dim, size in enumerate(value.shape) if expression(size) in counts)
    front = [new("size", x, dim) for dim in range(value.ndim - behind)]
    there = new("expand", new(operator.getitem, mask, (Ellipsis, *[0] * behind)), *front)
    place = new("clamp", new("sub", new("cumsum", new("flatten", there), 0), 1), 0)
    rows = new("index_select", new("reshape", source, -1, *value.shape[-behind:]), 0, place)
    rows = new("unflatten", rows, 0, tuple(front)) if len(front) > 1 else rows
    chosen = new(torch.where, new(operator.getitem, there, (Ellipsis, *[None] * behind)), rows, x)
    node.replace_all_uses_with(chosen)
    node.graph.erase_node(node)


_OUT_OF_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def place_writes(gm: fx.GraphModule, counts: Collection[Any]) -> None:
    """Rewrite writes at places of the row as choices, token by token, of a new value or the old one, in a graph and its
    nested regions.

        h[:, 0] = y              h.copy_(where(arange(T)[:, None] == 0, y[:, None], h))
        h[:, 1:] += h[:, :-1]    h.copy_(where(arange(T)[:, None] >= 1, h + pad(h[:, :-1], by one in front), h))

    Those are writes into tensors with one dim of T. What is written where a mask is true needs no place:

        y[ids == PAD] = -100     y.masked_fill(ids == PAD, -100)

    Where all that reads the memory later reads the very tensor, what it reads is the new one, and nothing is written:
    so a write may read what it writes over, and what is written into may be a shifted copy. Whole numbers that come
    near attention are left as they are: the pass that reads masks reads these writes.

    counts: the number of tokens, in all its symbols.
    """
    mode = fake_mode_of(gm.graph.nodes)
    if mode is None:
        return
    for module in graph_modules(gm):
        for node in [*module.graph.nodes]:
            node = mask_write(view_write(node, mode), mode)
            write = None if node is None else _Write.of(node, counts)
            if write is not None and not near_attention(write.x, counts):
                write.put(mode)


@dataclass(frozen=True)
class _Write:
    """A write at places of the row.

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

    def chosen(self, new: Maker, places: fx.Node, tokens: fx.Node) -> fx.Node:
        """(T,) bool: which places are written."""
        first = _counted(new, self.first, tokens)
        if self.single:
            return new(operator.eq, places, first)
        behind = new(operator.ge, places, first)
        if self.end is None:
            return behind
        return new(operator.and_, behind, new(operator.lt, places, _counted(new, self.end, tokens)))

    def spread(self, new: Maker, value: fx.Node, behind: int, places: fx.Node, tokens: fx.Node) -> fx.Node:
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


def _counted(new: Maker, place: int, tokens: fx.Node) -> Any:
    """A place from the row's front."""
    return place if place >= 0 else new(operator.add, tokens, place)


def _token_dim(x: fx.Node, counts: Collection[Any]) -> int | None:
    dims = [dim for dim, size in enumerate(x.meta["example_value"].shape) if expression(size) in counts]
    return dims[0] if len(dims) == 1 else None


def near_attention(x: fx.Node, counts: Collection[Any]) -> bool:
    """True if a mask may read the whole numbers `x`: something that is computed of them in whole numbers has two dims
    of T, or attention reads it."""
    if x.meta["example_value"].is_floating_point():
        return False
    memory = memory_of(x)
    behind = {n for n in x.graph.nodes if memory is not None and memory_of(n) == memory} | {x}
    for node in x.graph.nodes:
        if behind.isdisjoint((node, *node.all_input_nodes)) or op_name(node) == "embedding":
            continue
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            behind.add(node)
        pairs = isinstance(value, Tensor) and sum(expression(size) in counts for size in value.shape) > 1
        if pairs or isinstance(node.target, HigherOrderOperator) or "attention" in op_name(node):
            return True
    return False
