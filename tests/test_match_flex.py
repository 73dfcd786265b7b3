"""flex_attention: its mask function says what a mask tensor says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cp_rewrite import PackedMask, Reason
from tests.matching import Model, heads, reasons, the_site


def flex(mask: str = "causal", score: Callable[..., Tensor] | None = None) -> Model:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def model(**b: Tensor) -> Tensor:
        q, k = heads(b, 4) * 1.0, heads(b, 2) * 2.0
        ids, t = b["doc_ids"] if mask != "tokens" else b["input_ids"], b["doc_ids"].shape[1]

        def keep(row: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = ids[row, i] == ids[row, j]
            return same & (i >= j) & (i - j < 4) if mask == "window" else same & (i >= j)

        blocks = create_block_mask(keep, ids.shape[0], None, t, t, device="cpu")
        return flex_attention(q, k, k, block_mask=blocks, score_mod=score, enable_gqa=True)  # type: ignore[return-value]

    return model


def test_flex_mask_functions() -> None:
    site = the_site(flex(), dynamic=False)
    assert site.mask == PackedMask()
    assert site.node.meta["example_value"].shape == (2, 4, 12, 4)
    assert site.key.meta["example_value"].shape[1] == 2
    assert site.softcap == 0.0
    assert the_site(flex("window"), dynamic=False).mask == PackedMask(window=(3, 0))


def test_flex_soft_cap() -> None:
    assert the_site(flex(score=lambda s, *_: 20.0 * torch.tanh(s / 20.0)), dynamic=False).softcap == 20.0


def test_flex_refusals() -> None:
    assert reasons(flex("tokens"), dynamic=False) == {Reason.MASK_WRONG_SOURCE}
    assert reasons(flex(score=lambda s, *_: s + 1), dynamic=False) == {Reason.KERNEL}
    assert reasons(flex(score=lambda s, _, h, i, j: s - (i - j)), dynamic=False) == {Reason.KERNEL}
