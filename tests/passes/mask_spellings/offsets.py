"""Masks from cu_seqlens."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cp_rewrite import PackedMask, Reason
from tests.passes.mask_spellings.base import CAUSAL, FULL, OFFSETS, Spelling, add_to, causal, equal_1d, index

SPELLINGS: list[Spelling] = []
spelling = functools.partial(add_to, SPELLINGS)


@spelling(OFFSETS, CAUSAL)
def offsets_searchsorted(**b: Tensor) -> Tensor:
    ids = torch.searchsorted(b["cu_seqlens"], index(b), right=True) - 1
    return equal_1d(ids) & causal(b)


@spelling(OFFSETS, FULL)
def offsets_bucketize_full(**b: Tensor) -> Tensor:
    return equal_1d(torch.bucketize(index(b), b["cu_seqlens"], right=True))


@spelling(OFFSETS, CAUSAL)
def offsets_bucketize_starts(**b: Tensor) -> Tensor:
    return equal_1d(torch.bucketize(index(b), b["cu_seqlens"][1:], right=True)).tril()


@spelling(OFFSETS, CAUSAL)
def offsets_count(**b: Tensor) -> Tensor:
    ids = (b["cu_seqlens"][None, :] <= index(b)[:, None]).sum(-1)
    return equal_1d(ids).tril()


@spelling(OFFSETS, CAUSAL)
def offsets_count_inner(**b: Tensor) -> Tensor:
    ids = (index(b)[None, :] >= b["cu_seqlens"][1:-1, None]).sum(0)
    return equal_1d(ids).tril()


@spelling(OFFSETS, CAUSAL)
def offsets_left_of_next(**b: Tensor) -> Tensor:
    ids = torch.searchsorted(b["cu_seqlens"], index(b) + 1)
    return equal_1d(ids).tril()


@spelling(OFFSETS, CAUSAL)
def offsets_repeat_interleave(**b: Tensor) -> Tensor:
    cu = b["cu_seqlens"]
    ids = torch.repeat_interleave(torch.arange(cu.numel() - 1), cu.diff(), output_size=b["input_ids"].shape[1])
    return equal_1d(ids) & causal(b)


@spelling(OFFSETS, CAUSAL)
def offsets_start_table(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    ids = torch.searchsorted(cu, i, right=True) - 1
    local = i - cu[ids]
    return equal_1d(ids) & (local[:, None] >= local[None, :])


@spelling(OFFSETS, PackedMask(window=(5, 0)))
def offsets_marks(**b: Tensor) -> Tensor:
    i = index(b)
    marks = torch.zeros_like(i)
    marks[b["cu_seqlens"][1:-1]] = 1
    d = i[:, None] - i[None, :]
    return equal_1d(marks.cumsum(0)) & (d >= 0) & (d < 6)


def member(b: dict[str, Tensor]) -> Tensor:
    """(N, T): which document holds which token."""
    cu, i = b["cu_seqlens"], index(b)
    return (i >= cu[:-1, None]) & (i < cu[1:, None])


@spelling(OFFSETS, CAUSAL)
def offsets_bound_on_keys(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    start = cu[torch.searchsorted(cu, i, right=True) - 1]
    return (i[None, :] >= start[:, None]) & causal(b)


@spelling(OFFSETS, FULL)
def offsets_bounds_on_both_sides(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    ids = torch.bucketize(i, cu, right=True) - 1
    return (i[None, :] >= cu[ids][:, None]) & (i[None, :] < cu[ids + 1][:, None])


@spelling(OFFSETS, PackedMask(causal=False, window=(0, None)))
def offsets_bound_by_repeated_ends(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    ids = torch.repeat_interleave(torch.arange(cu.numel() - 1), cu.diff(), output_size=i.numel())
    return (i[None, :] < cu[ids + 1][:, None]) & (i[None, :] >= i[:, None])


@spelling(OFFSETS, FULL)
def offsets_starts_equal(**b: Tensor) -> Tensor:
    cu = b["cu_seqlens"]
    return equal_1d(cu[torch.bucketize(index(b), cu, right=True) - 1])


@spelling(OFFSETS, CAUSAL)
def offsets_starts_equal_and_causal(**b: Tensor) -> Tensor:
    cu = b["cu_seqlens"]
    return equal_1d(cu[torch.bucketize(index(b), cu[:-1], right=True) - 1]).tril()


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_starts_equal_in_the_tail(**b: Tensor) -> Tensor:
    """Padding at the row's end has the start of the last document."""
    cu = b["cu_seqlens"]
    return equal_1d(cu[torch.bucketize(index(b), cu[:-1], right=True) - 1])


@spelling(OFFSETS, CAUSAL)
def offsets_members(**b: Tensor) -> Tensor:
    held = member(b)
    return (held[:, :, None] & held[:, None, :]).any(0) & causal(b)


@spelling(OFFSETS, FULL)
def offsets_members_counted(**b: Tensor) -> Tensor:
    held = member(b)
    return (held[:, :, None] & held[:, None, :]).sum(0) > 0


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_bound_of_the_next(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    start = cu[torch.searchsorted(cu, i, right=True)]
    return (i[None, :] >= start[:, None]) & causal(b)


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_bound_one_too_few(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    start = cu[torch.searchsorted(cu, i, right=True) - 1]
    return (i[None, :] > start[:, None]) & causal(b)


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_bound_one_too_many(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    ids = torch.bucketize(i, cu, right=True) - 1
    return (i[None, :] >= cu[ids][:, None]) & (i[None, :] <= cu[ids + 1][:, None])


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_bound_of_the_first_documents(**b: Tensor) -> Tensor:
    """Later ones are one document."""
    cu, i = b["cu_seqlens"], index(b)
    start = cu[torch.searchsorted(cu[:-2], i, right=True) - 1]
    return (i[None, :] >= start[:, None]) & causal(b)


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_members_of_the_next(**b: Tensor) -> Tensor:
    held = member(b)
    return (held[1:, :, None] & held[:-1, None, :]).any(0) & causal(b)


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_members_of_all_but_one(**b: Tensor) -> Tensor:
    held = member(b)[1:]
    return (held[:, :, None] & held[:, None, :]).any(0) & causal(b)


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_members_with_the_end(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    held = (i >= cu[:-1, None]) & (i <= cu[1:, None])
    return (held[:, :, None] & held[:, None, :]).any(0) & causal(b)
