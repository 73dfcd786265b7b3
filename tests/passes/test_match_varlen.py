"""varlen_attn: read where its offsets are the annotated ones. Its own kernels run on GPUs only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import varlen

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason, Refusal
from cp_rewrite.passes.values.state import Site
from tests.helpers.packed_model import judge
from tests.helpers.pool import Pool

LENGTHS = [13, 1, 7, 29, 31]
PACKING = cp.CuSeqlens("cu_seqlens")
Attend = Callable[..., Any]


def rows_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Tensor:
    """`varlen_attn` by its definition, document by document: (T, H, D)."""
    parts: list[Tensor] = []
    for a, b in itertools.pairwise(cu.tolist()):
        i = torch.arange(b - a)
        delta = i[:, None] - i
        keep = torch.ones_like(delta, dtype=torch.bool)
        keep &= (delta <= window[0]) | (window[0] < 0)
        keep &= (-delta <= window[1]) | (window[1] < 0)
        parts.append(F.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1) for x in (q, k, v)), attn_mask=keep, enable_gqa=True).transpose(0, 1)
        )  # fmt: skip
    return torch.cat(parts)


def packed_rows(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Tensor:
    causal = window == (-1, 0)
    return torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, 64, 64, causal, window_size=list(window))[0]


class Model(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Two layers over one packed row, (T,) tokens or (1, T)."""

    def __init__(self, attend: Attend = packed_rows, window: tuple[int, int] = (-1, 0)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.window = attend, window
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.qkv = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor, other: Tensor | None = None) -> Any:
        h = self.embed(input_ids)
        cu = cu_seqlens if other is None else other
        for qkv in self.qkv:
            x = qkv(h).view(-1, 8, 8)
            h = h + self.attend(x[:, :4], x[:, 4:6], x[:, 6:], cu, self.window).reshape(h.shape)
        loss = F.cross_entropy(self.head(h).flatten(0, -2), labels.flatten(), reduction="sum")
        return loss / 81


def make_batch(dims: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    ids = ids if dims == 1 else ids[None]
    return {"input_ids": ids, "cu_seqlens": cu, "labels": ids.roll(-1, -1)}


def annotate(mesh: Any, dim: int = 0, packing: cp.sharding.Packing = PACKING, **options: Any) -> cp.Sharding:
    return cp.Sharding(mesh, {"input_ids": dim, "labels": dim}, packing, **options)


def found(model: Callable[..., Any], packing: cp.sharding.Packing = PACKING, **more: Tensor) -> list[Site | Refusal]:
    verdict = judge(model, {**make_batch(), **more}, annotate(2, packing=packing))
    return [*verdict.sites, *verdict.refusals]


@pytest.mark.parametrize(
    ("window", "expected"),
    [((-1, 0), PackedMask()), ((-1, -1), PackedMask(causal=False)), ((6, 0), PackedMask(window=(6, 0))),
     ((4, 3), PackedMask(causal=False, window=(4, 3)))],
)  # fmt: skip
def test_windows(window: tuple[int, int], expected: PackedMask) -> None:
    sites = found(Model(window=window))
    assert [site.mask for site in sites if isinstance(site, Site)] == [expected] * 2, sites
    assert all(isinstance(site, Site) and site.key.meta["example_value"].shape[1] == 2 for site in sites)


def test_the_public_function() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Any:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return varlen.varlen_attn(q, k, v, cu, cu, 64, 64, scale=0.3)

    sites = found(Model(attend))
    assert [site.mask for site in sites if isinstance(site, Site)] == [PackedMask(causal=False)] * 2, sites
    assert all(isinstance(site, Site) and site.scale == 0.3 for site in sites)


def refused(attend: Attend, **more: Any) -> set[Reason]:
    return {f.reason for f in found(Model(attend), **more) if isinstance(f, Refusal)}


def other_keys(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Any:
    return torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu + 1, 64, 64, True)[0]


def changed_offsets(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Any:
    cu[1:-1] += 1
    return torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, 64, 64, True)[0]


def changed_copy(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Any:
    cu = cu.long()
    cu[1:-1] += 1
    cu = cu.int()
    return torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, 64, 64, True)[0]


def rounded(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Any:
    cu = cu.half().int()
    return torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, 64, 64, True)[0]


def without_last_document(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Any:
    return torch.ops.torch_attn._varlen_attn(q, k, v, cu[:-1], cu[:-1], 64, 64, True)[0]


def shorter_keys(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Any:
    q, k, v = (x.detach() for x in (q, k, v))
    return torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, 64, 64, True, seqused_k=cu[1:] - cu[:-1] - 1)[0]


def with_logsumexp(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]) -> Any:
    out, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, 64, 64, True)
    return out * lse.t()[..., None]


def test_refusals() -> None:
    assert Reason.MASK_WRONG_SOURCE in refused(other_keys)
    for wrong in (changed_offsets, changed_copy, rounded, without_last_document):
        assert Reason.MASK_WRONG_SOURCE in refused(wrong)
    if "seqused_k" in str(torch.ops.torch_attn._varlen_attn.default._schema):  # not in torch 2.11
        assert Reason.KERNEL in refused(shorter_keys)
    assert Reason.KERNEL in refused(with_logsumexp)
    assert Reason.MASK_WRONG_SOURCE in refused(packed_rows, other=make_batch()["cu_seqlens"])
    assert Reason.MASK_WRONG_SOURCE in refused(packed_rows, packing=cp.DocumentIds("input_ids"))
    assert Reason.MASK_WRONG_SOURCE in refused(packed_rows, packing=cp.CuSeqlens("cu_seqlens", "other"))


def sharded_step(mesh: DeviceMesh, dims: int, window: tuple[int, int], exchange: Any) -> tuple[float, dict[str, Any]]:
    sharding = annotate(mesh, dims - 1, exchange=exchange, inner="aot_eager")
    model = Model(window=window)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(make_batch(dims)) as local:
        loss = compiled(**local)
        loss.backward()
    cp.sum_gradients(model.parameters(), sharding)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=sharding.group)
    return total.item(), {key: p.grad for key, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("dims", "window", "exchange"),
    [(1, (-1, 0), "needed"), (2, (6, 0), "p2p"), pytest.param(2, (4, 3), "a2a", marks=pytest.mark.slow)],
)
def test_two_processes_match_one(pool: Pool, dims: int, window: tuple[int, int], exchange: str) -> None:
    model = Model(rows_attention, window)
    loss = model(**make_batch(dims))
    loss.backward()
    for total, grads in pool.run(2, sharded_step, dims, window, exchange):
        assert total == pytest.approx(loss.item(), rel=1e-6)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(grads[key], parameter.grad, rtol=1e-4, atol=1e-6)
