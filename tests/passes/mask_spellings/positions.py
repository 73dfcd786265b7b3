"""Masks from position ids, and of whole rows."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite import PackedMask, Reason
from tests.passes.mask_spellings.base import CAUSAL, FULL, POSITIONS, Spelling, add_to, causal, index, same

SPELLINGS: list[Spelling] = []
spelling = functools.partial(add_to, SPELLINGS)


@spelling(POSITIONS, CAUSAL)
def positions_as_transformers(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    ids = (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return same(ids) & (p[:, None, None, :] <= p[:, None, :, None])


@spelling(POSITIONS, CAUSAL)
def positions_zero(**b: Tensor) -> Tensor:
    return same((b["position_ids"] == 0).cumsum(1)) & causal(b)


@spelling(POSITIONS, CAUSAL)
def positions_fall(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    ids = F.pad(p[:, 1:] <= p[:, :-1], (1, 0)).int().cumsum(-1)
    return same(ids).tril()


@spelling(POSITIONS, CAUSAL)
def positions_roll(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    return same((p != p.roll(1, 1) + 1).cumsum(-1)).tril()


@spelling(POSITIONS, CAUSAL)
def positions_start_index(**b: Tensor) -> Tensor:
    start = index(b) - b["position_ids"]
    return same(start) & causal(b)


@spelling(POSITIONS, CAUSAL)
def positions_ordered_documents(**b: Tensor) -> Tensor:
    """Causal, and no key of an earlier document: so the same document."""
    ids = (b["position_ids"] == 0).cumsum(1)
    return (ids[:, None, :, None] <= ids[:, None, None, :]) & causal(b)


@spelling(POSITIONS, PackedMask(window=(2, 0)))
def positions_window(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    q, k = p[:, None, :, None], p[:, None, None, :]
    return same((p == 0).cumsum(1)) & (k <= q) & (k > q - 3)


@spelling(POSITIONS, CAUSAL)
def positions_no_farther_than_the_start(**b: Tensor) -> Tensor:
    i = index(b)
    return (i[:, None] - i[None, :] <= b["position_ids"][:, None, :, None]) & causal(b)


@spelling(POSITIONS, CAUSAL)
def positions_latest_start(**b: Tensor) -> Tensor:
    i = index(b)
    start = torch.where(b["position_ids"] == 0, i, 0).cummax(-1).values
    return (i[None, :] >= start[:, None, :, None]) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def starts_of_the_row_against_starts_of_documents(**b: Tensor) -> Tensor:
    """The same, unless the row begins inside of a document."""
    i, positions = index(b), b["position_ids"]
    start = torch.where(positions == 0, i, 0).cummax(-1).values
    return (start[:, None, :, None] == (i - positions)[:, None, None, :]) & causal(b)


@spelling(POSITIONS, FULL)
def positions_same_latest_start(**b: Tensor) -> Tensor:
    return same(((b["position_ids"] == 0) * index(b)).cummax(1).values)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def positions_one_before_the_start(**b: Tensor) -> Tensor:
    i = index(b)
    return (i[:, None] - i[None, :] <= b["position_ids"][:, None, :, None] + 1) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def positions_of_the_key(**b: Tensor) -> Tensor:
    i = index(b)
    return (i[:, None] - i[None, :] <= b["position_ids"][:, None, None, :]) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def positions_latest_second_token(**b: Tensor) -> Tensor:
    i = index(b)
    start = torch.where(b["position_ids"] == 1, i, 0).cummax(-1).values
    return (i[None, :] >= start[:, None, :, None]) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def positions_latest_start_but_its_own(**b: Tensor) -> Tensor:
    i = index(b)
    start = torch.where(b["position_ids"] == 0, i + 1, 0).cummax(-1).values
    return (i[None, :] >= start[:, None, :, None]) & causal(b)


@spelling(POSITIONS, PackedMask(packed=False))
def whole_row_causal(**b: Tensor) -> Tensor:
    return causal(b)


@spelling(POSITIONS, PackedMask(packed=False, window=(4, 0)))
def whole_row_window(**b: Tensor) -> Tensor:
    i = index(b)
    return causal(b) & (i[:, None] - i[None, :] <= 4)


@spelling(POSITIONS, PackedMask(window=(255, 0)))
def positions_window_in_bfloat16(**b: Tensor) -> Tensor:
    """257 is 256 in bfloat16."""
    i, width = index(b), torch.full((1,), 257, dtype=torch.bfloat16)
    return same((b["position_ids"] == 0).cumsum(1)) & causal(b) & (i[:, None] - i[None, :] < width)


@spelling(POSITIONS, PackedMask(window=(2, 0)))
def positions_window_a_little_wider(**b: Tensor) -> Tensor:
    """Integers and floats are compared in float32, where this is 3."""
    i = index(b)
    return same((b["position_ids"] == 0).cumsum(1)) & causal(b) & (i[:, None] - i[None, :] < 3.00000001)
