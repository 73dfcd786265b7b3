"""Nodes that move tokens and do more at once, brought into nodes that each do one of both."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx
from torch import SymInt, Tensor

from cp_rewrite.passes.graph.new_nodes import Maker, maker
from cp_rewrite.passes.graph.nodes import bind, graph_modules, memory_of, op_name, written_nodes
from cp_rewrite.torch_internals import FakeTensorMode, expression, fake_mode_of

from .chunks import CUTS
from .scatters import near_attention

_ALL = slice(None)


def part_moves(gm: fx.GraphModule, counts: Collection[Any]) -> None:
    """Let nodes that move tokens and do more at once become nodes that each do one of both, in a graph and its nested
    regions.

        x[:, 1:, None]              x[:, 1:], and of that [:, :, None]
        x[:, 1:, :4]                x[:, :, :4], and of that [:, 1:]
        x.split(T, 1)[0]            x
        x.diff(dim=1)               x[:, 1:] - x[:, :-1]
        x.unfold(1, 3, 1)           stack([x[:, :-2], x[:, 1:-1], x[:, 2:]], -1)
        arange(1, T + 1)            arange(T), and of that + 1
        arange(T - 1, -1, -1)       arange(T), and of that * -1 + (T - 1)
        repeat_interleave(x, n)     x[bucketize(arange(T), n.cumsum(0), right=True)], where n are of T tokens

    counts: the number of tokens, in all its symbols.
    """
    mode = fake_mode_of(gm.graph.nodes)
    if mode is None:
        return
    modules = graph_modules(gm)
    for module in modules:
        _leave_out_single(module.graph)
    written = {memory_of(target) for m in modules for node in m.graph.nodes for target in written_nodes(node)}
    for node in [node for m in modules for node in m.graph.nodes]:
        if node.target is operator.getitem:
            _split(node, mode)
        elif node.target is torch.nn.functional.unfold:  # im2col, which has but the name in common
            continue
        elif node.target is torch.arange:
            _count(node, mode)
        elif op_name(node) == "repeat_interleave":
            _repeat(node, mode, counts)
        elif op_name(node) in ("diff", "unfold") and isinstance(node.args[0], fx.Node):
            part = _diff if op_name(node) == "diff" else _unfold
            if memory_of(node.args[0]) not in written:  # what unfold gives is a view
                part(node, mode)


def _leave_out_single(graph: fx.Graph) -> None:
    """Let readers of a cut's only chunk read what was cut."""
    for node in [*graph.nodes]:
        value = node.meta.get("example_value") if op_name(node) in CUTS else None
        if not isinstance(value, list | tuple) or len(value) != 1:
            continue
        if all(user.target is operator.getitem for user in node.users):
            for user in [*node.users]:
                user.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                graph.erase_node(user)
            graph.erase_node(node)


def _split(node: fx.Node, mode: FakeTensorMode) -> None:
    source: Any
    source, index = node.args
    while isinstance(source.meta.get("example_value"), Tensor) and (parts := _parts(index)) is not None:
        source, index = maker(node, mode)(operator.getitem, source, parts[0]), parts[1]
        node.args = (source, index)


def _parts(index: Any) -> tuple[Any, Any] | None:
    """(the last slice, the rest) of an index; None where it has but one of them, or is no basic one."""
    entries = list(index) if isinstance(index, tuple) else [index]
    basic = all(i is None or i is Ellipsis or isinstance(i, slice) or type(i) is int for i in entries)
    slices = [place for place, i in enumerate(entries) if isinstance(i, slice) and i != _ALL]
    if not basic or not slices:
        return None
    last = slices[-1]
    rest = [_ALL if place == last else i for place, i in enumerate(entries)]
    if all(i is Ellipsis or i == _ALL for i in rest):
        return None
    first = [entries[last] if place == last else i if i is Ellipsis else _ALL for place, i in enumerate(entries)]
    return tuple(i for i, given in zip(first, entries, strict=True) if given is not None), tuple(rest)


def _diff(node: fx.Node, mode: FakeTensorMode) -> None:
    given = bind(node, ("input", "n", "dim", "prepend", "append"), n=1, dim=-1, prepend=None, append=None)
    x, times, dim = given["input"], given["n"], given["dim"]
    shape = x.meta["example_value"].shape
    if not isinstance(times, int) or times < 1 or not isinstance(dim, int) or not isinstance(shape[dim], SymInt):
        return
    less = torch.logical_xor if x.meta["example_value"].dtype is torch.bool else operator.sub
    new = maker(node, mode)
    ends = [given["prepend"], x, given["append"]]
    if any(end is not None for end in ends[::2]):
        x = new(torch.cat, [end for end in ends if end is not None], dim)
    for _ in range(times):
        x = new(less, _sliced(new, x, dim, 1, None), _sliced(new, x, dim, None, -1))
    _take_place(node, x)


def _unfold(node: fx.Node, mode: FakeTensorMode) -> None:
    given = bind(node, ("self", "dimension", "size", "step"))
    x, dim, size = given["self"], given["dimension"], given["size"]
    shape = x.meta["example_value"].shape
    if (
        given["step"] != 1
        or not isinstance(size, int)
        or not isinstance(dim, int)
        or not isinstance(shape[dim], SymInt)
    ):
        return
    new = maker(node, mode)
    taps = [_sliced(new, x, dim, i or None, i - size + 1 or None) for i in range(size)]
    _take_place(node, new(torch.stack, taps, -1))


def _count(node: fx.Node, mode: FakeTensorMode) -> None:
    """arange from another start, or by other steps, along a dim that is made of sizes."""
    names = ("end",) if len(node.args) == 1 else ("start", "end", "step")
    given = bind(node, names, start=0, step=1)
    start, end, step = (given.pop(name, None) for name in ("start", "end", "step"))
    numbers = [n.meta.get("example_value") if isinstance(n, fx.Node) else n for n in (start, end, step)]
    count = node.meta["example_value"].shape[0]
    if (start, step) == (0, 1) or given.keys() - {"device", "dtype"} or not isinstance(count, SymInt):
        return
    if step not in (1, -1) or not all(isinstance(n, int | SymInt) for n in numbers):
        return
    dtype, new = given.pop("dtype", None), maker(node, mode)
    length = new(operator.sub, *((end, start) if step == 1 else (start, end)))
    if expression(length.meta["example_value"]) != expression(count):  # more than the row has, or none
        node.graph.erase_node(length)
        return
    places = new(torch.arange, length, **given)
    places = new(operator.add, new(operator.neg, places) if step == -1 else places, start)
    _take_place(node, places if dtype in (None, torch.int64) else new(torch.Tensor.to, places, dtype))


def _repeat(node: fx.Node, mode: FakeTensorMode, counts: Collection[Any]) -> None:
    """Entries of what all ranks have, each for as many tokens as another tensor says; an error of indexing where these
    are more than there are. Those that masks read stay: what they mean is known."""
    given = bind(node, ("input", "repeats", "dim"), dim=None, output_size=None)
    x, repeats, count = given["input"], given.get("repeats"), node.meta["example_value"].shape[0]
    values: list[Any] = [n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in (x, repeats)]
    if not all(isinstance(value, Tensor) for value in values) or given["output_size"] is None:
        return
    if values[1].ndim != 1 or given["dim"] not in ((None, 0) if values[0].ndim == 1 else (0,)):
        return
    if expression(count) not in counts or near_attention(node, counts):
        return
    new = maker(node, mode)
    places = new(torch.arange, given["output_size"], device=values[0].device)
    ends = new("cumsum", repeats, 0)
    more = new(operator.gt, new(operator.getitem, ends, -1), given["output_size"])
    which = new("add", new(torch.bucketize, places, ends, right=True), new("mul", more, new("size", repeats, 0)))
    _take_place(node, new(operator.getitem, x, which))


def _sliced(new: Maker, x: fx.Node, dim: int, start: int | None, stop: int | None) -> fx.Node:
    dim %= x.meta["example_value"].ndim
    return x if start is stop is None else new(operator.getitem, x, (*[_ALL] * dim, slice(start, stop)))


def _take_place(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
