"""Attention that is written out and differs from what is read: it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite import Reason
from tests.helpers.matching import heads, match_each, meaning, reasons
from tests.passes.written_spellings import Written

pytestmark = pytest.mark.long


def mask_of_logits(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores.masked_fill(~keep, -math.inf) + scores).softmax(-1) @ v


def weights_changed(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    weights = (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1)
    weights[..., 0] = 0.0
    return weights @ v


def queries_changed(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    q = q * 1.0
    scores = (q @ k.mT).masked_fill(~keep, -math.inf)
    q.mul_(2.0)
    return scores.softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-2) @ v


def capped_after_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (torch.tanh((q @ k.mT).masked_fill(~keep, -math.inf)) * 5).softmax(-1) @ v


def masked_after_softmax(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) * keep) @ v


def less_the_mean(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores - scores.amax(-2, keepdim=True)).masked_fill(~keep, -math.inf).softmax(-1) @ v


def taken_off_the_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return ((1 - keep.to(q.dtype)) * -1e10 - q @ k.mT).softmax(-1) @ v


def less_itself(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores - scores * (1 - keep.to(q.dtype))).softmax(-1) @ v


def taken_off_twice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.sub(q @ k.mT, 1 - keep.to(q.dtype), alpha=1e10).softmax(-1) @ v


def over_a_tensor_of_two(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT / torch.tensor([1.0, 2.0, 1.0, 2.0])[:, None, None]).masked_fill(~keep, -math.inf).softmax(-1) @ v


def added_twice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.add(q @ k.mT, torch.where(keep, 0.0, -1.0), alpha=-math.inf).softmax(-1) @ v


def weights_returned(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Any:
    weights = (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1)
    return weights @ v, weights


def mixed_dtypes(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q.double() @ k.double().mT).masked_fill(~keep, -math.inf).softmax(-1).float() @ v


def negative_scale(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * -0.5).masked_fill(~keep, -math.inf).softmax(-1) @ v


def parted_otherwise(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))
    weights = (q @ k.mT).view(b, h, t, t).masked_fill(~keep, -math.inf).view(b * h, t, t).softmax(-1)
    return (weights @ v).view(h, b, t, d)


def onto_a_bias(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As BLOOM adds ALiBi."""
    b, h, t, d = q.shape
    bias = torch.arange(t, dtype=q.dtype).expand(b * h, 1, t)
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))
    scores = bias.baddbmm(q, k.mT, beta=1.0, alpha=0.5).view(b, h, t, t)
    return (scores.masked_fill(~keep, -math.inf).softmax(-1).view(b * h, t, t) @ v).view(b, h, t, d)


def bounded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.max(q @ k.mT, torch.full((), -5.0))
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ v


def filled_too_late(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.mT
    doubled = scores * 2
    scores.masked_fill_(~keep, -math.inf)
    return doubled.softmax(-1) @ v


def share_of(logits: Tensor, sinks: Tensor, of: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
    return of(torch.logsumexp(logits, -1) - sinks.view(1, -1, 1)).unsqueeze(-1)


def other_logits_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ v * share_of(scores, sinks)


def exponential_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    logits = (q @ k.mT).masked_fill(~keep, -math.inf)
    return logits.softmax(-1) @ v * share_of(logits, sinks, torch.tanh)


def shared_twice_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    logits = (q @ k.mT).masked_fill(~keep, -math.inf)
    share = share_of(logits, sinks)
    return logits.softmax(-1) @ v * share + share


def detached_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    logits = (q @ k.mT).masked_fill(~keep, -math.inf)
    return logits.softmax(-1) @ v * share_of(logits.detach(), sinks)


def heads_mixed(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(~keep, -math.inf)
    return torch.einsum("bhqk,bgkd->bhqd", scores.softmax(-1), v)


def mixed_forms(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2))
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(~keep, -math.inf).softmax(-1), v)


def keys_as_queries(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhkq", q, k).masked_fill(~keep, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def column_per_token(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~keep, -math.inf)
    return torch.cat([scores, q[..., :1]], -1).softmax(-1)[..., :-1] @ v


def first_column_dropped_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~keep, -math.inf)
    column = sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    return torch.cat([scores, column], -1).softmax(-1)[..., 1:] @ v


def scores_without_gradient(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    with torch.no_grad():
        scores = (q @ k.mT).masked_fill(~keep, -math.inf)
    return scores.softmax(-1) @ v


OTHERS = (
    scores_without_gradient, mask_of_logits, weights_changed, queries_changed, over_queries,
    capped_after_mask, masked_after_softmax, less_the_mean, added_twice, weights_returned,
    taken_off_the_mask, less_itself, taken_off_twice, over_a_tensor_of_two, mixed_dtypes, negative_scale,
    parted_otherwise, onto_a_bias, bounded, filled_too_late, other_logits_sinks, exponential_sinks,
    shared_twice_sinks, detached_sinks, heads_mixed, mixed_forms, keys_as_queries, column_per_token,
    first_column_dropped_sinks,
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """By name: all of them in one graph."""
    each = match_each(Written(*OTHERS))
    return dict(zip((attend.__name__ for attend in OTHERS), map(meaning, each), strict=True))


@pytest.mark.parametrize("attend", OTHERS)
def test_anything_else_is_refused(found: dict[str, Any], attend: Any) -> None:
    assert found[attend.__name__] == {Reason.KERNEL}


@pytest.mark.slow
@pytest.mark.parametrize("attend", OTHERS)
def test_each_alone_is_refused(attend: Any) -> None:
    assert reasons(Written(attend)) == {Reason.KERNEL}


def test_what_is_taken_off_or_scaled_must_drop_keys() -> None:
    def weakly(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT - (1 - keep.to(q.dtype)) * 100.0).softmax(-1) @ v

    def upwards(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT - (1 - keep.to(q.dtype)) * -1e10).softmax(-1) @ v

    def weakened(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return ((q @ k.mT + torch.where(keep, 0.0, -1e5)) * 0.01).softmax(-1) @ v

    def bias(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        return (q @ k.mT + (i[None] - i[:, None])).masked_fill(~keep, -math.inf).softmax(-1) @ v

    each = [meaning(found) for found in match_each(Written(weakly, upwards, weakened, bias))]
    assert each == [{Reason.MASK_NOT_PACKED}] * 4


def test_dropout_is_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return F.dropout((q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1), 0.1) @ v

    assert reasons(Written(attend)) == {Reason.DROPOUT}


def test_masks_of_other_tensors_are_refused() -> None:
    def other_tokens(**b: Tensor) -> Tensor:
        x, ids = heads(b), b["input_ids"]
        return (x @ x.mT).masked_fill(ids[:, None, :, None] != ids[:, None, None, :], -math.inf).softmax(-1) @ x

    assert reasons(other_tokens) == {Reason.MASK_WRONG_SOURCE}
