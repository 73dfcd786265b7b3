"""Drawn masks against brute force: what is accepted equals the mask on every batch that is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cp_rewrite import PackedMask
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.match.find_sites import match_sites
from tests.helpers import amount
from tests.passes.drawn.batches import draw_batch
from tests.passes.drawn.expressions import Batch, Indexed
from tests.passes.drawn.kinds import KINDS, Kind
from tests.passes.drawn.read import FORMS, Drawn, draw, inputs_of, read, run
from tests.passes.mask_spellings import capture

ALL = [kind for make in KINDS.values() for kind in make()]
named = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)


@named
def test_right_masks_are_read(kind: Kind) -> None:
    for mask in kind.whole:
        meaning = read(kind, Drawn(mask))
        assert isinstance(meaning, PackedMask), f"{mask}: {meaning}"
        assert meaning.spans == (kind.sharding.spans is not None)
        assert meaning.tree == kind.name.startswith("tree of")
        assert (meaning.chunk is not None) == kind.name.startswith("chunks")


def captured(kind: Kind, masks: list[Drawn], batch: Batch) -> list[PackedMask | None]:
    """The meaning of each mask, read off a captured graph; None: it is refused."""

    def model(**b: Tensor) -> Tensor:
        x = b["input_ids"][:, None, :, None].float().expand(-1, 2, -1, 16)
        if masks[0].flex:

            def keeps(i: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return masks[0].mask.value(Indexed(b, i, q, k))

            rows, tokens = b["input_ids"].shape
            out = flex_attention(x, x, x, block_mask=create_block_mask(keeps, rows, None, tokens, tokens, "cpu"))
            assert isinstance(out, Tensor)
            return out
        total = torch.zeros(())
        for m in masks:
            mask = m.dense(b)
            y = x.to(mask.dtype) if mask.is_floating_point() else x
            total = total + F.scaled_dot_product_attention(y, y, y, attn_mask=mask)
        return total

    with torch._dynamo.config.patch(specialize_int=True):  # offsets in closures are constants
        gm = capture(model, batch)
    found = match_sites(gm, kind.sharding, TokenAxis.read(gm, kind.sharding).unified())
    if masks[0].flex:
        return [found.sites[0].mask if found.sites else None]
    meaning = {site.node: site.mask for site in found.sites}
    return [meaning.get(n) for n in gm.graph.nodes if n.target is F.scaled_dot_product_attention]


@pytest.mark.slow
@named
def test_captured_graphs_are_read_alike(kind: Kind) -> None:
    """Drawn masks are read without Dynamo."""
    rng = np.random.default_rng(amount.seed())
    batch = inputs_of(kind, draw_batch(rng))
    masks = [*(Drawn(mask) for mask in kind.whole), *(draw(kind, "additive", rng) for _ in range(3))]
    flex = draw(kind, "flex", rng)
    for graph in (masks, [Drawn(kind.whole[0], flex=True)], [flex]):
        expected = [meaning if isinstance(meaning := read(kind, m), PackedMask) else None for m in graph]
        assert captured(kind, graph, batch) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ALL[::4], ids=lambda kind: kind.name)
def test_some_drawn_masks_equal_brute_force(kind: Kind, form: str) -> None:
    assert run(kind, form, 5, 1)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@named
def test_drawn_masks_equal_brute_force(kind: Kind, form: str) -> None:
    found, wrong = run(kind, form, 150, amount.seed())
    assert wrong == []
    assert found["accepted"]
    assert found["refused"]
