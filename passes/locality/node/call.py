"""One ATen op as locality rules see it: its arguments by name, and the states of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.nodes import bind_op
from cp_rewrite.passes.locality.advice import COUNT_HINT, MEAN_HINT, advice
from cp_rewrite.passes.locality.claims.dims import Mixes, Size, T, has
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, UNKNOWN, Rows, TensorState
from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import OpOverload

from .node_facts import Events, NodeFacts


@dataclass
class Call:
    """One ATen op that was run, as one of its ways sees it: its arguments, its results `outs`, what is known of them.

    `claims`: of operands that are read as something else than they are, by `id`. `events`: what the way gave rise to.
    """

    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outs: Sequence[Tensor]
    facts: NodeFacts
    claims: Mapping[int, TensorState] = field(default_factory=dict[int, TensorState])
    events: Events = field(default_factory=Events)
    named: set[int] = field(default_factory=set[int])
    """By `id`: indices that only name the shard's rows, which its rule has taken so."""

    def reading(self, claims: Mapping[int, TensorState]) -> Call:
        """The same op, some of whose operands have other claims; nothing came of it yet."""
        return Call(self.func, self.args, self.kwargs, self.outs, self.facts, claims)

    @property
    def extents(self) -> Extents:
        return self.facts.extents

    @property
    def name(self) -> str:
        return op_name(self.func)

    @property
    def first(self) -> Tensor:
        """The first tensor among the arguments."""
        return self.tensors[0]

    @cached_property
    def bound(self) -> dict[str, Any]:
        """Argument name -> value, defaults included."""
        return bind_op(self.func, self.args, self.kwargs)

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the op writes into."""
        arguments = self.func._schema.arguments
        targets = [self.bound[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        return [target for target in targets if isinstance(target, Tensor)]

    def arg(self, *names: str) -> Any:
        """The argument of the first of these names that the op has; None without any."""
        return next((self.bound[name] for name in names if name in self.bound), None)

    def state(self, tensor: Tensor | None) -> TensorState:
        if tensor is None:
            return REPLICATED
        return self.claims[id(tensor)] if id(tensor) in self.claims else self.facts.state(tensor)

    def rows(self, tensor: Tensor | None) -> Rows | None:
        state = self.state(tensor)
        return state if isinstance(state, Rows) else None

    def sizes(self, tensor: Tensor) -> list[Size]:
        return [self.extents.size(size) for size in tensor.shape]

    def entries(self, tensor: Tensor) -> list[tuple[Any, Size]]:
        """(dim, size) of each dim of a tensor."""
        state, sizes = self.state(tensor), self.sizes(tensor)
        return list(zip(state.dims if isinstance(state, Rows) else [None] * len(sizes), sizes, strict=True))

    def use_positions(self, *tensors: Tensor | None) -> None:
        """These tensors' values matter: `arange` over tokens among them must count the global row."""
        for tensor in tensors:
            rows = self.rows(tensor)
            if rows and rows.shard_rows is not None:
                raise Mixes(f"{self.name} uses as values the places that rows have in a shard")
            if rows and rows.iota is not None:
                if rows.iota in self.facts.fixed_positions:
                    raise Mixes(self.facts.fixed_positions[rows.iota], Reason.POSITION_GENERATOR)
                self.events.used.append(rows.iota)

    def walked_by(self, rows: Rows | None) -> fx.Node | None:
        """The `arange` that names the shard's rows in turn, where `rows` is still one."""
        return None if rows is None or rows.iota in self.facts.shifted else rows.iota

    def refuse_axis(self, state: Rows, dim: int, verb: str) -> None:
        """Refuse an op that mixes the entries of a dim, where that holds tokens or rows of the batch.

        `verb` says what the op does to the dim.
        """
        axis = state.dims[dim]
        if axis is None:
            return
        if not has(axis, T):
            raise Mixes(f"{self.name} {verb} the batch dim while rows of the batch are cut in different orders")
        what = f"{self.name} {verb}"
        raise Mixes(f"{what} the token dim (dim {dim}){advice(self.facts.node, what, self.first)}")

    def check_numbers(self, *values: Any) -> None:
        """These numbers, or all of the arguments, may not be made from the token count."""
        for value in tree_leaves(values or (self.args, self.kwargs)):
            if self.extents.counts_tokens(value):
                hint = MEAN_HINT if self.name.startswith(("div", "true_divide", "mul")) else COUNT_HINT
                detail = f"{self.name} uses the number of tokens as a value, which is another one on a shard; {hint}"
                raise Mixes(detail, Reason.POSITION_GENERATOR)


def mixes_parts(call: Call) -> Mixes:
    """Of an op that does something else with a sum over tokens than to add it up."""
    return Mixes(f"{call.name} on a sum over the shard's tokens is not the same on the whole; {MEAN_HINT}")


def check_gradients(call: Call) -> None:
    """Raise where an operand that all ranks have in full would get a gradient from each, beside sums over all ranks."""
    if any(call.state(x) is REPLICATED and call.facts.has_gradient(x) for x in call.tensors):
        raise Mixes(f"{call.name} adds a term that every rank computes in full: its gradient would count once per rank")


def check_sizes(call: Call, tensor: Tensor, state: TensorState) -> None:
    """What every rule's result must keep: dims are as long as their axes, and no other dim has T in its size."""
    extents = call.extents
    dims = state.dims if isinstance(state, Rows) else [None] * tensor.ndim
    if state is UNKNOWN:
        return
    for dim, size in zip(dims, call.sizes(tensor), strict=True):
        if dim is not None:
            long: Any = 1
            for factor in dim:
                long = long * extents.of(factor)
            assert long == size or sympy.expand(long - size) == 0, f"{call.func}: {dim} of size {size}"
        elif isinstance(size, sympy.Expr) and extents.tokens in size.free_symbols:
            raise Mixes(
                f"{call.name} makes a dim of {size} entries, which is another number on a shard",
                Reason.POSITION_GENERATOR,
            )


@lru_cache(maxsize=4096)
def op_name(func: OpOverload) -> str:
    """`add` for aten::add.Tensor and aten::add_.Tensor; `ns::op` elsewhere."""
    space, name = func._schema.name.split("::")
    if func._schema.is_mutable and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if space == "aten" else f"{space}::{name}"


COPIES = frozenset({"clone", "view", "_unsafe_view"})
"""Ops that torch runs or leaves out as strides ask for: places of other ops are counted without them."""
METADATA = frozenset(
    {"prim::device", "prim::layout", "aten::is_contiguous", "aten::is_strides_like_format", "aten::sym_size"}
    | {"aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset", "aten::size", "aten::stride", "aten::dim"}
)
"""Ops that read no element: they only ask for sizes and the like."""
