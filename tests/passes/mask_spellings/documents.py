"""Masks from document ids."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite import PackedMask
from tests.passes.mask_spellings.base import CAUSAL, DOCUMENTS, FULL, INF, LOWEST, Spelling, add_to, causal, index, same

SPELLINGS: list[Spelling] = []
spelling = functools.partial(add_to, SPELLINGS)


@spelling(DOCUMENTS, CAUSAL)
def ids_equal_and_index(**b: Tensor) -> Tensor:
    return same(b["doc_ids"]) & causal(b)


@spelling(DOCUMENTS, CAUSAL)
def ids_and_sign_of_distance(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]).sign() & ((i[:, None] - i[None, :]).sign() >= 0)


@spelling(DOCUMENTS, FULL)
def ids_equal(**b: Tensor) -> Tensor:
    return same(b["doc_ids"])


@spelling(DOCUMENTS, CAUSAL)
def ids_equal_tril(**b: Tensor) -> Tensor:
    return same(b["doc_ids"]).tril()


@spelling(DOCUMENTS, CAUSAL)
def ids_as_doubles_plus_one(**b: Tensor) -> Tensor:
    return same(b["doc_ids"].double() * 2 + 1).tril()


@spelling(DOCUMENTS, CAUSAL)
def ids_difference_zero(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    return torch.logical_and((d[:, :, None] - d[:, None, :] == 0), causal(b))[:, None]


@spelling(DOCUMENTS, CAUSAL)
def changes_of_ids(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    starts = F.pad((d[:, 1:] != d[:, :-1]).long(), (1, 0))
    return same(starts.cumsum(1)) & causal(b)


@spelling(DOCUMENTS, CAUSAL)
def ids_equal_and_not_padding(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    return same(d) & (d[:, None, None, :] >= 0) & causal(b)


@spelling(DOCUMENTS, PackedMask(window=(3, 0)))
def ids_causal_window(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]) & causal(b) & (i[:, None] - i[None, :] < 4)


@spelling(DOCUMENTS, PackedMask(causal=False, window=(2, 2)))
def ids_symmetric_window(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]) & ((i[:, None] - i[None, :]).abs() <= 2)


@spelling(DOCUMENTS, PackedMask(causal=False, window=(3, 1)))
def ids_triu_tril_band(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    band = torch.ones(t, t, dtype=torch.bool).tril(1).triu(-3)
    return same(b["doc_ids"]) & band


@spelling(DOCUMENTS, PackedMask(causal=False, window=(0, None)))
def ids_only_later_keys(**b: Tensor) -> Tensor:
    """Causal with query and key swapped: it is another mask, and is read as that."""
    i = index(b)
    return same(b["doc_ids"]) & (i[:, None] <= i[None, :])


@spelling(DOCUMENTS, CAUSAL)
def ids_masked_fill(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    keep = same(b["doc_ids"]) & causal(b)
    return torch.zeros(t, t).masked_fill(~keep, -INF)


@spelling(DOCUMENTS, CAUSAL)
def ids_masked_fill_in_place(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    keep = same(b["doc_ids"]) & causal(b)
    mask = torch.zeros(keep.shape[0], 1, t, t)
    mask.masked_fill_(keep.logical_not(), LOWEST)
    return mask


@spelling(DOCUMENTS, CAUSAL)
def ids_zero_where_seen(**b: Tensor) -> Tensor:
    """As those who pack with LLaMA-Factory write it in place."""
    t = b["input_ids"].shape[1]
    keep = same(b["doc_ids"])[:, 0] & causal(b)
    mask = torch.full((keep.shape[0], 1, t, t), LOWEST)
    mask[:, 0][keep] = 0
    return mask


@spelling(DOCUMENTS, CAUSAL)
def ids_true_where_seen(**b: Tensor) -> Tensor:
    keep = same(b["doc_ids"]) & causal(b)
    mask = torch.zeros_like(keep)
    mask[keep] = True
    return mask


@spelling(DOCUMENTS, CAUSAL)
def ids_where(**b: Tensor) -> Tensor:
    return torch.where(same(b["doc_ids"]) & causal(b), 0.0, LOWEST)


@spelling(DOCUMENTS, CAUSAL)
def ids_one_minus(**b: Tensor) -> Tensor:
    return (1.0 - (same(b["doc_ids"]) & causal(b)).float()) * LOWEST


@spelling(DOCUMENTS, CAUSAL)
def ids_sum_of_additive(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    future = torch.full((t, t), -INF).triu(1)
    return future + torch.where(same(b["doc_ids"]), 0.0, LOWEST)


@spelling(DOCUMENTS, CAUSAL)
def ids_product_of_floats(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    keep = same(b["doc_ids"]).float() * torch.tril(torch.ones(t, t))
    return keep.log()


@spelling(DOCUMENTS, CAUSAL)
def ids_not_or(**b: Tensor) -> Tensor:
    d, i = b["doc_ids"], index(b)
    return ~((d[:, None, :, None] != d[:, None, None, :]) | (i[None, :] > i[:, None]))


@spelling(DOCUMENTS, CAUSAL)
def ids_multiplied(**b: Tensor) -> Tensor:
    return (same(b["doc_ids"]).int() * causal(b).int()).bool()


@spelling(DOCUMENTS, CAUSAL)
def ids_vmapped(**b: Tensor) -> Tensor:
    d, i = b["doc_ids"], index(b)
    rows = torch.arange(d.shape[0])

    def keep(row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (d[row, q] == d[row, k]) & (k <= q)

    over_keys = torch.vmap(keep, in_dims=(None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, 0, None))
    return torch.vmap(over_queries, in_dims=(0, None, None))(rows, i, i)[:, None]


@spelling(DOCUMENTS, CAUSAL)
def ids_and_in_place(**b: Tensor) -> Tensor:
    keep = same(b["doc_ids"]).clone()
    keep &= causal(b)
    return keep


@spelling(DOCUMENTS, CAUSAL)
def ids_times_what_is_no_padding(**b: Tensor) -> Tensor:
    """Zero is padding here: ids count from one."""
    t = b["input_ids"].shape[1]
    ids = (b["doc_ids"] + 1)[:, None, None, :].expand(-1, 1, t, t)
    keep = (ids == ids.mT).int() * torch.where(ids != 0, 1, 0)
    keep *= torch.ones(t, t, dtype=torch.long).tril()
    return torch.where(keep != 0, torch.tensor(0.0), torch.tensor(LOWEST))
