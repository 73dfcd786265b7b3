"""Reductions, products, norms, windows and losses: where they stay within a token, and where they add up tokens.

Losses (from `nll_loss` on) are one per token; summed over the shard's tokens; or means, and sums without the rows that
fill a rank up, over the tokens of all ranks:

    nll_loss    sum of parts of losses / sum of parts of weights
    mse_loss    sum of parts of losses / all tokens; a sum over tokens is a part
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.graph.nodes import op_name
from cp_rewrite.passes.locality.call import MEAN_HINT, Call, mixes_parts
from cp_rewrite.passes.locality.claims import (
    REPLICATED,
    WHOLE,
    AtMost,
    B,
    Deferred,
    Dim,
    Mixes,
    Partial,
    Rows,
    T,
    TensorState,
    broadcast,
    checked,
    fewer,
    has,
    merge,
    plain,
)
from cp_rewrite.passes.values.edits import Ranks, RunOverRanks
from cp_rewrite.refusal import Reason

from .elementwise import fill_of, pointwise
from .rule import States, can_spread, given_dims
from .wholes import Mean, OverTokens, wide


def reduce(call: Call) -> States:
    """Over features: per token. A plain sum over all tokens: a per-rank part. Anything else over tokens is refused.

    (B,) (T,) ·    -> amax(-1) ->    (B,) (T,)
    (B,) (T,)      -> sum() ->       Partial
    (B,) (T,)      -> mean() ->      refused
    """
    state, dims = call.state(call.first), given_dims(call)
    if isinstance(state, Partial):
        if call.name != "sum":
            raise mixes_parts(call)
        return state
    assert isinstance(state, Rows)
    if state.token_dim in dims:
        detail = f"{call.name} reduces over tokens; {MEAN_HINT}"
        if call.name in ("all", "any") and _is_asserted(call):
            return Deferred(detail)
        if call.name not in ("sum", "nansum", "count_nonzero"):
            raise Mixes(detail)
        return sum_over_tokens(call, state.fill == 0)
    keep = bool(call.arg("keepdim"))
    for dim in dims:
        call.refuse_axis(state, dim, "reduces over")
    rest = tuple(None if i in dims else dim for i, dim in enumerate(state.dims) if keep or i not in dims)
    unchanged = state.fill if call.name in ("amax", "amin", "max", "min", "mean", "any", "all") else None
    if call.name in ("any", "all"):
        unchanged = None if state.fill is None or isinstance(state.fill, AtMost) else bool(state.fill)
    fill = 0 if call.name == "sum" and state.fill == 0 else unchanged
    return Rows(checked(rest), fill=fill if len(call.outs) == 1 else None)


def _is_asserted(call: Call) -> bool:
    """True if nothing but assertions read `any` or `all`: they need not hold for all ranks together.

    One of all entries that stands inside of another op is taken for an assertion, as one_hot has; one over a dim, as
    quantile has, is a value.
    """
    node = call.facts.node
    if node is None or op_name(node) not in ("any", "all"):
        return call.arg("dim", "dims") is None
    pending, read = [*node.users], False
    while pending:
        user = pending.pop()
        name = op_name(user)
        if name in _ON_THE_WAY:
            pending += user.users
        read |= not (name in _ON_THE_WAY or "assert" in name)
    return not read


_ON_THE_WAY = frozenset(
    {"logical_not", "bitwise_not", "invert", "logical_and", "bitwise_and", "and_", "clone", "detach"}
)


def sum_over_tokens(call: Call, zero_fill: bool) -> TensorState:
    """A per-rank part of a sum; noted where fill may hold something else than 0."""
    if any(fewer(rows.dims) < 0 for rows in map(call.rows, call.tensors) if rows):
        raise Mixes(f"{call.name} adds up more tokens than the row has")
    call.events.sums_fill |= not zero_fill
    return Partial()


def triangle(call: Call, x: Rows) -> Rows:
    """tril, triu: of tensors whose last two dims hold no tokens."""
    if any(dim is not None for dim in x.dims[-2:]):
        raise Mixes(f"{call.name} compares positions in the token dim")
    return plain(x)


def product(call: Call) -> TensorState:
    """mm, bmm, mv, dot and their forms that add a bias: over features per token, over tokens a per-rank part.

    (T,) · @ · ·      ->  (T,) ·
    · (T,) @ (T,) ·   ->  Partial, as the gradient of a weight
    (T,) · @ · (T,)   ->  refused: pairs of tokens
    """
    *bias, a, b = call.tensors if not call.name.startswith(("add", "badd")) else call.tensors[:3]
    left, right = call.entries(a), call.entries(b)
    contracted = (left[-1][0], right[0 if len(right) == 1 else -2][0])
    if any(has(dim, T) for dim in contracted):
        return _product_over_tokens(call, a, b, contracted)
    if any(has(dim, B) for dim in contracted):
        raise Mixes(f"{call.name} sums over the batch dim while rows of the batch are cut in different orders")
    batch = broadcast([left[:-2], right[:-2]])
    outer = [left[-2]] if len(left) > 1 else []
    inner = [right[-1]] if len(right) > 1 else []
    entries = list(zip(batch, call.sizes(call.outs[0]), strict=False)) + outer + inner
    return Rows(checked(broadcast([entries, *(call.entries(x) for x in bias)])))


def _product_over_tokens(call: Call, a: Tensor, b: Tensor, contracted: tuple[Dim, Dim]) -> TensorState:
    """Both operands have the same tokens in the dims that are contracted, and in no other."""
    others = [dim for x in (a, b) for dim, _ in call.entries(x) if dim not in contracted]
    if contracted[0] != contracted[1] or any(has(dim, T) for dim in others) or len(call.tensors) > 2:
        raise Mixes(f"{call.name} sums over the token dim")
    if a.ndim == b.ndim == 2 and has(call.entries(a)[0][0], B) and has(call.entries(b)[1][0], B):
        raise Mixes("pairs rows of the batch with rows of the batch")
    fills = [rows.fill for rows in map(call.rows, (a, b)) if rows]
    return sum_over_tokens(call, 0 in fills)


def normalized_dims(call: Call) -> Iterable[tuple[int, str]]:
    """layer_norm, rms_norm: the last dims, as many as `normalized_shape` has."""
    ndim = call.first.ndim
    return [(dim, "normalises over") for dim in range(ndim - len(call.arg("normalized_shape")), ndim)]


def leading_norm(call: Call) -> States:
    """group_norm, instance_norm: over all dims but the first. Statistics have the first dim and one of groups."""
    state = call.rows(call.first)
    if state is None or state.token_dim != 0:
        raise Mixes(f"{call.name} normalises over tokens")
    return [plain(state), *[Rows((state.dims[0], None))] * (len(call.outs) - 1)]


def batch_norm(call: Call) -> States:
    """Per token with running statistics only; what else it returns is the same on all ranks."""
    state = call.rows(call.first)
    training = call.arg("training", "train")
    if state is None or training or ("no_training" not in call.name and call.arg("training") is None):
        raise Mixes(f"{call.name} takes statistics over tokens of the shard")
    call.refuse_axis(state, 1, "has channels in")
    return [plain(state), *[REPLICATED] * (len(call.outs) - 1)]


def convolution_dims(call: Call) -> Iterable[tuple[int, str]]:
    """Channels, which are summed over, and the dims that a kernel of more than one entry slides over."""
    weight, stride = call.tensors[1], call.arg("stride")
    yield 1, "sums over"
    for dim in range(2, call.first.ndim):
        alone = weight.shape[dim] == 1 and stride[(dim - 2) % len(stride)] == 1
        if not alone or any(call.arg("padding")) or call.arg("transposed"):
            yield dim, "slides over"


def pooled_dims(call: Call) -> Iterable[tuple[int, str]]:
    """The last dims: two of avg_pool2d."""
    count = next(int(c) for c in call.name if c.isdigit())
    return [(dim, "pools over") for dim in range(call.first.ndim - count, call.first.ndim)]


_NONE, _MEAN = 0, 1
"""ATen's numbers for reduction="none" and reduction="mean"."""
_ZERO_OF_EQUALS = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that are 0 where both operands are."""


def nll_loss(call: Call) -> list[TensorState]:
    """Scores (N, C, …), targets (N, …): one loss per target."""
    rows, zero = nll_rows(call)
    return [_reduced(call, rows, zero), Partial()]


def nll_rows(call: Call) -> tuple[Rows, bool]:
    """(the rows of the losses, whether rows without a token are ignored)."""
    scores, target = call.arg("self"), call.arg("target")
    rows = call.rows(scores)
    if rows is None or call.rows(target) is None or call.state(call.arg("weight")) is not REPLICATED:
        raise Mixes("pairs token scores with targets that are not cut like them", Reason.TOKEN_MIXING)
    if scores.ndim > 1:
        call.refuse_axis(rows, 1, "takes classes from")
    entries = call.entries(scores)
    dims = [merge(pair) for pair in zip([entries[0], *entries[2:]], call.entries(target), strict=True)]
    checked(dims)
    targets = call.rows(target)
    zero = targets is not None and targets.fill is not None and targets.fill == call.arg("ignore_index")
    return Rows(checked(dims), fill=0 if zero else None), zero


def elementwise_loss(call: Call) -> TensorState:
    """mse_loss, smooth_l1_loss, binary_cross_entropy and the like, by their `reduction`."""
    if any(not isinstance(call.state(x), Rows) and call.state(x) is not REPLICATED for x in call.tensors):
        return pointwise(call)
    dims = broadcast([call.entries(x) for x in call.tensors])
    zero = call.name in _ZERO_OF_EQUALS and all(fill_of(call, x) == 0 for x in call.tensors)
    return _reduced(call, Rows(checked(dims), fill=0 if zero else None), zero)


def _reduced(call: Call, rows: Rows, zero: bool) -> TensorState:
    """Losses per token, or their sum. `zero`: those of fill are 0."""
    reduction = call.arg("reduction")
    if reduction == _NONE:
        return rows
    if reduction == _MEAN:
        raise Mixes(
            f"{call.name} takes the mean over the shard's tokens, and a mean of means is not the mean: "
            f"use reduction='sum'; {MEAN_HINT}"
        )
    return sum_over_tokens(call, zero)


def token_mean(call: Call) -> list[TensorState]:
    """`cp.token_mean`: its value is global, its gradient this rank's part."""
    total, count = (call.state(call.arg(name)) for name in ("total", "count"))
    if total != Partial() or count != Partial():
        raise Mixes("cp.token_mean takes this rank's sum over tokens and this rank's number of tokens")
    return [WHOLE, REPLICATED]


def mean_loss(call: Call) -> tuple[States, RunOverRanks]:
    """mse_loss and the like with reduction="mean": a loss per token, and their mean."""
    if call.arg("reduction") != 1:
        raise Mixes("takes no mean")
    rows = Rows(checked(broadcast([call.entries(x) for x in call.tensors])))
    if not can_spread(rows):
        raise Mixes("loss of rows that are sorted")
    return WHOLE, MeanLoss(rows.dims)


def summed_loss(call: Call) -> tuple[States, RunOverRanks]:
    """mse_loss, binary_cross_entropy and the like with reduction="sum", where losses of fill are not 0."""
    rows = Rows(checked(broadcast([call.entries(x) for x in call.tensors])))
    if call.arg("reduction") != 2 or not can_spread(rows):
        raise Mixes("takes no sum, or one of rows that are sorted")
    return Partial(), SummedLoss(rows.dims)


def mean_nll(call: Call) -> tuple[States, RunOverRanks]:
    """cross_entropy with reduction="mean". Targets of rows without a token are ignored."""
    rows, _ = nll_rows(call)
    if call.arg("reduction") != 1 or not can_spread(rows):
        raise Mixes("takes no mean of losses, or one of rows that are sorted")
    return [WHOLE, WHOLE], MeanNLL(rows.dims)


@dataclass(frozen=True)
class MeanLoss(Mean):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        losses: Tensor = func(**{**args, "reduction": 0})
        return self.mean(ranks, wide(losses), list(range(losses.ndim)), False).to(losses.dtype)


@dataclass(frozen=True)
class SummedLoss(OverTokens):
    why: ClassVar[str] = "leaves out rows that fill a rank up"
    local: ClassVar[bool] = True

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        return self.keep(ranks, func(**{**args, "reduction": 0}), 0).sum()


@dataclass(frozen=True)
class MeanNLL(OverTokens):
    """The sum of losses over the sum of the targets' weights."""

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
        target = self.keep(ranks, args["target"], args["ignore_index"])
        losses, weights = func(**{**args, "target": target, "reduction": 2})
        total, count = ranks.sum(torch.stack([losses, weights.to(losses.dtype)])).unbind()
        return total / count, count.detach()
