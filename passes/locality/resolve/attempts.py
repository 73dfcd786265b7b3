"""What may make an op the same on a shard that is not so as it is: other claims of its operands, or all ranks' tokens.

    op                            operands                    tried in this order
    x.sum() + weight.norm()       Partial, REPLICATED         both Partial: each rank adds an equal part of the norm
    mean / 2 + weight.norm()      WHOLE, REPLICATED           both WHOLE: the gradient of the norm is shared out
    count / count                 Partial, Partial            summed over ranks, once for each
    h - mean                      Rows, Partial or WHOLE      REPLICATED: summed, and its gradient is summed too
    h.amax(1)                     Rows                        the rule's own way to run over all ranks

Every attempt is judged by the op's rule: it holds where the rule takes the new claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, WHOLE, Partial, TensorState
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import Resolve, Rule
from cp_rewrite.passes.values.resolution import Conversion, Step, Whole

_PART = Partial()


@dataclass(frozen=True)
class Attempt:
    """Claims and conversions by the `id` of an operand. whole: the op runs over all ranks' tokens."""

    states: Mapping[int, TensorState] = field(default_factory=dict[int, TensorState])
    conversions: Mapping[int, tuple[Conversion, ...]] = field(default_factory=dict[int, tuple[Conversion, ...]])
    whole: Resolve | None = None

    def step(self, place: int, call: Call, whole: Whole | None, refused: Mixes) -> Step:
        """What is to be done to the op."""
        converted = [(i, self.conversions[id(x)]) for i, x in enumerate(call.tensors) if id(x) in self.conversions]
        writes = any(id(x) in self.conversions for x in call.written)
        return Step(place, call.name, tuple(converted), whole, writes, refused.reason, refused.detail)


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


def attempts(call: Call, rule: Rule | None) -> Iterator[Attempt]:
    """Ways to make an op right, the cheapest first."""
    for found in (Attempt(), *_conversions(call)):
        if found.states:
            yield found
        if rule is not None and rule.whole is not None:
            yield Attempt(found.states, found.conversions, rule.whole)


def _conversions(call: Call) -> Iterator[Attempt]:
    parts = [x for x in call.tensors if call.state(x) == _PART]
    wholes = [x for x in call.tensors if call.state(x) == WHOLE]
    own = [x for x in call.tensors if call.state(x) is REPLICATED]
    terms = call.name in ("add", "sub") and all(x.is_floating_point() for x in call.tensors)
    terms = terms and not any(_outlives_call(call, x) for x in call.written)
    if parts and own and terms and _entries(own) <= _entries(parts):
        yield _attempt(call, own, (Conversion.DIVIDE,), _PART)
    summed = _attempt(call, parts, (Conversion.SUM,), WHOLE)
    if parts:
        yield summed
    own = [x for x in own if call.facts.has_gradient(x)]
    if (parts or wholes) and own and _entries(own) <= _entries([*parts, *wholes]):
        yield _joined(summed, _attempt(call, own, (Conversion.SHARE_OUT,), WHOLE))
    if parts or wholes:
        yield _joined(
            _attempt(call, parts, (Conversion.SUM, Conversion.SUM_GRADIENT), REPLICATED),
            _attempt(call, wholes, (Conversion.SUM_GRADIENT,), REPLICATED),
        )


def _outlives_call(call: Call, x: Tensor) -> bool:
    """Whether a tensor is a buffer, or another input of the graph."""
    source = call.facts.sources.get(id(x))
    return source is not None and source.op in ("placeholder", "get_attr")


def _attempt(call: Call, tensors: list[Tensor], conversions: tuple[Conversion, ...], state: TensorState) -> Attempt:
    """These tensors converted; gradients only where there are some."""

    def needed(x: Tensor) -> tuple[Conversion, ...]:
        return tuple(c for c in conversions if c is not Conversion.SUM_GRADIENT or call.facts.has_gradient(x))

    return Attempt({id(x): state for x in tensors}, {id(x): needed(x) for x in tensors})


def _joined(a: Attempt, b: Attempt) -> Attempt:
    return Attempt({**a.states, **b.states}, {**a.conversions, **b.conversions})


def _entries(tensors: list[Tensor]) -> int:
    """Of the largest; many, where that depends on the batch."""
    counts: list[Any] = [x.numel() for x in tensors]
    return max((count if isinstance(count, int) else 1 << 60 for count in counts), default=0)
