"""One ATen op as locality rules see it: its arguments by name, and what is known of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch.fx as fx
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from cp_rewrite.refusal import Reason

from .state import MEAN_HINT, REPLICATED, UNKNOWN, Extents, Mixes, Rows, Size, TensorState

if TYPE_CHECKING:
    from .trace import Trace

Rule = Callable[["Call"], "TensorState | Sequence[TensorState]"]


class FoundRule(NamedTuple):
    """A rule, and what it takes.

    Args:
        rule: None: the op has none.
        from_sizes: it also runs on uncut inputs, as the op may make token rows from sizes.
        sums: it knows what to do with per-rank parts of sums; no other rule gets one.
        sizes: numbers among the op's arguments are sizes, or the rule looks at them; else none may count tokens.
        positions: it sees to positions that it takes in; else those that its result no longer holds count as used.
    """

    rule: Rule | None
    from_sizes: bool = False
    sums: bool = False
    sizes: bool = False
    positions: bool = False


DYNAMIC_HINT = (
    "the graph was captured for one fixed number of tokens, so this may be the token count of the shard: "
    "mark the token dim dynamic (torch._dynamo.mark_dynamic) to tell them apart"
)
GROUPED_PRODUCTS = ("_grouped_mm", "transformers::grouped_mm_fallback")


@dataclass
class Call:
    """One ATen op with its arguments by name, its results, and what is known of its tensors."""

    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outs: Sequence[Tensor]
    trace: Trace

    @property
    def extents(self) -> Extents:
        return self.trace.extents

    @property
    def name(self) -> str:
        return op_name(self.func)

    @cached_property
    def bound(self) -> dict[str, Any]:
        """Argument name -> value, defaults included."""
        values: dict[str, Any] = {}
        for i, argument in enumerate(self.func._schema.arguments):
            given = self.args[i] if i < len(self.args) else self.kwargs.get(argument.name, _default(argument))
            values[argument.name] = given
        return values

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def arg(self, *names: str) -> Any:
        """The argument of the first of these names that the op has; None without any."""
        return next((self.bound[name] for name in names if name in self.bound), None)

    def state(self, tensor: Tensor | None) -> TensorState:
        return REPLICATED if tensor is None else self.trace.state(tensor)

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
            if rows and rows.places is not None:
                raise Mixes(f"{self.name} uses as values the places that rows have in a shard")
            if rows and rows.iota is not None:
                if rows.iota in self.trace.fixed_positions:
                    raise Mixes(self.trace.fixed_positions[rows.iota], Reason.POSITION_GENERATOR)
                self.trace.events.used.append(rows.iota)

    def walked_by(self, rows: Rows | None) -> fx.Node | None:
        """The `arange` that names the shard's rows in turn, where `rows` is still one."""
        return None if rows is None or rows.iota in self.trace.shifted else rows.iota

    def check_numbers(self, *values: Any) -> None:
        """Numbers among the arguments may not be made from the token count."""
        for value in tree_leaves(values or (self.args, self.kwargs)):
            if self.extents.counts_tokens(value):
                raise Mixes(
                    f"{self.name} uses the number of tokens as a value, which is another one on a shard; {MEAN_HINT}",
                    Reason.POSITION_GENERATOR,
                )

    def check_literals(self, *values: Any) -> None:
        """In a graph of fixed shapes, numbers that look like the token count are refused: they may be it."""
        for value in tree_leaves(values) if self.extents.static else ():
            if isinstance(value, int | float) and not isinstance(value, bool) and _made_from(value, self.extents):
                raise Mixes(f"{self.name} uses the number {value}; {DYNAMIC_HINT}", Reason.POSITION_GENERATOR)


def check_sizes(call: Call, tensor: Tensor, state: TensorState) -> None:
    """What every rule must keep: token and batch dims are as long as their axes, and no other dim has T in its size."""
    extents = call.extents
    dims = state.dims if isinstance(state, Rows) else [None] * tensor.ndim
    if not isinstance(state, Rows) and (extents.static or state is UNKNOWN):
        return
    for dim, size in zip(dims, call.sizes(tensor), strict=True):
        if dim is not None:
            long: Any = 1
            for factor in dim:
                long = long * extents.of(factor)
            assert long == size, f"{call.func}: {dim} of size {size}"
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


def vouched_name(func: OpOverload) -> str:
    """The name a user vouches for an op by: `ns::op`."""
    return func._schema.name


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


def vouched_state(call: Call, out: Tensor) -> TensorState:
    """Token dim of the result of a vouched op: that of an input of as many dims, or the one dim of the same size."""
    sizes = call.sizes(out)
    inputs = [rows for tensor in call.tensors if (rows := call.rows(tensor)) is not None]
    for tensor in call.tensors:
        rows = call.rows(tensor)
        if rows and all(
            dim is None or (i < len(sizes) and sizes[i] == size) for i, (dim, size) in enumerate(call.entries(tensor))
        ):
            return Rows((*rows.dims[: len(sizes)], *[None] * (len(sizes) - len(rows.dims))))
    if inputs and (dims := call.extents.label(sizes)) is not None:
        return Rows(dims)
    raise Mixes(f"{vouched_name(call.func)} is vouched for, but its result of shape {tuple(sizes)} has no token dim")


def _made_from(value: float, extents: Extents) -> bool:
    counts = {int(extents.tokens)}
    if isinstance(extents.batch, int):
        counts.add(int(extents.tokens) * extents.batch)
    for n in counts:
        made = (n, n - 1, 1 / n, n**0.5, n**-0.5, math.log(n), math.log2(n), math.log10(n))
        if n > 2 and any(math.isclose(abs(value), number, rel_tol=1e-12) for number in made):
            return True
    return False
