"""Attention inside checkpointed and nested regions, and which argument a placeholder is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_rewrite import PackedMask, Reason, Refusal
from cp_rewrite.passes.graph.tokens import argument_names
from cp_rewrite.passes.values.state import Site
from tests.helpers.matching import PACKED, heads, match_model, reasons, the_site


def attention(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 1.5, x, attn_mask=mask)


def test_checkpointed_regions() -> None:
    def model(**b: Tensor) -> Tensor:
        x, mask = heads(b), PACKED(**b)
        for _ in range(2):
            x = checkpoint(attention, x, mask, use_reentrant=False)
        return x

    sites = match_model(model)
    assert all(isinstance(s, Site) and s.mask == PackedMask() for s in sites)
    bodies = {s.graph_module for s in sites if isinstance(s, Site)}
    assert len(sites) == len(bodies) == 2


def test_a_mask_made_inside_a_checkpoint() -> None:
    def block(x: Tensor, ids: Tensor, i: Tensor) -> Tensor:
        near = i[:, None] >= i[None, :]
        return attention(x, (ids[:, None, :, None] == ids[:, None, None, :]) & near)

    def model(**b: Tensor) -> Tensor:
        i = torch.arange(b["input_ids"].shape[1])
        return checkpoint(block, heads(b), b["doc_ids"], i, use_reentrant=False)

    assert the_site(model).mask == PackedMask()


def test_a_mask_handed_out_of_a_checkpoint() -> None:
    def model(**b: Tensor) -> Tensor:
        mask = checkpoint(PACKED, use_reentrant=False, **b)
        assert mask is not None
        return attention(heads(b), mask)

    assert the_site(model).mask == PackedMask()


def test_regions_compiled_once() -> None:
    block = torch.compiler.nested_compile_region(attention)

    def model(**b: Tensor) -> Tensor:
        x, mask = heads(b), PACKED(**b)
        return block(block(x, mask), mask)

    assert the_site(model).mask == PackedMask()


def test_one_region_with_two_masks_is_refused() -> None:
    block = torch.compiler.nested_compile_region(attention)

    def model(**b: Tensor) -> Tensor:
        x, i = heads(b), torch.arange(b["input_ids"].shape[1])
        mask = PACKED(**b)
        return block(block(x, mask), mask & (i[:, None] - i[None, :] < 3))

    found = match_model(model)
    assert [f.reason for f in found if isinstance(f, Refusal)] == [Reason.NESTED_REGION]


def test_attention_inside_a_branch_is_refused() -> None:
    def model(**b: Tensor) -> Tensor:
        x, mask = heads(b), PACKED(**b)
        return torch.cond(x.sum() > 0, attention, lambda x, mask: x * 1.0, (x, mask))

    (refusal,) = match_model(model)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NESTED_REGION
    assert "cond, which is no plain call of a region" in refusal.detail


@pytest.mark.parametrize("how", ["cond", "map"])
def test_a_mask_of_a_nested_graph_that_is_no_region_is_refused(how: str) -> None:
    def keep(row: Tensor) -> Tensor:
        return row & True

    def model(**b: Tensor) -> Tensor:
        mask = PACKED(**b)
        if how == "cond":
            mask = torch.cond(mask.any(), keep, lambda mask: mask & True, (mask,))
        else:
            mask = torch._higher_order_ops.map(keep, mask)
        return attention(heads(b), mask)

    (refusal,) = match_model(model)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.MASK_UNSUPPORTED_OP
    assert "runs a nested graph and is no plain call of a region" in refusal.detail


def test_sdpa_kernel_brackets_change_nothing() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def model(**b: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attention(heads(b), PACKED(**b))

    assert the_site(model).mask == PackedMask()


# -- argument names ------------------------------------------------------------------------------------------


def test_arguments_are_named_as_the_caller_names_them() -> None:
    class Model(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        doc_ids: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("doc_ids", torch.zeros(2, 12))
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: Tensor, nested: dict[str, Tensor], *rest: Tensor, **more: Tensor) -> Tensor:
            return input_ids * self.weight + nested["position_ids"] + rest[0] + more["labels"] + self.doc_ids

    x = torch.zeros(2, 12)
    graphs: list[Any] = []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Model(), backend=backend)(x, {"position_ids": x + 1}, x + 2, labels=x + 3)
    assert sorted(argument_names(graphs[0]).values()) == ["input_ids", "labels", "position_ids", "rest[0]"]


def test_attention_of_each_row_in_a_transform_is_refused() -> None:
    """Inside of it rows of the batch are not to be seen."""

    def row(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0]

    assert reasons(lambda **b: torch.vmap(row)(heads(b)), dynamic=False) == {Reason.NESTED_REGION}
