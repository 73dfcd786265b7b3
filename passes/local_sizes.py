"""Sizes become this rank's: a graph that was read as the row's runs on a rank's tokens.

    x: (B, T, 8)    x[:, 1:]: (B, T - 1, 8)    sym_size(x, 1): T          as Dynamo traced it, and passes read it
    x: (B, R, 8)    x[:, 1:]: (B, R - 1, 8)    sym_size(x, 1): R          as it runs, R the rows of a rank

The rewrite has put what a rank computes in the place of all that depends on T itself: numbers that nothing reads any
more go, no other node changes. Fake values do, for compilers read and guard them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import SymBool, SymFloat, SymInt, Tensor

from cp_rewrite.batch.as_row import AsRow, own_of
from cp_rewrite.torch_internals import expression, fake_mode_of

from .capture.encoders import encoded_arguments, encoded_examples
from .graph.dynamo import inner_mode
from .graph.new_nodes import OtherSizes, give_sizes
from .graph.nodes import erase_unread_numbers, graph_modules
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
    erase_unread_numbers(gm)
    nodes = [node for module in graph_modules(gm) for node in module.graph.nodes]
    give_sizes(nodes, sizes, mode)
    inner = OtherSizes(sizes, inner_mode(mode))
    for node in nodes:
        if isinstance(given := node.meta.get("example_input"), Tensor) and inner.differs(given):
            node.meta["example_input"] = inner.made(given)


def local_examples(gm: fx.GraphModule, given: Sequence[Any]) -> list[Any]:
    """A rank's example inputs for a compiler, in the place of those of the row's graph."""
    mode, found = fake_mode_of(gm.graph.nodes), list(given)
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")[: len(found)]):
        if isinstance(found[i], AsRow) and mode is not None:
            local = node.meta[LOCAL]
            with inner_mode(mode), torch.no_grad():
                made = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)
            found[i] = made.requires_grad_(found[i].requires_grad)
        elif isinstance(found[i], SymInt | SymFloat | SymBool):
            found[i] = node.meta["example_value"]
    return [*found, *encoded_examples(gm)]


def local_arguments(gm: fx.GraphModule) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that turns a call's arguments into those that the graph runs with: this rank's tensors, and sizes read
    of them. A size that Dynamo's code reads of an input that looks as long as the row may be the row's."""
    sizes: dict[Any, tuple[int, int]] = {}
    nodes = gm.graph.find_nodes(op="placeholder")
    for i, node in enumerate(nodes):
        for dim, size in enumerate(node.meta[LOCAL].shape if LOCAL in node.meta else ()):
            sizes.setdefault(expression(size), (i, dim))
    numbers = {i: node.meta.get("example_value") for i, node in enumerate(nodes)}
    places = [
        (i, *sizes[found]) for i, n in numbers.items() if isinstance(n, SymInt) and (found := expression(n)) in sizes
    ]

    encoded = encoded_arguments(gm)

    def local(args: Sequence[Any]) -> tuple[Any, ...]:
        given = [*map(own_of, args)]
        for i, of, dim in places:
            given[i] = given[of].shape[dim]
        return (*given, *encoded(given))

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
