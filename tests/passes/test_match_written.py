"""Attention that is written out as products and a softmax: its spellings, and everything that differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason
from tests.helpers.matching import BATCH, PACKED, heads, reasons, the_site
from tests.helpers.pool import Pool
from tests.passes.mask_spellings import DOCUMENTS, annotate, make_batch

pytestmark = pytest.mark.long

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Written(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """`attend(q, k, v, keep)`, with sinks where its name ends so. 4 query heads, `kv_heads` repeated key heads."""

    def __init__(self, attend: Any, kv_heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sinks = nn.Parameter(torch.randn(4))
        self.table = nn.Embedding(64, 4 * 4)
        self.attend, self.kv_heads = attend, kv_heads

    def forward(self, **b: Tensor) -> Tensor:
        x = self.table(b["input_ids"]).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (x[:, : self.kv_heads] * c for c in (1.5, -2.0))
        k, v = (y[:, :, None].expand(-1, -1, 4 // self.kv_heads, -1, -1).flatten(1, 2) for y in (k, v))
        more = (self.sinks,) if self.attend.__name__.endswith("sinks") else ()
        return self.attend(x, k, v, PACKED(**b), *more)


def added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    mask = torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.0, training=True), v)


def filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(keep == 0, float("-inf"))
    return torch.softmax(scores, -1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.einsum("bhqd, bhkd -> bhqk", q, k) / 2
    weights = torch.where(keep, scores, float("-inf")).softmax(dim=3)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def scaled_queries(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q * 0.5 @ k.mT).masked_fill(~keep, -1e9).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.permute(0, 1, 3, 2)
    scores *= 0.5
    scores += torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, float("-inf"))
    return F.dropout(scores.softmax(-1), 0.3, training=False) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.5 / 3.0) * 3.0
    return F.softmax(scores + torch.where(keep, 0.0, -math.inf), dim=-1) @ v


def two_masks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    scores = (q @ k.transpose(-1, -2)).float() * 0.5
    scores = scores.masked_fill(~keep, -math.inf) + torch.where(i[:, None] - i < 3, 0.0, -math.inf)
    return torch.softmax(scores, dim=-1).type_as(v) @ v


def taken_off(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.5 - (1 - keep.to(q.dtype)) * 1e10).softmax(-1) @ v


def over_a_tensor(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As GPT-2 scales, and masks."""
    scores = q @ k.mT
    scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
    return torch.where(keep, scores, least).softmax(-1).type(v.dtype) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    logits = torch.cat([scores, column], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1] @ v


def checkpointed_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    return checkpoint(with_sinks, q, k, v, keep, sinks, use_reentrant=False)  # type: ignore[return-value]


def tokens_first(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Of (B, T, H, D)."""
    q, k, v = q.transpose(1, 2), *(x[:, ::2].transpose(1, 2).repeat_interleave(2, 2) for x in (k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5).masked_fill(~keep, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def merged(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Heads and rows as one dim, as in OPT and XGLM."""
    b, h, t, d = q.shape
    q, k, v = q.reshape(b * h, t, d), k.reshape(b * h, -1, d), v.reshape(b * h, -1, d)
    scores = torch.bmm(q, k.transpose(1, 2)) * 0.5
    assert scores.size() == (b * h, t, t)
    scores = scores.view(b, h, t, t) + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    least = torch.full((), torch.finfo(scores.dtype).min, device=scores.device)
    weights = torch.max(scores, least).view(b * h, t, t).softmax(-1)
    weights = F.dropout(weights.view(b, h, t, t).view(b * h, t, t), 0.0)
    return torch.bmm(weights, v).view(b, h, t, d)


def merged_masks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The mask is repeated for each head; logits and weights stay of three dims."""
    b, h, t, d = q.shape
    q, k, v = (x.contiguous().view(b * h, t, d) for x in (q, k, v))
    bias = torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, -math.inf).expand(b, h, t, t).reshape(b * h, t, t)
    weights = F.softmax(torch.einsum("nqd,nkd->nqk", q, k) * 0.5 + bias, 2)
    return torch.einsum("nqk,nkd->nqd", weights, v).unflatten(0, (b, h))


def onto_zeros(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As GPT-NeoX-Japanese."""
    b, h, t, d = q.shape
    zeros = torch.zeros(b * h, t, t, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(zeros, q.reshape(b * h, t, d), k.reshape(b * h, t, d).transpose(1, 2), beta=1.0, alpha=1 / 2)
    return (scores.view(b, h, t, -1) + torch.where(keep, 0.0, -math.inf)).softmax(-1) @ v


def filled_behind_its_back(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As XLM."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.mT
    scores.masked_fill_((~keep).expand_as(scores), torch.finfo(scores.dtype).min)
    return F.softmax(scores.float(), -1).type_as(scores) @ v


def filled_twice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    scores = q @ k.mT * 0.5
    scores.masked_fill_(~keep, -math.inf)
    scores.add_(torch.where(i[:, None] - i < 3, 0.0, -math.inf))
    return scores.softmax(-1) @ v


def scaled_after_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As CodeGen."""
    return ((q @ k.mT + torch.where(keep, 0.0, -1e9)) / (8 / 3) * (4 / 3)).softmax(-1) @ v


def by_factor_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    """As Granite with sliding windows."""
    logits = q @ k.mT * 0.5 + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    share = (torch.logsumexp(logits, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    out = F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    return out * share.unsqueeze(-1).to(out.dtype)


SPELLINGS = (
    added, filled, chosen, scaled_queries, in_place, capped, two_masks, taken_off, over_a_tensor, with_sinks,
    tokens_first, merged, merged_masks, onto_zeros, filled_behind_its_back, filled_twice, scaled_after_mask,
    by_factor_sinks,
)  # fmt: skip


@pytest.mark.parametrize("attend", SPELLINGS)
def test_spellings_are_read(attend: Attention) -> None:
    site = the_site(Written(attend))
    assert site.mask == (PackedMask(window=(2, 0)) if attend in (two_masks, filled_twice) else PackedMask())
    assert site.scale == (1.0 if attend in (scaled_queries, filled_behind_its_back) else pytest.approx(0.5))
    assert site.softcap == pytest.approx(3.0 if attend is capped else 0.0)
    assert site.heads_of(site.key) == 2
    assert site.form == ("BTHD" if attend is tokens_first else "BHTD")
    assert (site.sinks is not None) == (attend in (with_sinks, by_factor_sinks))


def test_a_rank_may_have_as_many_tokens_as_a_head_has_dims() -> None:
    """Sizes that happen to be equal stay apart."""
    batch = make_batch([[1, 3], [2, 2]])
    for attend in (in_place, by_factor_sinks):
        assert the_site(Written(attend), batch=batch).mask.packed


@pytest.mark.parametrize("attend", [*SPELLINGS, checkpointed_sinks])
def test_spellings_give_what_they_gave(attend: Attention) -> None:
    model = Written(attend, kv_heads=1 if attend is chosen else 2)
    inner = "aot_eager" if attend is checkpointed_sinks else "eager"
    sharding = cp.Sharding(1, {"input_ids": 1, "doc_ids": 1}, DOCUMENTS, inner=inner, verify="first_step")
    batch = {name: BATCH[name] for name in sharding.tokens}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(batch) as local:
        out = compiled(**local).transpose(1, 2)
    expected = model(**batch)
    assert torch.allclose(sharding.unshard(out, 1), expected.transpose(1, 2), atol=1e-5)
    grads = [
        torch.autograd.grad(y.sin().sum(), list(model.parameters()), allow_unused=True)
        for y in (out.transpose(1, 2), expected)
    ]
    for grad, whole in zip(*grads, strict=True):
        assert (grad is None) == (whole is None)
        assert grad is None or whole is None or torch.allclose(grad, whole, atol=1e-4)


def step_of_rank(mesh: DeviceMesh, layout: Any, exchange: Any, attend: Any) -> dict[str, Tensor]:
    sharding = cp.Sharding(mesh, {"input_ids": 1, "doc_ids": 1}, DOCUMENTS, layout, exchange, inner="eager")
    model = Written(attend)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard({name: BATCH[name] for name in sharding.tokens}) as local:
        out = compiled(**local).transpose(1, 2)
    whole = sharding.unshard(out, 1)
    (out.sin() * local.has_token[..., None, None]).sum().backward()
    cp.sum_gradients(model.parameters(), sharding)
    return {"out": whole.detach(), "grad": model.table.weight.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("layout", "exchange", "attend"), [("balanced", "needed", tokens_first), ("contiguous", "a2a", merged)]
)
def test_other_forms_on_two_ranks(pool: Pool, layout: str, exchange: str, attend: Attention) -> None:
    model = Written(attend)
    out = model(**BATCH).transpose(1, 2)
    out.sin().sum().backward()
    for found in pool.run(2, step_of_rank, layout, exchange, attend):
        torch.testing.assert_close(found["out"], out.detach())
        torch.testing.assert_close(found["grad"], model.table.weight.grad)


def with_keys_of_one_head(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return filled(q, k[:, :1] + 0, v[:, :1] + 0, keep)


def test_products_broadcast_one_head() -> None:
    assert the_site(Written(with_keys_of_one_head)).key.meta["example_value"].shape[1] == 1


def test_no_mask_sees_the_whole_row() -> None:
    site = the_site(Written(lambda q, k, v, keep: (q @ k.mT).softmax(-1) @ v))
    assert site.mask == PackedMask(causal=False, packed=False)


def test_a_mask_that_comes_in_needs_the_users_word() -> None:
    def model(mask: Tensor, **b: Tensor) -> Tensor:
        x = heads(b)
        return (x @ x.mT + mask).softmax(-1) @ x

    batch = {**BATCH, "mask": torch.zeros(2, 1, 12, 12)}
    assert reasons(model, batch=batch) == {Reason.MASK_OPAQUE}
    assert the_site(model, annotate(DOCUMENTS, assume_mask=PackedMask()), batch=batch).assumed


# -- what differs --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "attend",
    [scores_without_gradient, mask_of_logits, weights_changed, queries_changed, over_queries,
     capped_after_mask, masked_after_softmax, less_the_mean, added_twice, weights_returned,
     taken_off_the_mask, less_itself, taken_off_twice, over_a_tensor_of_two, mixed_dtypes, negative_scale,
     parted_otherwise, onto_a_bias, bounded, filled_too_late, other_logits_sinks, exponential_sinks,
     shared_twice_sinks, detached_sinks, heads_mixed, mixed_forms, keys_as_queries, column_per_token,
     first_column_dropped_sinks],
)  # fmt: skip
def test_anything_else_is_refused(attend: Any) -> None:
    assert reasons(Written(attend)) == {Reason.KERNEL}


@pytest.mark.parametrize("low", [100.0, -1e10])
def test_what_is_taken_off_must_drop_keys(low: float) -> None:
    def weakly(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT - (1 - keep.to(q.dtype)) * low).softmax(-1) @ v

    assert reasons(Written(weakly)) == {Reason.MASK_NOT_PACKED}


def test_what_is_scaled_must_drop_keys() -> None:
    def weakened(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return ((q @ k.mT + torch.where(keep, 0.0, -1e5)) * 0.01).softmax(-1) @ v

    assert reasons(Written(weakened)) == {Reason.MASK_NOT_PACKED}


def of_one_row(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, written: bool) -> Tensor:
    """(H, T, D)."""
    q, k, v = q[0], k[0], v[0]
    if not written:
        return F.scaled_dot_product_attention(q, k, v, keep[0], scale=0.5)[None]
    return (torch.bmm(q, k.mT) * 0.5).masked_fill(~keep[0], -math.inf).softmax(-1).bmm(v)[None]


def of_one_head(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, written: bool) -> Tensor:
    """(B, T, D)."""
    q, k, v = (x[:, 1] for x in (q, k, v))
    if not written:
        return F.scaled_dot_product_attention(q, k, v, keep[:, 0], scale=0.5)[:, None]
    return ((q @ k.transpose(1, 2) * 0.5).masked_fill(~keep[:, 0], -math.inf).softmax(2) @ v)[:, None]


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("attend", [of_one_row, of_one_head])
def test_attention_of_three_dims(attend: Callable[..., Tensor], written: bool) -> None:
    model = Written(lambda q, k, v, keep: attend(q, k, v, keep, written))
    rows = 1 if attend is of_one_row else 2
    batch = {name: BATCH[name][:rows] for name in ("input_ids", "doc_ids")}
    sharding = cp.Sharding(1, dict.fromkeys(batch, 1), DOCUMENTS, inner="eager", verify="first_step")
    torch._dynamo.reset()
    with sharding.shard(batch) as local:
        out = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)(**local)
    whole = sharding.unshard(out.transpose(1, 2), 1).transpose(1, 2)
    torch.testing.assert_close(whole, model(**batch))
    found = [torch.autograd.grad(y.sin().sum(), model.table.weight)[0] for y in (whole, model(**batch))]
    torch.testing.assert_close(*found)


def test_dropout_is_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return F.dropout((q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1), 0.1) @ v

    assert reasons(Written(attend)) == {Reason.DROPOUT}


def test_masks_are_proven_as_those_of_attention_nodes() -> None:
    def bias(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        return (q @ k.mT + (i[None] - i[:, None])).masked_fill(~keep, -math.inf).softmax(-1) @ v

    def other_tokens(**b: Tensor) -> Tensor:
        x, ids = heads(b), b["input_ids"]
        return (x @ x.mT).masked_fill(ids[:, None, :, None] != ids[:, None, None, :], -math.inf).softmax(-1) @ x

    assert reasons(Written(bias)) == {Reason.MASK_NOT_PACKED}
    assert reasons(other_tokens) == {Reason.MASK_WRONG_SOURCE}


def test_a_softmax_over_features_is_no_attention() -> None:
    def model(**b: Tensor) -> Tensor:
        x = heads(b)
        gate = x.softmax(-1)
        return F.scaled_dot_product_attention(x, x, gate, PACKED(**b))

    assert the_site(model).mask == PackedMask()


def test_heads_repeated_before_the_key_changes_stay() -> None:
    def model(**b: Tensor) -> Tensor:
        k = heads(b, 2) + 1.0
        repeated = k.repeat_interleave(3, 1)
        k.mul_(2.0)
        return F.scaled_dot_product_attention(heads(b, 6), repeated, repeated, PACKED(**b))

    assert the_site(model).key.meta["example_value"].shape[1] == 6


def test_heads_repeated_without_gradients_stay() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        with torch.no_grad():
            k = k[:, :2].repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v, keep)

    assert the_site(Written(attend)).key.meta["example_value"].shape[1] == 4
