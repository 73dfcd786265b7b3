"""How heads are dealt, sinks' gradients, and what exchanges refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_rewrite as cp
from cp_rewrite.ops.attention import add_sinks, merge_parts, sinks_gradient
from cp_rewrite.passes.plan_sites import exchange_reasons
from cp_rewrite.planning.routes.head_deal import HeadDeal
from tests.helpers.packed import make_schedule, tensors

ops = torch.ops.cp_rewrite


@pytest.mark.parametrize(
    ("heads", "ranks", "per_rank"),
    [
        ((32, 8), 4, (8, 2)),
        ((32, 4), 8, (4, 1)),  # key heads < ranks: copied
        ((12, 2), 4, (3, 1)),
        ((12, 12), 8, (2, 2)),  # padded
        ((3, 1), 2, (2, 1)),
        ((4, 2), 3, (2, 1)),
    ],
)
def test_deals(heads: tuple[int, int], ranks: int, per_rank: tuple[int, int]) -> None:
    deal = HeadDeal.best(*heads, ranks)
    assert (deal.local, deal.local_kv) == per_rank
    assert deal.part * deal.copies >= deal.group


def test_heads_that_do_not_group_are_an_error() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        HeadDeal.best(5, 2, 2)


def test_a_part_without_keys_changes_nothing() -> None:
    out, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    lse[:, 1], out[1] = -torch.inf, 0
    for empty in (-torch.inf, torch.inf):
        merged, total = merge_parts(out.clone(), lse, torch.zeros_like(out), torch.full_like(lse, empty))
        assert torch.equal(merged, out)
        assert torch.equal(total, lse)


def test_sinks_match_autograd() -> None:
    out, lse = torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    dout = torch.randn_like(out)
    mixed, total = add_sinks(out, lse, sinks)
    (expected,) = torch.autograd.grad(mixed, sinks, dout)
    lse[:, 0] = total.detach()[:, 0]
    torch.testing.assert_close(sinks_gradient(dout, mixed.detach(), total.detach(), sinks.detach()), expected)


def test_new_ops_pass_opcheck() -> None:
    x, order = torch.randn(6, 4, requires_grad=True), torch.tensor([3, 1, 0, 2, 5, 4], dtype=torch.int32)
    torch.library.opcheck(ops.permute_rows.default, (x, order, order.argsort().int()))
    schedule, _ = make_schedule([cp.Documents.from_lengths([5, 0, 7, 1], 15)], 1, "contiguous", cp.PackedMask())
    tables, route = tensors(schedule, 0, "p2p")
    q, k, v = (torch.randn(15, h, d, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 6)))
    for sinks in (None, torch.randn(4, requires_grad=True)):
        numbers = (0.3, 0.0, "reference", False, "", 1)
        torch.library.opcheck(ops.ring_attention.default, (q, k, v, *tables, *route, *numbers, sinks))
    out, lse = (x.detach() for x in ops.ring_attention(q, k, v, *tables, *route, *numbers, None))
    saved = [x.detach() for x in (out, q, k, v, out, lse)]
    torch.library.opcheck(ops.ring_attention_backward.default, (*saved, *tables, *route, *numbers))


def test_what_exchanges_refuse() -> None:
    def reasons(exchange: str, **options: Any) -> str:
        sharding = cp.Sharding(4, {"x": 1}, cp.DocumentIds("x"), **options)
        return "; ".join(exchange_reasons(exchange, sharding))

    assert "there is one node" in reasons("a2a+p2p")
    assert not reasons("a2a+p2p", ranks_per_node=2)
    assert "two buffers" in reasons("p2p", keep_kv=True)
    assert not reasons("a2a")
    assert not reasons("needed", keep_kv=True)
