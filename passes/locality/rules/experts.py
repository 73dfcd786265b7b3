"""Experts of a mixture as one op, `cp_rewrite::experts`: each token by itself, on whatever rank its experts are.

    x (T,) ·    chosen (T,) ·    weight (T,) ·    up, down · · ·    ->    (T,) ·

Weights that ranks share are `Owned`: a rank has its own part, whose gradient is the sum over all ranks' tokens. So
nothing but this op may read them, and it reads no others where it names a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import REPLICATED, Deferred, Dims, Mixes, Owned, Rows, TensorState
from cp_rewrite.passes.values.edits import Ranks
from cp_rewrite.planning.plan_input import PlanInput

from .rule import can_spread, has_row, reads_of

OP = "cp_rewrite::experts"
_KEPT = Deferred("what experts keep for their backward is read, which is a rank's own")
_ROWS, _WEIGHTS = ("x", "chosen", "weight"), ("up", "down", "up_bias", "down_bias")


def owned_elsewhere(call: Call) -> Mixes | None:
    """Why an op may not go at all: it reads weights that ranks share, and is another one."""
    if call.name == OP or not any(isinstance(call.state(x), Owned) for x in call.tensors):
        return None
    return Mixes(
        f"{call.name} reads weights of experts that ranks share, of which each rank has a part: only the layer itself "
        "may read them. Leave it out, or leave out experts=, so that all ranks have them"
    )


def experts(call: Call) -> list[TensorState]:
    """Rows in, rows out; and what the backward reads, of this rank."""
    states = [call.rows(call.arg(name)) for name in _ROWS]
    dims = states[0].dims[:1] if states[0] is not None else ()
    if any(state is None or state.dims != (*dims, None) for state in states):
        raise Mixes("experts of rows, choices and weights that are not of the same tokens, (N, C), (N, k) and (N, k)")
    group = call.arg("group")
    for name in _WEIGHTS:
        given = call.arg(name)
        if given is not None and call.state(given) != (Owned(group) if group else REPLICATED):
            why = "is no weight that the ranks of its group share: cp.parallelize(…, experts=n) shares them"
            raise Mixes(f"experts of which {name} {why if group else 'is made from tokens, or shared by ranks'}")
    if group and call.facts.in_function:
        raise Mixes("experts that ranks share in a torch.autograd.Function: call the layer outside of it")
    call.use_positions(*map(call.arg, _ROWS))
    return [Rows((*dims, None)), *[_KEPT] * (len(call.outs) - 1)]


def without_fill(call: Call) -> tuple[list[TensorState], WithoutFill]:
    """The same, where ranks share experts; rows without a token choose none, and travel nowhere."""
    given, chosen = experts(call), call.rows(call.arg("chosen"))
    if not call.arg("group") or chosen is None or not can_spread(chosen):
        raise Mixes("experts of a rank's own")
    return given, WithoutFill(chosen.dims)


@dataclass(frozen=True)
class WithoutFill:
    """Runs the op with -1 for the choices of rows without a token. dims: of the choices."""

    dims: Dims
    why: ClassVar[str] = "rows that fill a rank up choose no expert"

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return reads_of(self.dims)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, ...]:
        return func(**{**args, "chosen": torch.where(has_row(ranks, self.dims), args["chosen"], -1)})
