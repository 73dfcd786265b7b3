"""Reductions, products, norms and windows: where they stay within a token, and where they add up tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import op_name
from cp_rewrite.passes.locality.advice import MEAN_HINT
from cp_rewrite.passes.locality.claims.dims import B, Dim, Mixes, T, broadcast, checked, fewer, has
from cp_rewrite.passes.locality.claims.tensor_state import (
    REPLICATED,
    AtMost,
    Deferred,
    Partial,
    Rows,
    TensorState,
    plain,
)
from cp_rewrite.passes.locality.node.call import Call, mixes_parts

from .rule import States, given_dims


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
        if call.name in ("all", "any") and _is_asserted(call.facts.node):
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


def _is_asserted(node: fx.Node | None) -> bool:
    """Whether nothing but assertions read `any` or `all` of a node: they need not hold for all ranks together.

    What stands inside of another op is taken for an assertion: one_hot has one.
    """
    if node is None or op_name(node) not in ("any", "all"):
        return True
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
