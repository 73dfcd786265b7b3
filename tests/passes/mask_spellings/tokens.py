"""Masks from tokens that end or start documents, and from ids that count documents from 1."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite import PackedMask, Reason
from tests.passes.mask_spellings.base import (
    CAUSAL,
    COUNTED,
    ENDED,
    FULL,
    LOWEST,
    MARK,
    STARTED,
    Spelling,
    add_to,
    causal,
    index,
    same,
)

SPELLINGS: list[Spelling] = []
spelling = functools.partial(add_to, SPELLINGS)


# -- a token ends documents ----------------------------------------------------------------------------------


@spelling(ENDED, CAUSAL)
def ends_as_torchtitan(**b: Tensor) -> Tensor:
    ends = b["ended_ids"] == MARK
    ends[:, -1] = True
    counted = torch.cumsum(torch.where(ends, 1, 0), dim=1)
    ids = torch.zeros_like(counted, dtype=torch.int32)
    ids[:, 1:] = counted[:, :-1]
    return same(ids) & causal(b)


@spelling(ENDED, FULL)
def ends_less_themselves(**b: Tensor) -> Tensor:
    ends = (b["ended_ids"] == MARK).long()
    return same(ends.cumsum(1) - ends)


@spelling(ENDED, CAUSAL)
def ends_padded(**b: Tensor) -> Tensor:
    return same(F.pad((b["ended_ids"] == MARK).cumsum(1)[:, :-1], (1, 0))).tril()


@spelling(ENDED, CAUSAL)
def ends_behind_zeros(**b: Tensor) -> Tensor:
    ends = (b["ended_ids"] == MARK).int()
    return same(torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1).cumsum(1)) & causal(b)


@spelling(ENDED, PackedMask(window=(2, 0)))
def ends_rolled(**b: Tensor) -> Tensor:
    i = index(b)
    ids = (b["ended_ids"].roll(1, 1) == MARK).cumsum(1)
    return same(ids) & causal(b) & (i[:, None] - i[None, :] < 3)


@spelling(ENDED, Reason.MASK_NOT_PACKED)
def ends_start_documents(**b: Tensor) -> Tensor:
    """The token that ends a document would belong to the next one."""
    return same((b["ended_ids"] == MARK).cumsum(1)) & causal(b)


@spelling(ENDED, Reason.MASK_WRONG_DIM)
def ends_by_two(**b: Tensor) -> Tensor:
    return same(F.pad((b["ended_ids"] == MARK).cumsum(1)[:, :-2], (2, 0))) & causal(b)


@spelling(ENDED, Reason.MASK_NOT_PACKED)
def ends_of_another_token(**b: Tensor) -> Tensor:
    ends = (b["ended_ids"] == MARK - 1).long()
    return same(ends.cumsum(1) - ends) & causal(b)


@spelling(ENDED, Reason.MASK_NOT_PACKED)
def ends_wrapped_around(**b: Tensor) -> Tensor:
    """The row's first token gets the number of all documents."""
    return same((b["ended_ids"] == MARK).cumsum(1).roll(1, 1)) & causal(b)


@spelling(ENDED, Reason.MASK_NOT_PACKED)
def ends_read_in_front(**b: Tensor) -> Tensor:
    """Index -1 is the row's last token."""
    return same((b["ended_ids"] == MARK).cumsum(1)[:, index(b) - 1]) & causal(b)


@spelling(ENDED, Reason.MASK_NOT_PACKED)
def ends_or_later_tokens(**b: Tensor) -> Tensor:
    ends = (b["ended_ids"] >= MARK).long()
    return same(ends.cumsum(1) - ends) & causal(b)


# -- a token starts documents --------------------------------------------------------------------------------


@spelling(STARTED, CAUSAL)
def starts_counted(**b: Tensor) -> Tensor:
    return same((b["started_ids"] == MARK).cumsum(1)) & causal(b)


@spelling(STARTED, CAUSAL)
def starts_and_the_rows(**b: Tensor) -> Tensor:
    first = F.pad(b["started_ids"][:, 1:] == MARK, (1, 0), value=True)
    return same(first.int().cumsum(-1)).tril()


@spelling(STARTED, Reason.MASK_NOT_PACKED)
def starts_end_documents(**b: Tensor) -> Tensor:
    starts = (b["started_ids"] == MARK).long()
    return same(starts.cumsum(1) - starts) & causal(b)


# -- ids from 1 on, 0 is padding -----------------------------------------------------------------------------


@spelling(COUNTED, CAUSAL)
def counted_as_llama_factory(**b: Tensor) -> Tensor:
    ids = b["counted_ids"]
    t = ids.shape[1]
    rows = ids[:, None, None, :].expand(-1, 1, t, t)
    keep = torch.eq(rows, rows.transpose(-1, -2)).int() * torch.where(rows != 0, 1, 0)
    keep *= torch.tril(torch.ones((t, t), dtype=torch.long))
    return torch.where(keep != 0, torch.tensor(0.0), torch.tensor(LOWEST))


@spelling(COUNTED, FULL)
def counted_and_no_padding(**b: Tensor) -> Tensor:
    ids = b["counted_ids"]
    return same(ids) & (ids > 0)[:, None, :, None]


@spelling(COUNTED, CAUSAL)
def counted_changes(**b: Tensor) -> Tensor:
    ids = b["counted_ids"]
    return same(F.pad(ids.diff() != 0, (1, 0)).cumsum(1)).tril()


@spelling(COUNTED, Reason.MASK_NOT_PACKED)
def counted_without_the_first(**b: Tensor) -> Tensor:
    ids = b["counted_ids"]
    return same(ids) & (ids > 1)[:, None, None, :] & causal(b)


@spelling(COUNTED, Reason.MASK_NOT_PACKED)
def counted_changes_back_in_padding(**b: Tensor) -> Tensor:
    """Two tokens of padding undo a change: documents on both sides of them merge."""
    ids = b["counted_ids"]
    back = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] == 0)
    return same(F.pad((ids.diff() != 0).long() - back.long(), (1, 0)).cumsum(1)) & causal(b)
