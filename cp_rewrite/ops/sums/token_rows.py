"""Which of a rank's rows hold given tokens of the batch.

Shapes: B rows of T tokens in the batch, T_l local rows on this rank.

    rank 0 has tokens 0 1 5, rank 1 has 2 3 4      T = 6
    token_rows on rank 1                           -1 -1 0 1 2 -1
    local_rows of tokens 3, 5                      1, -1
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("cp_rewrite::local_rows", mutates_args=())
def local_rows(
    token_rows_TB: Tensor, token: Tensor, row: Tensor | None, in_document_TB: Tensor | None, size: int
) -> Tensor:
    """The local rows of tokens, -1 of those that other ranks have.

    Args:
        token_rows_TB: int64, of the plan.
        token: places in the global row, int64; a negative one counts from its end.
        row: rows of the batch, int64, that broadcast with `token`. None: `token` counts through all rows of the batch,
            and so does the result, by `size` local rows for each.
        in_document_TB: bool, of the plan; with it, a token of no document is an error.
    Raises:
        IndexError: there is no such token. On a GPU, an assertion there.
        ValueError: it belongs to no document. On a GPU, an assertion there.
    """
    place, of = _by_row(token, *token_rows_TB.shape) if row is None else (token, row)
    found = token_rows_TB[place, of]
    if row is None:
        found = torch.where(found < 0, found, found + of * size)
    if in_document_TB is not None:
        _check_documents(in_document_TB[place, of], place)
    return found


def _by_row(token: Tensor, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
    """(place in its row, row of the batch) of numbers that count through all rows."""
    outside = (token < -tokens * rows) | (token >= tokens * rows)
    if not token.is_cuda and outside.any():
        raise IndexError(f"index {int(token[outside][0])} is out of bounds for {rows} rows of {tokens} tokens")
    token = torch.where(token < 0, token + tokens * rows, token)
    return token % tokens, token // tokens


def _check_documents(inside: Tensor, token: Tensor) -> None:
    if inside.is_cuda:
        torch._assert_async(inside.all(), f"the model {_PADDING}")
    elif not inside.all():
        place = int(token.expand_as(inside)[~inside][0])
        raise ValueError(f"the model reads what attention gave to token {place} of a row, and {_PADDING}")


_PADDING = (
    "picks a token of no document: it is padding, which attends to nothing here, whatever the model's mask says. Pick "
    "a token of a document, or give padding a document of its own"
)


@local_rows.register_fake
def _(token_rows_TB: Tensor, token: Tensor, row: Tensor | None, in_document_TB: Tensor | None, size: int) -> Tensor:
    shape = token.shape if row is None else torch.broadcast_shapes(token.shape, row.shape)
    return token.new_empty(shape, dtype=torch.int64)
