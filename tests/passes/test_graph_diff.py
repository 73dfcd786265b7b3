"""Changes of graphs by the rewrite, as short diffs, equal on every rank. EXPECTTEST_ACCEPT=1 updates them.

The texts are those of torch 2.13: Dynamo spells some nodes otherwise in other versions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import cp_rewrite as cp
from cp_rewrite.passes.graph.diff import normal_line


@contextmanager
def fake_group(rank: int) -> Generator[Any]:
    """A group of 4 without other processes, seen from one rank."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))["cp"]
    finally:
        dist.destroy_process_group()


def batch() -> dict[str, Tensor]:
    doc = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8])
    return {"q": torch.randn(1, 24, 4, 8), "kv": torch.randn(1, 24, 2, 8), "doc": doc}


def same_document(doc: Tensor) -> Tensor:
    return doc[:, None, :, None] == doc[:, None, None, :]


def causal_with_groups(q: Tensor, kv: Tensor, doc: Tensor) -> Tensor:
    q, kv = q.transpose(1, 2), kv.transpose(1, 2)
    mask = same_document(doc).tril()
    return F.scaled_dot_product_attention(q, kv, kv, attn_mask=mask, enable_gqa=True)


def additive_with_expanded_heads(q: Tensor, kv: Tensor, doc: Tensor) -> Tensor:
    q, kv = q.transpose(1, 2), kv.transpose(1, 2).repeat_interleave(2, dim=1)
    bias = torch.zeros(same_document(doc).shape).masked_fill(~same_document(doc), float("-inf"))
    return F.scaled_dot_product_attention(q, kv, kv, attn_mask=bias)


def three_layers(q: Tensor, kv: Tensor, doc: Tensor) -> Tensor:
    mask = same_document(doc).tril()
    for _ in range(3):
        q = causal_layer(q, kv, mask) + q
    return q


def causal_layer(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    q, kv = q.transpose(1, 2), kv.transpose(1, 2)
    return F.scaled_dot_product_attention(q, kv, kv, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def positions_from_arange(q: Tensor, kv: Tensor, doc: Tensor) -> Tensor:
    angle = torch.arange(q.shape[1], device=q.device)[None, :, None, None]
    return causal_with_groups(q * angle.cos(), kv, doc)


def diff(model: Callable[..., Any], exchange: Any) -> str:
    """The diff of a model's graph, from ranks 0 and 3, which must agree."""
    found: list[str] = []
    for rank in (0, 3):
        with fake_group(rank) as mesh:
            tokens = {"q": 1, "kv": 1, "doc": 1}
            sharding = cp.Sharding(mesh, tokens, cp.DocumentIds("doc"), exchange=exchange)
            torch._dynamo.reset()
            torch.manual_seed(0)
            report = cp.explain(model, sharding)(**batch())
            assert report.ok, str(report)
            found.append(report.diff)
    assert found[0] == found[1]
    return found[0]


class TestGraphDiff(TestCase):
    maxDiff = None

    def test_needed(self) -> None:
        self.assertExpectedInline(
            diff(causal_with_groups, "needed"),
            """\
--- before
+++ after
@@
 l_doc_: int64[1, S0] = placeholder
+cp_cu_seqlens_q_0 .. cp_return_rows_0 = 11 plan inputs
 q: float32[1, 4, S0, 8] = l_q_.transpose(1, 2)
 kv: float32[1, 2, S0, 8] = l_kv_.transpose(1, 2)
-getitem: int64[1, 1, S0, 1] = getitem(l_doc_, (:, None, :, None))
-getitem_1: int64[1, 1, 1, S0] = getitem(l_doc_, (:, None, None, :))
-eq: bool[1, 1, S0, S0] = eq(getitem, getitem_1)
-mask: bool[1, 1, S0, S0] = eq.tril()
-scaled_dot_product_attention: float32[1, 4, S0, 8] = scaled_dot_product_attention(q, kv, kv, attn_mask=mask, enable_gqa=True)
+transpose: float32[1, S0, 4, 8] = q.transpose(1, 2)
+flatten: float32[S0, 4, 8] = transpose.flatten(0, 1)
+transpose_1: float32[1, S0, 2, 8] = kv.transpose(1, 2)
+flatten_1: float32[S0, 2, 8] = transpose_1.flatten(0, 1)
+transpose_2: float32[1, S0, 2, 8] = kv.transpose(1, 2)
+flatten_2: float32[S0, 2, 8] = transpose_2.flatten(0, 1)
+detach: float32[S0, 2, 8] = flatten_1.detach()
+detach_1: float32[S0, 2, 8] = flatten_2.detach()
+exchange_rows_default: float32[S5, 32] = cp_rewrite.exchange_rows(detach, detach_1, cp_*_0, 'cp', None)
+packed_attention_default = cp_rewrite.packed_attention(flatten, flatten_1, flatten_2, exchange_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'needed', 'cp', 4, None)
+getitem_2: float32[S0, 4, 8] = getitem(packed_attention_default, 0)
+unflatten: float32[1, S0, 4, 8] = getitem_2.unflatten(0, (1, -1))
+scaled_dot_product_attention: float32[1, 4, S0, 8] = unflatten.transpose(1, 2)
 return (scaled_dot_product_attention,)""",
        )

    def test_all_gather(self) -> None:
        self.assertExpectedInline(
            diff(additive_with_expanded_heads, "all_gather"),
            """\
--- before
+++ after
@@
 l_doc_: int64[1, S0] = placeholder
+cp_cu_seqlens_q_0 .. cp_sum_rows_0 = 7 plan inputs
 q: float32[1, 4, S0, 8] = l_q_.transpose(1, 2)
 transpose_1: float32[1, 2, S0, 8] = l_kv_.transpose(1, 2)
-kv: float32[1, 4, S0, 8] = transpose_1.repeat_interleave(2, dim=1)
-getitem: int64[1, 1, S0, 1] = getitem(l_doc_, (:, None, :, None))
-getitem_1: int64[1, 1, 1, S0] = getitem(l_doc_, (:, None, None, :))
-eq: bool[1, 1, S0, S0] = eq(getitem, getitem_1)
-size = eq.size()
-zeros: float32[1, 1, S0, S0] = zeros(size)
-getitem_6: int64[1, 1, S0, 1] = getitem(l_doc_, (:, None, :, None))
-getitem_7: int64[1, 1, 1, S0] = getitem(l_doc_, (:, None, None, :))
-eq_1: bool[1, 1, S0, S0] = eq(getitem_6, getitem_7)
-invert: bool[1, 1, S0, S0] = invert(eq_1)
-bias: float32[1, 1, S0, S0] = zeros.masked_fill(invert, -inf)
-scaled_dot_product_attention: float32[1, 4, S0, 8] = scaled_dot_product_attention(q, kv, kv, attn_mask=bias)
+transpose: float32[1, S0, 4, 8] = q.transpose(1, 2)
+flatten: float32[S0, 4, 8] = transpose.flatten(0, 1)
+transpose_2: float32[1, S0, 2, 8] = transpose_1.transpose(1, 2)
+flatten_1: float32[S0, 2, 8] = transpose_2.flatten(0, 1)
+transpose_3: float32[1, S0, 2, 8] = transpose_1.transpose(1, 2)
+flatten_2: float32[S0, 2, 8] = transpose_3.flatten(0, 1)
+detach: float32[S0, 2, 8] = flatten_1.detach()
+detach_1: float32[S0, 2, 8] = flatten_2.detach()
+flatten_3: float32[S0, 16] = detach.flatten(1)
+flatten_4: float32[S0, 16] = detach_1.flatten(1)
+cat: float32[S0, 32] = cat([flatten_3, flatten_4], 1)
+all_gather_into_tensor_default: float32[4*S0, 32] = _c10d_functional.all_gather_into_tensor(cat, 4, 'cp')
+wait_tensor_default: float32[4*S0, 32] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
+gather_rows_default: float32[S5, 32] = cp_rewrite.gather_rows(wait_tensor_default, cp_kv_rows_0)
+packed_attention_default = cp_rewrite.packed_attention(flatten, flatten_1, flatten_2, gather_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'all_gather', 'cp', 4, None)
+getitem_8: float32[S0, 4, 8] = getitem(packed_attention_default, 0)
+unflatten: float32[1, S0, 4, 8] = getitem_8.unflatten(0, (1, -1))
+scaled_dot_product_attention: float32[1, 4, S0, 8] = unflatten.transpose(1, 2)
 return (scaled_dot_product_attention,)""",
        )

    def test_repeated_layers_are_folded(self) -> None:
        self.assertExpectedInline(
            diff(three_layers, "needed"),
            """\
--- before
+++ after
@@
 l_kv_: float32[1, S0, 2, 8] = placeholder
-getitem: int64[1, 1, S0, 1] = getitem(l_doc_, (:, None, :, None))
-getitem_1: int64[1, 1, 1, S0] = getitem(l_doc_, (:, None, None, :))
-eq: bool[1, 1, S0, S0] = eq(getitem, getitem_1)
-mask: bool[1, 1, S0, S0] = eq.tril()
+cp_cu_seqlens_q_0 .. cp_return_rows_0 = 11 plan inputs
 q: float32[1, 4, S0, 8] = l_q_.transpose(1, 2)
 kv: float32[1, 2, S0, 8] = l_kv_.transpose(1, 2)
-scaled_dot_product_attention: float32[1, 4, S0, 8] = scaled_dot_product_attention(q, kv, kv, attn_mask=mask, enable_gqa=True)
+transpose: float32[1, S0, 4, 8] = q.transpose(1, 2)
+flatten: float32[S0, 4, 8] = transpose.flatten(0, 1)
+transpose_9: float32[1, S0, 2, 8] = kv.transpose(1, 2)
+flatten_1: float32[S0, 2, 8] = transpose_9.flatten(0, 1)
+transpose_10: float32[1, S0, 2, 8] = kv.transpose(1, 2)
+flatten_2: float32[S0, 2, 8] = transpose_10.flatten(0, 1)
+detach: float32[S0, 2, 8] = flatten_1.detach()
+detach_1: float32[S0, 2, 8] = flatten_2.detach()
+exchange_rows_default: float32[S5, 32] = cp_rewrite.exchange_rows(detach, detach_1, cp_*_0, 'cp', None)
+packed_attention_default = cp_rewrite.packed_attention(flatten, flatten_1, flatten_2, exchange_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'needed', 'cp', 4, None)
+getitem_2: float32[S0, 4, 8] = getitem(packed_attention_default, 0)
+unflatten: float32[1, S0, 4, 8] = getitem_2.unflatten(0, (1, -1))
+scaled_dot_product_attention: float32[1, 4, S0, 8] = unflatten.transpose(1, 2)
 transpose_2: float32[1, S0, 4, 8] = scaled_dot_product_attention.transpose(1, 2)
@@
 kv_1: float32[1, 2, S0, 8] = l_kv_.transpose(1, 2)
-scaled_dot_product_attention_1: float32[1, 4, S0, 8] = scaled_dot_product_attention(q_2, kv_1, kv_1, attn_mask=mask, enable_gqa=True)
+transpose_12: float32[1, S0, 4, 8] = q_2.transpose(1, 2)
+flatten_3: float32[S0, 4, 8] = transpose_12.flatten(0, 1)
+transpose_13: float32[1, S0, 2, 8] = kv_1.transpose(1, 2)
+flatten_4: float32[S0, 2, 8] = transpose_13.flatten(0, 1)
+transpose_14: float32[1, S0, 2, 8] = kv_1.transpose(1, 2)
+flatten_5: float32[S0, 2, 8] = transpose_14.flatten(0, 1)
+detach_2: float32[S0, 2, 8] = flatten_4.detach()
+detach_3: float32[S0, 2, 8] = flatten_5.detach()
+exchange_rows_default_1: float32[S5, 32] = cp_rewrite.exchange_rows(detach_2, detach_3, cp_*_0, 'cp', None)
+packed_attention_default_1 = cp_rewrite.packed_attention(flatten_3, flatten_4, flatten_5, exchange_rows_default_1, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'needed', 'cp', 4, None)
+getitem_3: float32[S0, 4, 8] = getitem(packed_attention_default_1, 0)
+unflatten_1: float32[1, S0, 4, 8] = getitem_3.unflatten(0, (1, -1))
+scaled_dot_product_attention_1: float32[1, 4, S0, 8] = unflatten_1.transpose(1, 2)
 transpose_5: float32[1, S0, 4, 8] = scaled_dot_product_attention_1.transpose(1, 2)
@@ and 1 more like this""",
        )

    def test_positions_become_global(self) -> None:
        self.assertExpectedInline(
            diff(positions_from_arange, "needed"),
            """\
--- before
+++ after
@@
 l_doc_: int64[1, S0] = placeholder
-arange: int64[S0] = arange(S0, device=device(type='cpu'))
-angle: int64[1, S0, 1, 1] = getitem(arange, (None, :, None, None))
+cp_cu_seqlens_q_0 .. cp_row_index = 12 plan inputs
+to: int64[S0] = cp_row_index.to(torch.int64)
+angle: int64[1, S0, 1, 1] = getitem(to, (None, :, None, None))
 cos: float32[1, S0, 1, 1] = angle.cos()
@@
 kv: float32[1, 2, S0, 8] = l_kv_.transpose(1, 2)
-getitem_5: int64[1, 1, S0, 1] = getitem(l_doc_, (:, None, :, None))
-getitem_6: int64[1, 1, 1, S0] = getitem(l_doc_, (:, None, None, :))
-eq: bool[1, 1, S0, S0] = eq(getitem_5, getitem_6)
-mask: bool[1, 1, S0, S0] = eq.tril()
-scaled_dot_product_attention: float32[1, 4, S0, 8] = scaled_dot_product_attention(q, kv, kv, attn_mask=mask, enable_gqa=True)
+transpose: float32[1, S0, 4, 8] = q.transpose(1, 2)
+flatten: float32[S0, 4, 8] = transpose.flatten(0, 1)
+transpose_1: float32[1, S0, 2, 8] = kv.transpose(1, 2)
+flatten_1: float32[S0, 2, 8] = transpose_1.flatten(0, 1)
+transpose_2: float32[1, S0, 2, 8] = kv.transpose(1, 2)
+flatten_2: float32[S0, 2, 8] = transpose_2.flatten(0, 1)
+detach: float32[S0, 2, 8] = flatten_1.detach()
+detach_1: float32[S0, 2, 8] = flatten_2.detach()
+exchange_rows_default: float32[S5, 32] = cp_rewrite.exchange_rows(detach, detach_1, cp_*_0, 'cp', None)
+packed_attention_default = cp_rewrite.packed_attention(flatten, flatten_1, flatten_2, exchange_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'needed', 'cp', 4, None)
+getitem: float32[S0, 4, 8] = getitem(packed_attention_default, 0)
+unflatten: float32[1, S0, 4, 8] = getitem.unflatten(0, (1, -1))
+scaled_dot_product_attention: float32[1, 4, S0, 8] = unflatten.transpose(1, 2)
 return (scaled_dot_product_attention,)""",
        )


@pytest.mark.parametrize("text", ["device(type='cuda', index=3)", "arange(8, device='cuda:3')"])
def test_device_indices_do_not_show(text: str) -> None:
    assert "3" not in normal_line(text, {})


def test_a_refused_graph_is_not_changed() -> None:
    def model(q: Tensor, kv: Tensor, doc: Tensor) -> Tensor:
        return causal_with_groups(torch.fft.fft(q, dim=1).real, kv, doc)

    report = cp.explain(model, cp.Sharding(4, {"q": 1, "kv": 1, "doc": 1}, cp.DocumentIds("doc")))(**batch())
    assert not report.ok
    assert report.diff == "no change"
