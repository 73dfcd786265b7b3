"""The steps of ops as changes of the graph: what is put between nodes and their operands, and which are taken apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import memory_of, op_name
from cp_rewrite.passes.values.edits import Conversion, Converted, Insert, Lowering, Step
from cp_rewrite.sharding import Sharding, group_of

from .ways import FillRows


@dataclass(frozen=True)
class Steps:
    """The changes of a node that the steps of its ops ask for.

    Args:
        operands: (place among the node's arguments, conversions): this is all.
        inside: else the node is taken apart, and these of its ops are changed.
        autocasts: arguments of the autocast regions that it stands in.
        reasons: all steps.
    """

    operands: tuple[tuple[int, tuple[Conversion, ...]], ...] = ()
    inside: tuple[Step, ...] = ()
    autocasts: tuple[Any, ...] = ()
    reasons: tuple[Step, ...] = ()

    @property
    def local(self) -> bool:
        """True if the steps only leave out rows without a token."""
        return all(step.local for step in self.reasons)


NO_STEPS = Steps()


def on_operands(
    steps: Sequence[Step], uses: Counter[int], taken: Mapping[int, Sequence[Tensor]], operands: Mapping[int, Any]
) -> dict[int, tuple[Conversion, ...]] | None:
    """The steps as conversions of the node's operands, by place; None where they change something inside of the node.

    Args:
        uses: how many ops take a tensor, by `id`. taken: the tensors of the ops that have steps, by place.
        operands: (place, source node) by the `id` of the node's own tensors.
    """
    found: dict[int, tuple[Conversion, ...]] = {}
    times: Counter[int] = Counter()
    for step in steps:
        if step.run is not None:
            return None
        for i, conversions in step.converted:
            number = id(taken[step.place][i])
            if number not in operands or found.setdefault(operands[number][0], conversions) != conversions:
                return None
            times[number] += 1
    converted = {operands[number][1] for number in times}
    # An op that takes the same tensor as it is, or another reading of the same node, keeps the step inside.
    once = all(times[number] == uses[number] for number, (_, source) in operands.items() if source in converted)
    return {place: conversions for place, conversions in found.items() if conversions} if once else None


class Resolver:
    """Collects them, node by node. A node of a nested region must come with the same steps at every call."""

    def __init__(self, sharding: Sharding) -> None:
        self.world_size = sharding.world_size
        self.group = group_of(sharding)
        self.inserts: list[Insert] = []
        self.lowered: list[Lowering] = []
        self._known: dict[fx.Node, Steps] = {}

    def add(self, node: fx.Node, steps: Steps) -> Step | None:
        """Note what is done to a node; a step whose reason to refuse the node stands nevertheless."""
        known = self._known.get(node, steps)
        if known == NO_STEPS and steps.local:  # rows without a token may be left out for another call, too
            known = steps
        self._known[node] = known
        if known is not steps:
            same = (known.operands, known.inside) == (steps.operands, steps.inside)
            same |= known.local and steps == NO_STEPS
            return None if same else replace((steps.reasons or known.reasons)[0], detail=_REGION)
        if any(step.writes for step in steps.reasons) and not _is_alone(node):
            return next(step for step in steps.reasons if step.writes)
        if steps.inside:
            self.lowered.append(Lowering(node, steps.inside, steps.autocasts))
        places: list[fx.Node] = []
        if steps.operands:
            fx.map_arg((node.args, node.kwargs), places.append)
        for place, conversions in steps.operands:
            why = next((each.why for each in conversions if isinstance(each, FillRows)), None)
            self._convert(node, places[place], conversions, why or f"{op_name(node)} needs it whole")
        return None

    def changes(self, node: fx.Node) -> bool:
        """True if a node is changed otherwise than by leaving rows that fill a rank up out of its sums."""
        return not self._known.get(node, NO_STEPS).local

    def add_output(self, output: fx.Node, leaf: fx.Node, conversions: Sequence[Conversion], why: str) -> None:
        """Convert what the graph returns."""
        self._convert(output, leaf, conversions, why)

    def put(self, insert: Insert) -> bool:
        """Put something between a node and its operand; whether nothing else stands there."""
        there = [i for i in self.inserts if (i.node, i.operand) == (insert.node, insert.operand)]
        self.inserts += [] if there else [insert]
        return not there or there == [insert]

    def _convert(self, node: fx.Node, operand: fx.Node, conversions: Sequence[Conversion], why: str) -> None:
        converted = Converted(tuple(conversions), self.group, self.world_size)
        self.put(Insert(node, operand, converted, why, converted.reads))


def _is_alone(node: fx.Node) -> bool:
    """A node that writes into a converted operand writes into a copy: who reads that memory later must read the copy.

    Those who read the operand itself are sent there by the rewrite; others, by way of a view, are in the way.
    """
    target: Any = node.args[0] if node.args else None
    if not isinstance(target, fx.Node) or target.op in ("placeholder", "get_attr") or target.graph is not node.graph:
        return False
    places = {n: place for place, n in enumerate(node.graph.nodes)}
    memory = memory_of(target)
    others = [n for n in places if n not in (target, node) and memory_of(n) == memory]
    later = any(places[user] > places[node] for n in others for user in n.users if user not in (target, node))
    return memory is not None and not later and _gives_first(node)


def _gives_first(node: fx.Node) -> bool:
    """True if the result of a node that writes in place is what it wrote into, as of `x += y` and `x.add_(y)`."""
    return memory_of(node) == memory_of(node.args[0])  # type: ignore[arg-type]


_REGION = "a nested region is called with sums over tokens and with other values: call it with one kind"
