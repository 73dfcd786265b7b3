"""Running sums over tokens: a rank runs over its own tokens, and adds what other ranks have before each.

    op              other ranks' values are joined by     gradient
    cumsum          adding                                that of cumsum and of adding: a running sum from behind
    cumprod         multiplying                           torch's own of cumprod (right at zeros) and of multiplying
    logcumsumexp    logaddexp                             torch's own of both
    cummax, cummin  taking the larger; of equal ones      to the entry that was taken
                    the later, as torch does

Other ranks' values are those that they reached at the ends of their pieces (`planning/reads.py`): one row for each
piece travels, and one row of gradients back. Tokens are run over in the order of the row, whatever order they have on
the ranks, over the ends of documents as on one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import B, Dims, Mixes, Rows, T
from cp_rewrite.passes.values.edits import Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import TOKEN_INDEX, PlanInput, Scan

from .rule import States, rows_along

_ops: Any = torch.ops.cp_rewrite


def scanned(call: Call) -> tuple[States, RunOverRanks]:
    """cumsum and the like, over tokens."""
    rows, dim = rows_along(call, call.arg("dim"))
    joined = rows.dims[dim] == (B, T)
    if not joined and (B,) not in rows.dims and call.extents.batch != 1:
        raise Mixes(f"{call.name} of what all rows of the batch share")
    return Rows(rows.dims), _RUNS[call.name](rows.dims, dim, Scan(joined, rows.attended))


@dataclass(frozen=True)
class _Running:
    """Args: dims: of the tensor. dim: of its tokens. scan: the plan's tables.

    Shapes: R = B T_l local rows, L lines of W local rows, M = N L ends of pieces, P ranks, C columns.
    """

    dims: Dims
    dim: int
    scan: Scan
    why: ClassVar[str] = "over the row: ranks run over their tokens, and exchange what they reached at ends of pieces"

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return PlanInput.of_scan(self.scan)

    @property
    def front(self) -> list[int]:
        """The dims that make rows: that of the batch, where there is one, and that of the tokens."""
        return [self.dims.index((B,)), self.dim] if (B,) in self.dims else [self.dim]

    def tables(self, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(order, place, piece), each (R,), ends (M,), before (M, P)."""
        order, place, piece, ends, before = (ranks.plan[key] for key in PlanInput.of_scan(self.scan))
        return order.flatten(), place.flatten(), piece.flatten(), ends, before

    def rows(self, x: Tensor) -> Tensor:
        """(R, C) of `x`. Undone by `like`."""
        x = x.movedim(self.front, list(range(len(self.front))))
        x = x.flatten(0, len(self.front) - 1)
        return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)

    def like(self, rows: Tensor, x: Tensor) -> Tensor:
        """`rows` (R, C) in the shape of `x`."""
        first = list(range(len(self.front)))
        return rows.reshape(x.movedim(self.front, first).shape).movedim(first, self.front)

    def lines(self, ranks: Ranks, rows: Tensor) -> Tensor:
        """(L, W, C) the rows in the order of the row's tokens."""
        batch, size = ranks.has_token.shape
        shape = (1, batch * size) if self.scan.joined else (batch, size)
        return rows.index_select(0, self.tables(ranks)[0]).view(*shape, rows.shape[1])

    def of_others(self, ranks: Ranks, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Results of each rank before each of this rank's pieces: (M, P, C), and whether there are any, (M, P, 1).

        Args:
            ends: (M, C) what this rank reached at the ends of its pieces.
        """
        before = self.tables(ranks)[4]
        found = ranks.rows_of_ranks(ends).index_select(0, before.clamp(min=0).flatten())
        return found.unflatten(0, before.shape), (before >= 0).unsqueeze(2)


class _Folded(_Running):
    """An operation whose operands may be joined in any order. `identity`: an operand that changes nothing."""

    identity: ClassVar[float]

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x: Tensor = args["self"]
        dtype = args.get("dtype") or (x.dtype if x.is_floating_point() or not self.widens else torch.int64)
        rows = self.rows(x.to(dtype))
        # Sums of 16-bit floats run in fp32, as torch's own do inside.
        rows = rows.to(torch.float32) if dtype in (torch.float16, torch.bfloat16) else rows
        _, place, piece, ends, _ = self.tables(ranks)
        own = self.run(self.lines(ranks, rows)).flatten(0, 1)
        others, there = self.of_others(ranks, own.index_select(0, ends))
        kept = torch.where(there, others, torch.full((), self.identity, dtype=own.dtype, device=own.device))
        whole = self.join(own.index_select(0, place), self.fold(kept).index_select(0, piece))
        return self.like(whole.to(dtype), x)

    widens: ClassVar[bool] = True
    """Whole numbers give int64, as torch has it."""

    def run(self, lines: Tensor) -> Tensor:
        """The running operation over dim 1."""
        raise NotImplementedError

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def fold(self, x: Tensor) -> Tensor:
        """The operation over all of dim 1."""
        raise NotImplementedError


class Sum(_Folded):
    identity = 0

    def run(self, lines: Tensor) -> Tensor:
        return lines.cumsum(1)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def fold(self, x: Tensor) -> Tensor:
        return x.sum(1)


class Product(_Folded):
    identity = 1

    def run(self, lines: Tensor) -> Tensor:
        return _ops.running_product.default(lines)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def fold(self, x: Tensor) -> Tensor:
        product, *others = x.unbind(1)
        for other in others:  # not by prod, whose gradient divides
            product = product * other
        return product


class LogSumExp(_Folded):
    identity = -torch.inf

    def run(self, lines: Tensor) -> Tensor:
        return lines.logcumsumexp(1)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        none = b == -torch.inf  # of these logaddexp has no gradient
        return torch.where(none, a, torch.logaddexp(a, torch.where(none, 0, b)))

    def fold(self, x: Tensor) -> Tensor:
        none = (x == -torch.inf).all(1)
        total = torch.where(none.unsqueeze(1), 0, x).logsumexp(1)
        return torch.where(none, -torch.inf, total)


class Largest(_Running):
    """cummax and cummin: (values, places in the row). NaN is the largest and the least."""

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return (*PlanInput.of_scan(self.scan), TOKEN_INDEX)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x: Tensor = args["self"]
        rows = self.rows(x.to(torch.uint8) if x.dtype is torch.bool else x)
        least = "cummin" in func._schema.name
        lines = self.lines(ranks, rows)
        own, at = lines.cummin(1) if least else lines.cummax(1)
        own, at = own.flatten(0, 1), self.tokens(ranks, at)
        _, place, piece, ends, _ = self.tables(ranks)
        others, there = self.of_others(ranks, own.index_select(0, ends))
        tokens, _ = self.of_others(ranks, at.index_select(0, ends))
        other, token = _best(others, torch.where(there, tokens, -1), least)
        own, at, other, token = (
            *(t.index_select(0, place) for t in (own, at)),
            *(t.index_select(0, piece) for t in (other, token)),
        )
        taken = (token >= 0) & (_beats(other, own, least) | (_equal(other, own) & (token > at)))
        values = torch.where(taken, other, own)
        return self.like(values.to(x.dtype), x), self.like(torch.where(taken, token, at), x)

    def tokens(self, ranks: Ranks, at: Tensor) -> Tensor:
        """(R, C) the token of the line of places (L, W, C) among this rank's own."""
        index = ranks.joined_index if self.scan.joined else ranks.token_index
        token = index.flatten().index_select(0, self.tables(ranks)[0])  # of each place of the lines
        first = torch.arange(at.shape[0], device=at.device).view(-1, 1, 1) * at.shape[1]
        return token.index_select(0, (at + first).flatten()).view(-1, at.shape[2])


def _best(x: Tensor, tokens: Tensor, least: bool) -> tuple[Tensor, Tensor]:
    """The largest entry along dim 1, of equal ones that of the latest token, and its token, -1: there is none."""
    there, known = tokens >= 0, x.detach()
    bounds = (-torch.inf, torch.inf) if x.is_floating_point() else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    none = bounds[least]
    known = torch.where(there, known, torch.full((), none, dtype=x.dtype, device=x.device))
    best = known.amin(1, keepdim=True) if least else known.amax(1, keepdim=True)
    chosen = torch.where(_equal(known, best) & there, tokens, -1)
    place = chosen.argmax(1, keepdim=True)
    return x.gather(1, place).squeeze(1), chosen.amax(1)


def _beats(a: Tensor, b: Tensor, least: bool) -> Tensor:
    return (a < b if least else a > b) | (a.isnan() & ~b.isnan())


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


_RUNS: dict[str, Any] = {
    "cumsum": Sum,
    "cumprod": Product,
    "logcumsumexp": LogSumExp,
    "cummax": Largest,
    "cummin": Largest,
}
