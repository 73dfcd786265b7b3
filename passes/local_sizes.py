"""Sizes become this rank's: a graph that was read as the row's runs on a rank's tokens.

    x: (B, T, 8)    x[:, 1:]: (B, T - 1, 8)    sym_size(x, 1): T          as Dynamo traced it, and passes read it
    x: (B, R, 8)    x[:, 1:]: (B, R - 1, 8)    sym_size(x, 1): R          as it runs, R the rows of a rank

No node changes: the rewrite has put what a rank computes in the place of all that depends on T itself. Fake values do,
for compilers read and guard them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cp_rewrite.batch.as_row import AsRow, own_of
from cp_rewrite.torch_internals import FakeTensorMode, expression, fake_mode_of, is_wrapped, memory_id, symbolic

from .graph.dynamo import inner_mode
from .graph.nodes import graph_modules
from .graph.tokens import LOCAL
from .values.state import State


def local_sizes(state: State) -> State:
    """Give all nodes of a state's graph the sizes that they have on a rank."""
    give_local_sizes(state.graph_module)
    return replace(state, graph_module=state.graph_module)


def give_local_sizes(gm: fx.GraphModule) -> None:
    """Give all nodes of a graph, and of its nested regions, the sizes that they have on a rank."""
    mode, sizes = fake_mode_of(gm.graph.nodes), _local_symbols(gm)
    if mode is None or not sizes:
        return
    nodes = [node for module in graph_modules(gm) for node in module.graph.nodes]
    values = [x for node in nodes for x in tree_leaves(node.meta.get("example_value")) if isinstance(x, Tensor)]
    moved = _Moved(sizes, mode)
    moved.memory = {memory_id(x) for x in values if moved.differs(x)}
    inner = _Moved(sizes, inner_mode(mode))
    for node in nodes:
        if "example_value" in node.meta:
            node.meta["example_value"] = tree_map(moved.value, node.meta["example_value"])
        if isinstance(given := node.meta.get("example_input"), Tensor) and inner.differs(given):
            node.meta["example_input"] = inner.made(given)


def local_examples(gm: fx.GraphModule, given: Sequence[Any]) -> list[Any]:
    """What a compiler is given of a rank's in the place of the example inputs of the row's graph."""
    mode, found = fake_mode_of(gm.graph.nodes), list(given)
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")[: len(found)]):
        if isinstance(found[i], AsRow) and mode is not None:
            local = node.meta[LOCAL]
            with inner_mode(mode), torch.no_grad():
                made = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)
            found[i] = made.requires_grad_(found[i].requires_grad)
        elif isinstance(found[i], SymInt | SymFloat | SymBool):
            found[i] = node.meta["example_value"]
    return found


def local_arguments(gm: fx.GraphModule) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What a call of the function runs with: this rank's tensors, and sizes read of them. A size that Dynamo's code
    reads of an input that looks as long as the row may be the row's."""
    sizes: dict[Any, tuple[int, int]] = {}
    nodes = gm.graph.find_nodes(op="placeholder")
    for i, node in enumerate(nodes):
        for dim, size in enumerate(node.meta[LOCAL].shape if LOCAL in node.meta else ()):
            sizes.setdefault(expression(size), (i, dim))
    numbers = {i: node.meta.get("example_value") for i, node in enumerate(nodes)}
    places = [
        (i, *sizes[found]) for i, n in numbers.items() if isinstance(n, SymInt) and (found := expression(n)) in sizes
    ]

    def local(args: Sequence[Any]) -> tuple[Any, ...]:
        given = [*map(own_of, args)]
        for i, of, dim in places:
            given[i] = given[of].shape[dim]
        return tuple(given)

    return local


def _local_symbols(gm: fx.GraphModule) -> dict[Any, Any]:
    """The row's symbols -> what a rank has in their place."""
    found: dict[Any, Any] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if LOCAL in node.meta:
            for size, own in zip(node.meta["example_value"].shape, node.meta[LOCAL].shape, strict=True):
                row, rank = expression(size), expression(own)
                if row.is_Symbol and row != rank:
                    found[row] = rank
    return found


class _Moved:
    """Makes values of a rank's sizes. `memory`: of tensors that have others there, with all that shares it."""

    def __init__(self, sizes: Mapping[Any, Any], mode: FakeTensorMode) -> None:
        self.sizes, self.mode, self.memory = sizes, mode, set[int]()
        self._bases: dict[tuple[int, torch.dtype], Tensor] = {}
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def differs(self, x: Tensor) -> bool:
        if x.layout != torch.strided or is_wrapped(x):  # of masks, which are no longer read
            return False
        numbers = (*x.shape, *x.stride(), x.storage_offset())
        return any(isinstance(n, SymInt) and expression(n).free_symbols & self.sizes.keys() for n in numbers)

    def number(self, value: Any) -> Any:
        """A size of the row's graph as a rank has it."""
        if not isinstance(value, SymInt | SymFloat | SymBool):
            return value
        expr = expression(value)
        return symbolic(self.mode.shape_env, expr.xreplace(self.sizes), type(value)) if expr.free_symbols else value

    def value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return self.number(value)
        if value.layout != torch.strided or is_wrapped(value) or memory_id(value) not in self.memory:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._view(value).requires_grad_(value.requires_grad)
        return self._known[id(value)][1]

    def made(self, x: Tensor) -> Tensor:
        """A tensor of its own."""
        shape, stride = (tuple(map(self.number, numbers)) for numbers in (x.shape, x.stride()))
        with self.mode, torch.no_grad():
            return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)

    def _view(self, x: Tensor) -> Tensor:
        """One that shares memory where x does."""
        key = memory_id(x), x.dtype
        number: Callable[[Any], Any] = self.number
        if key not in self._bases:
            same = next((base for (memory, _), base in self._bases.items() if memory == key[0]), None)
            size = number(x.untyped_storage().nbytes()) // x.element_size()
            with self.mode, torch.no_grad():
                own = torch.empty((size,), dtype=x.dtype, device=x.device)
                self._bases[key] = own if same is None else same.view(x.dtype)
        with self.mode, torch.no_grad():
            return self._bases[key].as_strided(
                [*map(number, x.shape)], [*map(number, x.stride())], number(x.storage_offset())
            )
