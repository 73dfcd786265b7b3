"""Rows without a token, which fill up a rank: what a model reads there, and tokens taken by their places."""

from __future__ import annotations

import torch
from torch import Tensor


def take_tokens(x: Tensor, dim: int, index_BT: Tensor) -> Tensor:
    """x with the entries `index_BT` of `dim`, for each row of the batch its own.

    Args:
        x: tokens at `dim`; the rows of the batch, where there are several, at `dim - 1`.
        index_BT: (B, N) int64.
    Returns:
        x with N entries at `dim`.
    """
    if len(index_BT) == 1:
        return x.index_select(dim, index_BT[0])
    sizes = [*x.shape[:dim], index_BT.shape[1], *x.shape[dim + 1 :]]
    return x.gather(dim, beside(index_BT, x, dim).expand(sizes))


def beside(x_BT: Tensor, like: Tensor, dim: int) -> Tensor:
    """A value per token, as it stands beside those of `like`, whose tokens are at `dim`, by broadcasting."""
    shape = [1] * like.ndim
    shape[dim] = x_BT.shape[1]
    if len(x_BT) > 1:
        shape[dim - 1] = len(x_BT)
    return x_BT.view(shape)


def with_valid_fill(x: Tensor, dim: int, has_token_BT: Tensor, source_BT: Tensor, spare: Tensor | None) -> Tensor:
    """A tensor of a rank's tokens with copies of its own rows in those that hold no token, and with its strides.

        x            a b c 0 0
        has_token    1 1 1 0 0
        source       0 1 2 1 1
        result       a b c b b

    What a model computes of fill is then as valid as of tokens, whatever has made the tensor. No gradient goes there.

    Args:
        x: T_l rows at `dim`; the rows of the batch, where there are several, at `dim - 1`.
        has_token_BT: (B, T_l) bool. source_BT: (B, T_l) int64, the row that each is a copy of; T_l: `spare`.
        spare: one row, for those of which this rank has nothing to copy; None: they stay as they are.
    """
    several = len(source_BT) > 1
    alike = [d for d in range(x.ndim) if x.stride(d) == 0 and d != dim and not (several and d == dim - 1)]
    one = x
    for d in alike:  # expanded: one number for many places, as the compiled graph was promised
        one = one.narrow(d, 0, 1)
    rows = one.detach()
    if spare is None:
        own = torch.arange(source_BT.shape[1], device=source_BT.device)
        rows = take_tokens(rows, dim, torch.where(source_BT < len(own), source_BT, own))
    else:
        rows = take_tokens(torch.cat([rows, spare], dim), dim, source_BT)
    found = torch.where(beside(has_token_BT, one, dim), one, rows)
    if found.stride() != one.stride():
        found = torch.empty_strided(one.shape, one.stride(), dtype=x.dtype, device=x.device).copy_(found)
    return found.expand(x.shape)
