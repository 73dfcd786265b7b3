"""Numbers that a graph makes from its token count, T - 1, T // 2, 1 / T, max(T, 8), as values: those of the whole row
in their place.

x.sum() / x.shape[1]      index == x.shape[1] - 1      x.shape[1] - index      index.clamp(max=x.shape[1] - 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.extents import of_row
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.elementwise import pointwise
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.values.resolution import Ranks, RunOverRanks


def counted(call: Call) -> tuple[States, RunOverRanks]:
    """Pointwise ops of a tensor and such a number; of `clamp` both bounds may be such."""
    found = {name: value for name, value in call.bound.items() if call.extents.counts_tokens(value)}
    if not found or call.written or not found.keys() <= {"other", "min", "max"}:
        raise Mixes(f"{call.name} takes a number made from the token count")
    found = {name: call.extents.counted(value) for name, value in found.items()}
    return pointwise(call), Counted(call.extents.tokens, tuple(found.items()), call.outs[0].dtype)


@dataclass(frozen=True)
class Counted:
    """tokens: the symbol that numbers, by argument, are expressions in. dtype: of the result."""

    tokens: Any
    numbers: tuple[tuple[str, Any], ...]
    dtype: torch.dtype

    def __call__(self, ranks: Ranks, func: Any, args: Mapping[str, Any]) -> Tensor:
        x: Tensor = args["self"]
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # these hold few numbers of tokens
        given = {name: value for name, value in args.items() if name != "self"}
        for name, expr in self.numbers:
            number: Tensor = of_row(expr, self.tokens, ranks.row_tokens)
            kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
            given[name] = number.to(kind) if number.is_floating_point() else number
        if "clamp" in func._schema.name:  # which takes two tensors, or two numbers
            numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
            given |= {name: torch.full((), value, device=x.device) for name, value in numbers.items()}
        found: Tensor = getattr(torch, func._schema.name[6:])(x, **given)
        return found.to(self.dtype)
