"""One op on ranks played by threads beside the same op on one process: proven, rewritten, run, joined, compared.

    x (T, 4) tokens ── rows without a token hold 0 ──┐
    w (4, 4) all ranks hold it ──────────────────────┴─ op ─ results

An operand whose rows without a token hold a number goes through `masked_fill`; a part is a sum of rows, a whole the
largest.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

import cp_rewrite as cp
from cp_rewrite.batch.active import ActivePlan
from cp_rewrite.batch.handed import Handed
from cp_rewrite.diagnose.check import ThreadSharding
from cp_rewrite.passes.graph.dynamo import fake_input
from cp_rewrite.passes.graph.new_nodes import call
from cp_rewrite.passes.graph.tokens import TokenAxis, TokenInput
from cp_rewrite.passes.values.state import State
from cp_rewrite.torch_internals import expression

from .claims import Claim, Claims, Kind
from .cuts import Cuts
from .samples import Sample

SHARDING = cp.Sharding(2, {"tokens": 0, "labels": 0}, cp.WholeRows(), "dual_chunk")


class NotTried(Exception):
    """The op does not run on symbolic sizes, or on a shard; or it decides by the number of tokens."""


@dataclass(frozen=True)
class Operand:
    """An input of the graph, from which a tensor of a sample is computed.

    dim: its token dim; None: all ranks hold it. name: of the argument.
    """

    value: Tensor
    dim: int | None
    name: str

    def on(self, place: int, cuts: Cuts) -> Tensor:
        """The value on rank `place`, as a leaf."""
        x = self.value if self.dim is None else cuts.cut(self.value, self.dim, place, self.name == "labels")
        return x.detach().clone().requires_grad_(self.value.requires_grad)


class Program:
    """A sample's op as Dynamo would have captured it on a shard.

    Args:
        sized: numbers that are the token count are taken off the shard, as `x.size(1)`.
    """

    def __init__(self, sample: Sample, claims: Claims, cuts: Cuts, sized: bool) -> None:
        self.sample, self.claims, self.cuts = sample, claims, cuts
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.size: Any = fake_input(self.mode, torch.empty(cuts.local), "size", [True]).shape[0]
        self.symbol = self.size.node.expr
        self.operands: dict[fx.Node, Operand] = {}
        self.gm: fx.GraphModule = fx.GraphModule({}, self.graph)
        self._write(sized)

    def _write(self, sized: bool) -> None:
        tensors = self.sample.tensors
        claims, pending = self.claims, []
        given = [self._input(x, claim) for x, claim in zip(tensors, claims.each, strict=True)]
        if any(claim.fill is not None for claim in claims.each):
            count = (claims.tokens,) if claims.rows == 1 else (claims.rows, claims.tokens)
            labels = self._placeholder("labels", torch.ones(count, dtype=torch.int64), len(count) - 1)
            pending = [self._call("eq", labels, -100)]
        operands = [self._operand(x, claim, pending) for x, claim in zip(given, claims.each, strict=True)]
        if self.sample.writes:
            operands[0] = self._call("clone", operands[0])
        made = iter(operands)
        first = next(node for node, operand in self.operands.items() if operand.dim is not None)
        size = self._call("size", first, self.operands[first].dim) if sized else None

        def argument(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(made)
            return size if sized and type(value) is int and value == claims.tokens else value

        args, kwargs = tree_map(argument, (self.sample.args, self.sample.kwargs))
        self.node = self._call(_named(self.sample.function), *args, **kwargs)
        value = self.node.meta["example_value"]
        if isinstance(value, Tensor):
            self.leaves = [self.node]
        elif isinstance(value, list | tuple) and all(isinstance(x, Tensor) for x in value):
            self.leaves = [self._call(operator.getitem, self.node, i) for i in range(len(value))]
        else:
            raise NotTried("gives no tensors")
        sizes = [size for leaf in self.leaves for size in leaf.meta["example_value"].shape]
        if any(expression(size).free_symbols - {self.symbol} for size in sizes):
            raise NotTried("gives as many entries as there happen to be")
        self.graph.output(tuple(self.leaves))
        self.gm.recompile()

    def _input(self, x: Tensor, claim: Claim) -> fx.Node:
        rows, tokens = self.claims.rows, self.claims.tokens
        if claim.kind is Kind.SAME:
            return self._placeholder("weight", x.detach(), None)
        if claim.kind is Kind.ROWS and rows > 1:
            return self._placeholder("tokens", x.detach(), claim.dim)
        if claim.kind is Kind.ROWS:  # the dim before that of tokens would count the rows of the batch
            return self._placeholder("tokens", x.detach().transpose(0, claim.dim), 0)
        shape = (*((rows,) if rows > 1 else ()), tokens, *x.shape)
        over, noise = list(range(len(shape) - x.ndim)), _exact(torch.rand(shape, dtype=x.dtype))
        made = _exact(x.detach()) - noise
        first = made[(0,) * len(over)]
        if claim.kind is Kind.WHOLE:
            first += noise[(0,) * len(over)]
        else:
            first += _exact(x.detach()) - made.sum(over)
        return self._placeholder("tokens", made, len(over) - 1)

    def _placeholder(self, name: str, value: Tensor, dim: int | None) -> fx.Node:
        value = value.contiguous().requires_grad_(value.is_floating_point())
        with self.graph.inserting_before(next((n for n in self.graph.nodes if n.op != "placeholder"), None)):
            node = self.graph.placeholder(f"{name}_{len(self.operands)}")
        sizes = [self.size if i == dim else size for i, size in enumerate(value.shape)]
        with self.mode:
            node.meta["example_value"] = torch.empty(sizes, dtype=value.dtype, requires_grad=value.requires_grad)
        self.operands[node] = Operand(value, dim, name)
        return node

    def _operand(self, x: fx.Node, claim: Claim, filled: list[fx.Node]) -> fx.Node:
        ndim, batch = x.meta["example_value"].ndim, self.claims.rows > 1
        if claim.kind in (Kind.PART, Kind.WHOLE):
            return self._call("sum" if claim.kind is Kind.PART else "amax", x, [0, 1] if batch else [0])
        if claim.kind is Kind.ROWS and claim.dim and not batch:
            x = self._call("contiguous", self._call("transpose", x, 0, claim.dim))
        if claim.kind is Kind.SAME or claim.fill is None:
            return x
        mask = filled[0]
        for _ in range(ndim - 1 - claim.dim):
            mask = self._call("unsqueeze", mask, -1)
        return self._call("masked_fill", x, mask, claim.fill)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, args, kwargs)
        writes = target is self.sample.function and self.sample.writes  # into a leaf, if it asked for a gradient
        with self.mode, enable_python_dispatcher(), torch.set_grad_enabled(not writes):
            value = call(node, lambda n: _alias(n.meta["example_value"]) if writes else n.meta["example_value"])
        needed = writes and node.args[0].meta["example_value"].requires_grad
        node.meta["example_value"] = tree_map(
            lambda x: x.detach().requires_grad_(x.requires_grad or needed) if isinstance(x, Tensor) else x, value
        )
        return node

    def guards_hold(self) -> bool:
        """True if each decision of the op by the shard's token count is the same for the row, and for any shard."""
        counts, guards = (self.cuts.local, self.claims.tokens, 97), self.mode.shape_env.guards
        found = [guard.expr.subs({self.symbol: count}) for guard in guards for count in counts]
        return all(holds == sympy.true for holds in found)

    def state(self, sharding: ThreadSharding) -> State:
        """As the passes have it, tokens unified."""
        inputs = [
            TokenInput(node, place, operand.name, operand.dim)
            for place, (node, operand) in enumerate(self._in_order())
            if operand.dim is not None
        ]
        tokens = TokenAxis({node: x.name for node, x in self.operands.items()}, tuple(inputs), ())
        plan = ActivePlan(Handed(sharding, self.cuts.plan, tokens=sharding.tokens), torch.device("cpu"))
        none: Any = None
        return State(self.gm, sharding, tokens, torch.device("cpu"), plan, none)

    def _in_order(self) -> list[tuple[fx.Node, Operand]]:
        return [
            (node, self.operands[node]) for node in self.graph.find_nodes(op="placeholder") if node in self.operands
        ]

    def inputs(self, place: int | None) -> list[Tensor]:
        """The graph's, of a rank; None: of one process."""
        found = [operand for _, operand in self._in_order()]
        if place is None:
            return [x.value.detach().clone().requires_grad_(x.value.requires_grad) for x in found]
        return [x.on(place, self.cuts) for x in found]

    @property
    def token_dims(self) -> list[int | None]:
        """The token dim of each input."""
        return [operand.dim for _, operand in self._in_order()]


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _exact(x: Tensor) -> Tensor:
    """Numbers of few digits, of which sums are exact in any order: ops that jump may read them."""
    return (x * 2**20).round() / 2**20


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a graph may call: one without a name of its own gets one."""
    if getattr(function, "__name__", "<lambda>") not in ("<lambda>", "<module>") and not isinstance(
        function, types.MethodType
    ):
        return function

    def unnamed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    unnamed.__module__ = "torch"
    return unnamed
