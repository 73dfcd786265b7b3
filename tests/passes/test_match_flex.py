"""flex_attention: its mask function says what a mask tensor says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason
from cp_rewrite.masks import MaskMismatch
from cp_rewrite.passes.values.state import Site
from tests.helpers.matching import BATCH, Model, heads, match_each, meaning, reasons, the_site
from tests.passes.mask_spellings import DOCUMENTS

pytestmark = pytest.mark.long


def flex(
    mask: str = "causal",
    score: Callable[..., Tensor] | None = None,
    change: Callable[[BlockMask, Tensor], BlockMask] = lambda blocks, _: blocks,
    block_size: int = 128,
) -> Model:
    """Attention by flex_attention; `change` makes another block mask of the right one and the documents' ids."""

    def model(**b: Tensor) -> Tensor:
        q, k = heads(b, 4) * 1.0, heads(b, 2) * 2.0
        ids, t = b["doc_ids"] if mask != "tokens" else b["input_ids"], b["doc_ids"].shape[1]

        def keep(row: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = ids[row, i] == ids[row, j]
            return same & (i >= j) & (i - j < 4) if mask == "window" else same & (i >= j)

        blocks = change(create_block_mask(keep, ids.shape[0], None, t, t, device="cpu", BLOCK_SIZE=block_size), ids)
        return flex_attention(q, k, k, block_mask=blocks, score_mod=score, enable_gqa=True)  # type: ignore[return-value]

    return model


SCORES: tuple[Callable[..., Tensor] | None, ...] = (
    None,
    lambda s, *_: 20.0 * torch.tanh(s / 20.0),
    lambda s, *_: s + 1,
    lambda s, _, h, i, j: s - (i - j),
)


def test_mask_and_score_functions() -> None:
    def model(**b: Tensor) -> list[Tensor]:
        q, k, ids = heads(b, 4) * 1.0, heads(b, 2) * 2.0, b["doc_ids"]
        blocks = create_block_mask(
            lambda row, _, i, j: (ids[row, i] == ids[row, j]) & (i >= j), 2, None, 12, 12, device="cpu"
        )
        found = [flex_attention(q, k, k, block_mask=blocks, score_mod=score, enable_gqa=True) for score in SCORES]
        return [*found, flex("window")(**b), flex("tokens")(**b)]  # type: ignore[list-item]

    site, capped, *others = match_each(model, dynamic=False)
    assert isinstance(site, Site)
    assert site.mask == PackedMask()
    assert site.node.meta["example_value"].shape == (2, 4, 12, 4)
    assert site.key.meta["example_value"].shape[1] == 2
    assert site.softcap == 0.0
    assert isinstance(capped, Site)
    assert capped.softcap == 20.0
    window = PackedMask(window=(3, 0))
    assert [meaning(f) for f in others] == [{Reason.KERNEL}, {Reason.KERNEL}, window, {Reason.MASK_WRONG_SOURCE}]


def as_is(blocks: BlockMask, _: Tensor) -> BlockMask:
    return blocks


def without_last_block(blocks: BlockMask, _: Tensor) -> BlockMask:
    counts = (blocks.kv_num_blocks - 1).clamp(min=1)
    return BlockMask.from_kv_blocks(counts, blocks.kv_indices, BLOCK_SIZE=blocks.BLOCK_SIZE, mask_mod=blocks.mask_mod)


def whole_blocks(blocks: BlockMask, _: Tensor) -> BlockMask:
    none, places = torch.zeros_like(blocks.kv_num_blocks), blocks.kv_indices
    counts = blocks.kv_num_blocks
    return BlockMask.from_kv_blocks(
        none, places, counts, places, BLOCK_SIZE=blocks.BLOCK_SIZE, mask_mod=blocks.mask_mod
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(as_is, marks=pytest.mark.slow),
        without_last_block,
        pytest.param(whole_blocks, marks=pytest.mark.slow),
    ],
)
def test_lists_of_blocks_are_compared_on_the_first_call(change: Callable[..., BlockMask]) -> None:
    sharding = cp.Sharding(1, {"input_ids": 1, "doc_ids": 1}, DOCUMENTS, inner="eager")
    torch._dynamo.reset()
    compiled = torch.compile(flex(change=change, block_size=4), backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard({name: BATCH[name] for name in sharding.tokens}) as local:
        if change is as_is:
            assert compiled(**local).shape == (2, 4, 12, 4)
            return
        with pytest.raises(MaskMismatch, match="proven to be 'same document & causal', but the model's own mask"):
            compiled(**local)


def test_no_block_mask_sees_everything() -> None:
    def model(**b: Tensor) -> Tensor:
        return flex_attention(*[heads(b) * 1.0] * 3)  # type: ignore[return-value]

    assert the_site(model, dynamic=False).mask == PackedMask(causal=False, packed=False)


def test_blocks_of_anything_else_are_refused() -> None:
    def by_content(blocks: BlockMask, ids: Tensor) -> BlockMask:
        counts = blocks.kv_num_blocks * extra
        return BlockMask.from_kv_blocks(
            counts, blocks.kv_indices, seq_lengths=blocks.seq_lengths, mask_mod=blocks.mask_mod
        )

    extra = torch.ones((), dtype=torch.int32)
    assert reasons(flex(change=by_content), dynamic=False) == {Reason.MASK_OPAQUE}
    outside = create_block_mask(lambda b, h, i, j: i >= j, None, None, 12, 12, device="cpu")

    def model(**b: Tensor) -> Tensor:
        return flex_attention(*[heads(b) * 1.0] * 3, block_mask=outside)  # type: ignore[return-value]

    assert reasons(model, dynamic=False) == {Reason.MASK_OPAQUE}


@pytest.mark.slow
def test_blocks_of_another_mask_function_are_refused() -> None:
    """Where a row holds one document they would say the same; in another batch whole blocks would skip the function."""

    def causal_blocks(blocks: BlockMask, ids: Tensor) -> BlockMask:
        t = ids.shape[1]
        other = create_block_mask(lambda b, h, i, j: i >= j, ids.shape[0], None, t, t, device="cpu", BLOCK_SIZE=4)
        other.mask_mod = blocks.mask_mod
        return other

    def more_than_it_says(blocks: BlockMask, ids: Tensor) -> BlockMask:
        blocks.mask_mod = lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j) & (i - j < 4)
        return blocks

    assert reasons(flex(change=causal_blocks, block_size=4), dynamic=False) == {Reason.MASK_NOT_PACKED}
    assert reasons(flex(change=more_than_it_says), dynamic=True) == {Reason.MASK_NOT_PACKED}
