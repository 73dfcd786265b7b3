"""Calls of a `torch.autograd.Function`: its forward and its backward are graphs, and both must treat tokens alone.

forward    of operands with their claims              gives results and what it saves, with theirs
backward   of what was saved and of the gradients     gives a gradient for each operand, which must be what the
           of the results                             operand's claim asks for

result             its gradient        operand            asks for a gradient
Rows(dims)         Rows(dims), 0 in    Rows(dims)         Rows(dims), 0 in rows without a token, or made so
                   rows without a token
Partial, WHOLE     REPLICATED          Partial, WHOLE     REPLICATED
REPLICATED         Partial             REPLICATED         Partial, as `grad.T @ x` of a weight is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.nodes import memory_of, needs_gradient, nested_graphs, outputs_of, value_of, written_nodes
from cp_rewrite.passes.values.edits import Insert
from cp_rewrite.planning.plan_input import HAS_TOKEN
from cp_rewrite.refusal import Reason

from .claims import REPLICATED, UNKNOWN, WHOLE, Dims, Partial, Rows, fewer, name
from .ends import Findings
from .resolver import Resolver
from .rules.rule import can_spread, spread
from .run import NodeRunner, States, unknown_like

WalkGraph = Callable[[fx.GraphModule], fx.Node]


@dataclass(frozen=True)
class _Call:
    """A call with the two graphs. results, saved: what the forward returns; the backward takes as many gradients and
    what was saved, and returns a gradient for each operand."""

    node: fx.Node
    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def operands(self) -> Sequence[Any]:
        return self.node.args[2:]

    @staticmethod
    def of(node: fx.Node) -> _Call | None:
        """The call that a node is; None where another version of torch writes it in another way."""
        bodies = nested_graphs(node)
        if len(bodies) != 2 or list(bodies) != list(node.args[:2]):
            return None
        call = _Call(node, *bodies.values())
        given, returned = outputs_of(call.forward), outputs_of(call.backward)
        pairs = len(given) == 2 and all(isinstance(part, list | tuple) for part in given)
        if not pairs or len(returned) != len(call.operands) or len(_inputs(call.forward)) != len(call.operands):
            return None
        return call if len(_inputs(call.backward)) == sum(map(len, given)) else None


class OwnBackward:
    """Visits such calls. walk_graph: walks a graph whose placeholders are known."""

    def __init__(self, runner: NodeRunner, resolver: Resolver, findings: Findings, walk_graph: WalkGraph) -> None:
        self.runner, self.env, self.walk_graph = runner, runner.env, walk_graph
        self.resolver, self.findings = resolver, findings

    def visit(self, node: fx.Node) -> States:
        call = _Call.of(node)
        if call is None:
            detail = "the backward of a torch.autograd.Function is not read as this version of torch captures it"
            return self.findings.refuse(node, Reason.NO_LOCALITY_RULE, detail)
        operands = [self._state(operand) for operand in call.operands]
        if UNKNOWN in tree_leaves(operands):
            return unknown_like(node)
        before = len(self.findings.refusals)
        results, saved = self._walk(call.forward, operands)
        values: Sequence[Any] = value_of(node)
        sums = any(state is not REPLICATED for state in operands)
        results = [
            WHOLE if sums and state is REPLICATED and isinstance(value, Tensor) and value.requires_grad else state
            for state, value in zip(results, values, strict=True)
        ]
        gradients = [] if UNKNOWN in results + saved else self._gradients(call, results, saved)
        self._refuse_plan(call)
        if len(self.findings.refusals) > before or UNKNOWN in results + saved:
            return unknown_like(node)
        for operand, state, gradient in zip(call.operands, operands, gradients, strict=True):
            for insert in self._check(node, operand, state, gradient):
                if not self.resolver.put(insert):  # a region that is entered twice, with its tokens in other dims
                    self.findings.fill_sums[node] = None
        return unknown_like(node) if len(self.findings.refusals) > before else results

    def _gradients(self, call: _Call, results: Sequence[States], saved: Sequence[States]) -> Sequence[States]:
        found, _ = self._walk(call.backward, [*map(_gradient_of, results), *saved], backward=True)
        return found

    def _state(self, operand: Any) -> States:
        return self.env.get(operand, REPLICATED) if isinstance(operand, fx.Node) else REPLICATED

    def _walk(self, body: fx.GraphModule, given: Sequence[States], backward: bool = False) -> tuple[list[States], ...]:
        """States of what a body returns: (results, saved), or (gradients, ()). None is given for a gradient of None.

        Only what does not read the plan can be put into a body.
        """
        self.env.update(zip(_inputs(body), given, strict=True))
        inputs = {memory_of(n) for n in _inputs(body)} - {None}
        with self.runner.facts.under(moves=False, in_function=True):
            self.walk_graph(body)
        for node in body.graph.nodes:
            if any(memory_of(target) in inputs for target in written_nodes(node)):
                self.findings.refuse(node, Reason.NO_LOCALITY_RULE, "a torch.autograd.Function writes into its input")
        returned = outputs_of(body)
        parts = [returned, ()] if backward else returned
        return tuple([None if x is None else self._state(x) for x in part] for part in parts)

    def _refuse_plan(self, call: _Call) -> None:
        """Refuse what needs the plan inside of the bodies, which can't read it."""
        bodies = call.forward.graph, call.backward.graph
        for node in [n for n in self.findings.fill_sums if n.graph in bodies]:
            del self.findings.fill_sums[node]
            detail = (
                "a sum over tokens inside of a torch.autograd.Function takes in rows that hold no token: multiply by "
                "`labels != -100`, or sum outside of it"
            )
            self.findings.refuse(node, Reason.TOKEN_MIXING, detail)
        for lowering in self.resolver.lowered:
            if lowering.node.graph in bodies:
                step = lowering.steps[0]
                self.findings.refuse(lowering.node, step.reason, f"{step.detail}; in a torch.autograd.Function")

    def _check(self, node: fx.Node, operand: Any, state: States, gradient: States) -> Sequence[Insert]:
        """Refuse a gradient that the operand's claim does not ask for; what makes one 0 in rows without a token."""
        if gradient is None or not isinstance(operand, fx.Node) or not needs_gradient(operand):
            return ()
        if isinstance(state, Rows):
            if isinstance(gradient, Rows) and gradient.dims == state.dims:
                if state.attended and gradient.padding != 0:
                    self.findings.padding_sums[node] = None
                if gradient.fill == 0:
                    return ()
                if can_spread(state) and not fewer(state.dims):
                    return (Insert(node, operand, KeepGradient(state.dims), _WHY, (HAS_TOKEN,)),)
        elif gradient == Partial() if state is REPLICATED else gradient in (REPLICATED, WHOLE):
            return ()
        what = "tokens" if isinstance(state, Rows) else "a sum" if isinstance(state, Partial) else "a weight"
        detail = f"the backward of a torch.autograd.Function gives {what} a gradient that is {_words(gradient)}"
        self.findings.refuse(node, Reason.TOKEN_MIXING, detail)
        return ()


@dataclass(frozen=True)
class KeepGradient:
    """Lets gradients go only to rows with a token, of a tensor with these dims."""

    dims: Dims

    def __call__(self, x: Tensor, has_token_BT: Tensor) -> Tensor:
        return torch.where(spread(has_token_BT, self.dims), x, x.detach())


_WHY = "rows that fill a rank up get no gradient from a torch.autograd.Function"


def _gradient_of(result: States) -> States:
    """The claim of the gradient of a result: no sum takes in rows without a token, so theirs is 0."""
    if isinstance(result, Rows):
        return Rows(result.dims, fill=0, padding=0 if result.attended else None)
    return REPLICATED if isinstance(result, Partial) else Partial()


def _words(gradient: States) -> str:
    if isinstance(gradient, Rows):
        return "that of rows in dims " + " ".join("·" if d is None else "x".join(map(name, d)) for d in gradient.dims)
    return "a part on each rank" if gradient == Partial() else "the same on all ranks, and would count once for each"


def _inputs(body: fx.GraphModule) -> list[fx.Node]:
    return body.graph.find_nodes(op="placeholder")
