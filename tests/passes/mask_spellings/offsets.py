"""Masks from cu_seqlens."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cp_rewrite import PackedMask
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
