"""What the locality check knows of a tensor: where its tokens are, as a value.

Every claim compares a rank's tensor `x_l` with the tensor `x` of the one-process program:

    REPLICATED     x_l == x
    Rows(dims)     x_l holds, along the token dim, this rank's tokens of x; along the batch dim all batch rows
    Partial()      the sum of x_l over the ranks is x
    WHOLE          x_l == x, and the gradient that comes to x_l is x's; of REPLICATED it is a part of x's on each rank
    Moved(pieces)  what x is made of is known; x_l is not used
    UNKNOWN        a refusal stands before it; nothing more is said about it
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch.fx as fx

from cp_rewrite.planning.token_reads.row_map import RowMap

from .dims import Dims, Factor, Order, T, has


@dataclass(frozen=True)
class AtMost:
    """A whole number up to this one, no more is known: the id of a token of no document."""

    bound: int


Number = float | int | bool | AtMost


@dataclass(frozen=True)
class Rows:
    """A tensor with one token dim.

    Two kinds of rows are no tokens of documents: those that fill a rank up (`fill`), which are no tokens of the batch
    either, and tokens of the batch that its packing leaves out (`padding`, `attended`).

    Args:
        dims: the axes in each dim. T stands in exactly one.
        fill: the value in every row that fills a rank up, when it is known; None when not.
        iota: the node that made it, when the tensor is still `arange` over its token dim.
        table: the node that took them, when the tensor is still the first T rows of a table.
        shard_rows: the values are indices of the shard's rows of these axes; they mean nothing as numbers.
        key: the tensor holds the very values that its rows are sorted by.
        padding: the value in every row of a token of no document, when it is known; None when not.
        attended: rows of tokens of no document hold something else than in the one-process program, since attention
            leaves such tokens out, whatever the model's mask says of them.
    """

    dims: Dims
    fill: Number | None = None
    iota: fx.Node | None = None
    shard_rows: tuple[Factor, ...] | None = None
    key: bool = False
    padding: Number | None = None
    attended: bool = False
    table: fx.Node | None = None

    @property
    def token_dim(self) -> int:
        return next(i for i, dim in enumerate(self.dims) if has(dim, T))


@dataclass(frozen=True)
class Partial:
    """A per-rank part of a sum over tokens. `reduced`: of WHOLE, which is summed over the ranks already."""

    reduced: bool = False


WHOLE = Partial(reduced=True)
"""The same on all ranks, and so is its gradient. Where no gradient reaches it, it is REPLICATED."""


@dataclass(frozen=True)
class Deferred:
    """The result of an op that is not the same on a shard, harmless until something but an assertion reads it."""

    detail: str


@dataclass(frozen=True)
class GroupSizes:
    """How many of the shard's rows have each key of an order; `ends`: their running sum."""

    order: Order
    ends: bool = False


@dataclass(frozen=True)
class Taps:
    """A convolution over tokens: entry i of its result is made of the entries i … i + span - 1 of its padded operand,
    which are `entries` of the source."""

    node: fx.Node
    entries: RowMap
    span: int


@dataclass(frozen=True)
class Moved:
    """Entries of the whole row's token dim in other places, as of a shift: no rank has them until something reads them.

        x[:, :-1]                              [0, T - 1) of x
        cat([zero, x[:, :-1]], 1)              1 entry of zero, [0, T - 1) of x

    Args:
        source: a tensor with `rows`.
        entries: of the token dim, of the source's; of a node that is the same on all ranks; or of a number.
        taps: the entries are of this convolution of the source.
    """

    source: fx.Node
    rows: Rows
    entries: RowMap
    taps: Taps | None = None


class Known(Enum):
    REPLICATED = "replicated"
    UNKNOWN = "unknown"


REPLICATED, UNKNOWN = Known.REPLICATED, Known.UNKNOWN
TensorState = Rows | Partial | Deferred | GroupSizes | Moved | Known


def plain(state: Rows) -> Rows:
    """The same rows with nothing known about their values."""
    return Rows(state.dims)
