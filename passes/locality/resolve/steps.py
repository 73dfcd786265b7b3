"""What the steps of ops mean for their node: conversions of its operands, or changes inside of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cp_rewrite.passes.values.resolution import Conversion, Step


@dataclass(frozen=True)
class Steps:
    """What is done to a node for the steps of its ops.

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
        """They only leave out rows without a token."""
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
        if step.whole is not None:
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
