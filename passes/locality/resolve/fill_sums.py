"""Sums over tokens that fill, rows without a token, would change: what leaves it out.

Where ranks do not divide the tokens, some have rows that hold none, but copies (`cp_rewrite.batch.shard`). A sum in
which such a row is not 0 gets an operand in which it is:

    y = (x * x).sum()       ->      y = where(has_token, x * x, 0).sum()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.batch.active import HAS_TOKEN, ROW_TOKENS, TOKEN_INDEX
from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.graph.writes import written_nodes
from cp_rewrite.passes.locality.claims.dims import Dims, fewer
from cp_rewrite.passes.locality.claims.tensor_state import Number, Rows
from cp_rewrite.passes.locality.node.run import NodeRunner
from cp_rewrite.passes.locality.rules.spread import can_spread, held_BT, spread
from cp_rewrite.passes.values.resolution import Insert

WHY = "rows that fill a rank up are left out of this sum"


def without_fill(node: fx.Node, runner: NodeRunner) -> tuple[Insert, ...]:
    """What keeps rows without a token out of the sum that a node makes; nothing where no operand can be masked so.

    The proof is asked: the node is run as if an operand, or all of them, held a number in these rows.
    """
    if written_nodes(node):
        return ()  # to run it again would write again
    for masked in _choices(node, runner):
        before = {operand: runner.env[operand] for operand in masked}
        runner.env.update({operand: Rows(rows.dims, fill, rows.iota) for operand, (rows, fill) in masked.items()})
        events = runner.outcome(node).events
        runner.env.update(before)
        if not events.sums_fill and not events.refusals:
            return tuple(_insert(node, operand, rows.dims, fill) for operand, (rows, fill) in masked.items())
    return ()


Masked = dict[fx.Node, tuple[Rows, Number]]
"""Operands with what is known of them, and the number that their rows without a token are to hold."""


def _choices(node: fx.Node, runner: NodeRunner) -> Iterator[Masked]:
    states = {operand: runner.env.get(operand) for operand in node.all_input_nodes}
    rows = {operand: state for operand, state in states.items() if isinstance(state, Rows) and can_spread(state)}
    for operand, state in rows.items():
        yield {operand: (state, 0)}
        ignored = node.kwargs.get("ignore_index", -100)
        if isinstance(ignored, int) and not value_of(operand).is_floating_point():
            yield {operand: (state, ignored)}
    if len(rows) > 1:
        yield {operand: (state, 0) for operand, state in rows.items()}


def _insert(node: fx.Node, operand: fx.Node, dims: Dims, fill: Number) -> Insert:
    value = value_of(operand)
    number = bool(fill) if value.dtype == torch.bool else fill
    return Insert(
        node, operand, FillRows(dims, number), WHY, (HAS_TOKEN, *([TOKEN_INDEX, ROW_TOKENS] * bool(fewer(dims))))
    )


@dataclass(frozen=True)
class FillRows:
    """Puts a number into the rows without a token of a tensor with these dims."""

    dims: Dims
    number: Number

    def __call__(self, x: Tensor, *plan: Tensor) -> Tensor:
        return torch.where(spread(held_BT(self.dims, *plan), self.dims), x, self.number)
