"""What an attention op says to compilers, and what it keeps for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (R, Hq, V) in q's dtype and lse (Hq, R) in fp32 (fp64 for fp64), of q (R, Hq, D) and v (R, Hkv, V)."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class Saved:
    """Args: q, k, v, out, lse. tables: the four of `Schedule.attention`. route: of the exchange. kv: expanded rows, if
    they are kept. sinks: if there are any."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    tables: Sequence[Tensor]
    route: Sequence[Tensor]
    kv: Tensor | None
    sinks: Tensor | None

    def keep(self, ctx: Any) -> None:
        """Save it in an autograd context."""
        kept = [x for x in (self.kv, self.sinks) if x is not None]
        ctx.save_for_backward(self.q, self.k, self.v, self.out, self.lse, *self.tables, *self.route, *kept)
        ctx.routes, ctx.has_kv, ctx.has_sinks = len(self.route), self.kv is not None, self.sinks is not None
        # An eager graph passes fx's own kind of list, and autograd wants gradients in the same kind.
        ctx.route_type = type(self.route)

    @classmethod
    def of(cls, ctx: Any) -> Saved:
        """What was kept there."""
        q, k, v, out, lse, *rest = ctx.saved_tensors
        tables, route, kept = rest[:4], rest[4 : 4 + ctx.routes], rest[4 + ctx.routes :]
        kv, sinks = kept[0] if ctx.has_kv else None, kept[-1] if ctx.has_sinks else None
        return cls(q, k, v, out, lse, tables, route, kv, sinks)


def no_gradients(ctx: Any) -> Any:
    """The gradients of a route's tensors: none."""
    return ctx.route_type([None] * ctx.routes)
