"""The largest logit per head as ops; under every exchange, mask and padding it is part of each conformance cell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import reference
from cp_rewrite.kernels.params import Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.attention import attend
from cp_rewrite.ops.exchange import exchange_kv
from cp_rewrite.ops.max_logits import max_logits
from cp_rewrite.planning.routes.by_exchange import Exchange
from tests.helpers.packed import dense_logits, make_schedule, tensors

ops: Any = torch.ops.cp_rewrite
ROWS = [Documents.from_cu_seqlens([0, 5, 12], 20, [0, 8, 20])]
ALONE = Exchange("local", "", 1)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(20, h, d, generator=generator).to(dtype) for h, d in ((4, 8), (2, 8), (2, 6))]


@pytest.mark.parametrize("exchange", ["local", "p2p"])
@pytest.mark.parametrize("blocks", [1, 1 << 22], ids=["one_row", "whole"])
def test_blocks_of_any_size_find_the_same(monkeypatch: pytest.MonkeyPatch, exchange: str, blocks: int) -> None:
    monkeypatch.setattr(reference, "_BLOCK", blocks)
    q, k, v = inputs(torch.float64)
    mask, params = PackedMask(causal=False, window=(2, 1)), Params(0.7, 1.5)
    tables, route = tensors(make_schedule(ROWS, 1, "contiguous", mask)[0], 0, exchange)
    found = max_logits(q, k, v, tables, route, Exchange(exchange, "", 1), params)
    torch.testing.assert_close(found, dense_logits(q, k, ROWS, mask, params).amax((1, 2)))


def test_a_row_without_documents_has_no_logit() -> None:
    schedule, _ = make_schedule([Documents.from_lengths([], 20)], 1, "contiguous", PackedMask())
    for exchange in ("local", "p2p"):
        tables, route = tensors(schedule, 0, exchange)
        q, k, v = inputs(torch.bfloat16)
        found = max_logits(q, k, v, tables, route, Exchange(exchange, "", 1), Params(0.7))
        assert torch.equal(found, torch.full((4,), -torch.inf))


def test_ops_pass_opcheck() -> None:
    q, k, v = inputs()
    schedule, _ = make_schedule(ROWS, 1, "contiguous", PackedMask())
    tables, route = tensors(schedule, 0, "local")
    opcheck(ops.packed_max_logits.default, (q, k, exchange_kv(k, v, route, ALONE), *tables, 0.5, 0.0))
    tables, route = tensors(schedule, 0, "p2p")
    opcheck(ops.ring_max_logits.default, (q, k, *tables, *route, 0.5, 0.0, "", 1))


def test_compiled_beside_attention() -> None:
    """No graph break, for any sizes; gradients of attention stay as they are."""
    schedule, _ = make_schedule(ROWS, 1, "contiguous", PackedMask())
    tables, route = tensors(schedule, 0, "local")

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = attend(q, k, v, tables, route, ALONE, Params(0.5), "reference")[0]
        return out, max_logits(q, k, v, tables, route, ALONE, Params(0.5))

    results: list[list[Tensor]] = []
    for fn in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        leaves = [x.requires_grad_() for x in inputs()]
        out, largest = fn(*leaves)
        assert not largest.requires_grad
        results.append([out, largest, *torch.autograd.grad(out.sum(), leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_synchronisation() -> None:
    q, k, v = (x.cuda() for x in inputs(torch.bfloat16))
    schedule, _ = make_schedule(ROWS, 1, "contiguous", PackedMask())
    tables, route = tensors(schedule, 0, "local")
    tables[:2], route = [x.cuda() for x in tables[:2]], [x.cuda() for x in route]
    max_logits(q, k, v, tables, route, ALONE, Params(0.5))
    torch.cuda.set_sync_debug_mode("error")
    try:
        max_logits(q, k, v, tables, route, ALONE, Params(0.5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
