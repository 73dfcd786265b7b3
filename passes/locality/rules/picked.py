"""Entries that are read by their place in the whole row: of tables whose rows tokens name by number (`embedding` to
`LookedUp`), and of the token dim at places that all ranks know, as `x[:, -1]` or `x[0, cu_seqlens[1:] - 1]`.

Of tables a model takes the first T rows, and looks them up by numbers that tokens have, as positions are:

    cos = self.cos[:T]; cos[position_ids]       a shard takes fewer rows than the numbers of its tokens ask for: all of
                                                the table stays there. -1 is row T - 1

Of tokens a rank gives the rows that it has and 0 for others; the sum over ranks is whole. Its gradient is whole on
every rank, and goes to the rows that were given.

    tokens of rank 0, rank 1     0 1 5, 2 3 4
    x[[5, 2]]                    rank 0: x5 0      rank 1: 0 x2      sum: x5 x2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import REPLICATED, WHOLE, B, Dims, Mixes, Rows, T, checked, fewer, has, of_row
from cp_rewrite.passes.values.edits import Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import IN_DOCUMENT, TOKEN_ROWS, PlanInput

from .rule import States, rows_along


def embedding(call: Call) -> tuple[States, RunOverRanks]:
    table, index = call.arg("weight"), call.arg("indices")
    rows = call.rows(index)
    if rows is None or call.arg("scale_grad_by_freq") or call.arg("padding_idx") not in (None, -1):
        raise Mixes("embedding of something else than tokens")
    _look_up(call, table, [index], 0)
    return Rows((*rows.dims, None)), LookedUp("indices")


def select_of_table(call: Call) -> tuple[States, RunOverRanks]:
    table, index = call.first, call.arg("index")
    dim = call.arg("dim") % table.ndim
    rows = call.rows(index)
    if not _is_table(call, table) or rows is None:
        raise Mixes("looks up something else than the first rows of a table")
    _look_up(call, table, [index], dim)
    dims: Dims = tuple(rows.dims[0] if i == dim else None for i in range(table.ndim))
    return Rows(checked(dims)), LookedUp("index")


def index_of_table(call: Call) -> tuple[States, RunOverRanks]:
    """table[numbers]: of the first dim alone."""
    table: Tensor = call.first
    given: list[Tensor | None] = list(call.arg("indices"))
    numbers = given[0]
    rows = (
        None if numbers is None or len(given) > 1 or numbers.dtype in (torch.bool, torch.uint8) else call.rows(numbers)
    )
    if not _is_table(call, table) or numbers is None or rows is None:
        raise Mixes("looks up something else than the first rows of a table")
    _look_up(call, table, [numbers], 0)
    return Rows((*rows.dims, *[None] * (table.ndim - 1))), LookedUp("indices")


def _is_table(call: Call, table: Tensor) -> bool:
    rows = call.rows(table)
    return rows is not None and rows.table is not None


def _look_up(call: Call, table: Tensor, indices: Sequence[Tensor], dim: int) -> None:
    rows = call.rows(table)
    if rows is None or rows.table is None or not has(rows.dims[dim], T):
        raise Mixes("looks up something else than the first rows of a table")
    if any(call.rows(i) is None and call.state(i) is not REPLICATED for i in indices):
        raise Mixes("looks up a table by sums")
    call.use_positions(*indices)
    call.events.looked_up.append(rows.table)


@dataclass(frozen=True)
class LookedUp:
    """The op itself; numbers below 0 count from the row's end. index: the argument that has them."""

    index: str
    why: ClassVar[str] = "of a table that stays whole"

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        given = args[self.index]
        numbers: Tensor = given[0] if isinstance(given, list | tuple) else given
        numbers = torch.where(numbers < 0, numbers + ranks.row_tokens, numbers) if self.index != "index" else numbers
        return func(**{**args, self.index: [numbers] if isinstance(given, list | tuple) else numbers})


def select(call: Call) -> tuple[States, RunOverRanks]:
    """x[:, 3], x[:, -1], x[:, x.shape[1] // 2]; table[x.shape[1]], of what all ranks have."""
    if call.state(call.first) is REPLICATED and not call.written:
        place = call.extents.counted(call.arg("index"))
        return REPLICATED, EntryOfAll(Places(place, 1, 1, call.extents.tokens))
    rows, dim = _rows_at(call, call.arg("dim"), some=True)
    place = call.extents.counted(call.arg("index"))
    return WHOLE, Picked(rows.dims, rows.attended, dim, Places(place, 1, 1, call.extents.tokens))


def slice_(call: Call) -> tuple[States, RunOverRanks]:
    """x[:, :1], x[:, -4:]: as many entries as there are for any number of tokens."""
    rows, dim = _rows_at(call, call.arg("dim"), some=True)
    first, end, tokens = call.extents.counted(call.arg("start") or 0), call.arg("end"), call.sizes(call.first)[dim]
    last = end is None or (isinstance(end, int) and end >= torch.iinfo(torch.int64).max)
    end = tokens if last else call.extents.counted(end)
    first, end = (n + tokens if isinstance(n, int) and n < 0 else n for n in (first, end))
    count, step = call.sizes(call.outs[0])[dim], call.arg("step") or 1
    if count == 0:  # it begins behind the row's end
        end = first
    if not isinstance(count, int) or count != -((first - end) // step):
        raise Mixes("slice of as many tokens as the shard happens to have")
    return WHOLE, Picked(rows.dims, rows.attended, dim, Places(first, count, step, call.extents.tokens))


def index_select(call: Call) -> tuple[States, RunOverRanks]:
    """Entries of one dim by an index that all ranks have."""
    rows, dim = _rows_at(call, call.arg("dim"))
    _check_known(call, [call.arg("index")])
    return WHOLE, Picked(rows.dims, rows.attended, dim)


def gather(call: Call) -> tuple[States, RunOverRanks]:
    """For each entry of the index, which all ranks have, one of the token dim."""
    rows, dim = _rows_at(call, call.arg("dim"))
    _check_known(call, [call.arg("index")])
    return WHOLE, Gathered(rows.dims, rows.attended, dim)


def index(call: Call) -> tuple[States, RunOverRanks]:
    """x[:, idx], and x[rows, idx] with the row of the batch for each token; x[rows, idx, features] in addition."""
    given: list[Tensor | None] = list(call.arg("indices"))
    used = [dim for dim, i in enumerate(given) if i is not None]
    rows, dim = _rows_at(call, call.rows(call.first).token_dim if call.rows(call.first) else 0)  # type: ignore[union-attr]
    if dim not in used or (
        used != [dim] and any(rows.dims[i] == (B,) and i not in used for i in range(len(rows.dims)))
    ):
        raise Mixes("index of other dims than those of the tokens")
    _check_known(call, [given[i] for i in used])
    return WHOLE, Indexed(rows.dims, rows.attended, dim)


def _rows_at(call: Call, dim: int, some: bool = False) -> tuple[Rows, int]:
    """The rows that an op picks from, and the dim, where that is the tokens' own. some: as of `rows_along`."""
    rows, dim = rows_along(call, dim, some)
    call.use_positions(call.first)
    return rows, dim


def _check_known(call: Call, indices: Sequence[Tensor | None]) -> None:
    """Places must be the same on all ranks, and whole numbers."""
    for i in indices:
        if i is None or call.state(i) is not REPLICATED:
            raise Mixes(f"{call.name} by places that differ from rank to rank")
        if i.dtype in (torch.bool, torch.uint8):
            raise Mixes("picks tokens by a mask, as many as there happen to be")


@dataclass(frozen=True)
class Places:
    """`count` places from `first` on, each by `step`. first: a number, or an expression in the symbol `tokens`; below 0
    it counts from the end."""

    first: Any
    count: int
    step: int
    tokens: Any

    def of(self, row_tokens: Tensor, length: Tensor) -> Tensor:
        """(count,) int64, of a row of (1,) tokens and a dim of (1,) `length`."""
        first = of_row(self.first, self.tokens, row_tokens)
        places = torch.arange(self.count, device=row_tokens.device) * self.step + first
        return torch.where(places < 0, places + length, places)


@dataclass(frozen=True)
class EntryOfAll:
    """One entry of a dim of what all ranks have, at a place that depends on the token count."""

    places: Places

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x, dim = args["self"], args["dim"]
        length = torch.full_like(ranks.row_tokens, x.shape[dim])
        return x.index_select(dim, self.places.of(ranks.row_tokens, length)).squeeze(dim)


@dataclass(frozen=True)
class Picked:
    """Entries of one dim, at the op's index, or at `places`.

    Args:
        dims: of the tensor that tokens are picked from. attended: tokens of no document may not be picked.
        dim: of its tokens. places: where the op's arguments say which.
    """

    dims: Dims
    attended: bool
    dim: int
    places: Places | None = None
    why: ClassVar[str] = "of tokens, from the ranks that have them"

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return (TOKEN_ROWS, IN_DOCUMENT) if self.attended else (TOKEN_ROWS,)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x: Tensor = args["self"]
        if self.places is None:
            return self.along(ranks, x, args["index"].reshape(-1))
        length = ranks.row_tokens * ranks.has_token.shape[0] if self.is_flat else ranks.row_tokens
        found = self.along(ranks, x, self.places.of(ranks.row_tokens, length - fewer(self.dims)))
        return found.squeeze(self.dim) if "index" in args else found

    @property
    def is_flat(self) -> bool:
        return self.dims[self.dim] == (B, T)

    def along(self, ranks: Ranks, x: Tensor, index_N: Tensor) -> Tensor:
        """Entries of the token dim; the same of all rows of the batch."""
        sizes: list[Any] = [*x.shape[: self.dim], index_N.shape[0], *x.shape[self.dim + 1 :]]
        index = index_N.view(-1, *[1] * (x.ndim - 1 - self.dim))
        return self.gathered(ranks, x, index, sizes)

    def gathered(self, ranks: Ranks, x: Tensor, index: Tensor, sizes: Sequence[Any]) -> Tensor:
        """As torch.gather, by an index that broadcasts to `sizes`."""
        local = self.local(ranks, index, self.rows_of(index, sizes)).expand(sizes)
        return self.add_up(ranks, torch.gather(x, self.dim, local.clamp(min=0)), local)

    def rows_of(self, index: Tensor, sizes: Sequence[Any]) -> Tensor | None:
        """The row of the batch of each entry of an index; None: the index counts through all of them."""
        if self.is_flat:
            return None
        if (B,) not in self.dims:
            return index.new_zeros((), dtype=torch.int64)
        place = self.dims.index((B,))
        rows = torch.arange(sizes[place], device=index.device)
        return rows.view(-1, *[1] * (len(sizes) - 1 - place))

    def local(self, ranks: Ranks, token: Tensor, row: Tensor | None) -> Tensor:
        return ranks.local_rows(token.to(torch.int64), row, self.attended)

    def add_up(self, ranks: Ranks, x: Tensor, local: Tensor) -> Tensor:
        """The rows that this rank has, where `local` is not negative, added up over ranks."""
        number = torch.uint8 if x.dtype is torch.bool else x.dtype
        kept = torch.where(local >= 0, x.to(number), x.new_zeros((), dtype=number))
        return ranks.sum(kept).to(x.dtype)


@dataclass(frozen=True)
class Gathered(Picked):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        return self.gathered(ranks, args["self"], args["index"], args["index"].shape)


@dataclass(frozen=True)
class Indexed(Picked):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x: Tensor = args["self"]
        given: list[Tensor | None] = list(args["indices"])
        used = [dim for dim, i in enumerate(given) if i is not None]
        token = given[self.dim]
        assert token is not None
        row = self.dims.index((B,)) if (B,) in self.dims else None
        if used == [self.dim]:
            return self.along(ranks, x, token.reshape(-1)).unflatten(self.dim, token.shape)
        if row is None:
            at = None if self.is_flat else token.new_zeros((), dtype=torch.int64)
        else:
            at = given[row]
            assert at is not None, "its rule asks for the rows of the batch"
            at = at.to(torch.int64)
        local = self.local(ranks, token, at)
        given[self.dim] = local.clamp(min=0)
        out = func(x, given)
        # The indices' dims stand where the first indexed dim was; in front, where indexed dims are not side by side.
        beside = used == list(range(used[0], used[-1] + 1))
        kept = x.ndim - len(used)
        behind = kept - used[0] if beside else kept
        return self.add_up(ranks, out, local.view(*local.shape, *[1] * behind))
