"""Inputs that graphs read from a batch's plan: its tensors by name, and what is read of other tokens.

    TokenCount                   whole numbers made from the token count of a row
    Piece, RowMap                which row each entry of a token dim is, piece by piece
    PlanTensor, …                tensors of a plan
    Neighbours, Scan, States     what is read of other tokens, and the tensors that it takes
    PlanInput                    one input of a graph

Specs alone: who makes the tensors is `routes/`, `reads.py` and `states.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cp_rewrite.masks import PackedMask

from .intervals import Int


@dataclass(frozen=True)
class TokenCount:
    """A length or a place, plus + times T, in a row of T tokens: T - 1 is TokenCount(-1, 1), 3 is TokenCount(3)."""

    plus: int = 0
    times: int = 0

    def __add__(self, other: TokenCount) -> TokenCount:
        return TokenCount(self.plus + other.plus, self.times + other.times)

    def __sub__(self, other: TokenCount) -> TokenCount:
        return TokenCount(self.plus - other.plus, self.times - other.times)

    def order(self) -> tuple[int, int]:
        """By which counts stand in the order of their numbers, in rows that are longer than every constant."""
        return self.times, self.plus

    def of(self, tokens: Any) -> Any:
        """This count for a row of `tokens` tokens: a number, or one that a graph computes."""
        if not self.times:
            return self.plus
        count = tokens if self.times == 1 else tokens * self.times
        return count + self.plus if self.plus else count


ZERO, ROW = TokenCount(), TokenCount(0, 1)


@dataclass(frozen=True)
class Piece:
    """Successive entries: entry i is row start + step · i of `of`.

    Args:
        step: 1; -1: they follow each other backwards; 0, never of what is mapped: all are the same.
        of: None: what is mapped; else what a user of maps names by it, of which all ranks have the rows.
    """

    length: TokenCount
    start: TokenCount = ZERO
    step: int = 1
    of: Any = None

    @property
    def end(self) -> TokenCount:
        """Behind the greatest row that is read."""
        return self.start + (self.length if self.step > 0 else TokenCount(1))

    def row(self, entry: TokenCount) -> TokenCount:
        """The source row of entry i."""
        return self.start + TokenCount(self.step * entry.plus, self.step * entry.times)

    def part(self, entry: TokenCount, length: TokenCount) -> Piece:
        """`length` entries from one on."""
        return replace(self, start=self.row(entry), length=length)

    def turned(self) -> Piece:
        """From its last entry to its first."""
        return replace(self, start=self.row(self.length - TokenCount(1)), step=-self.step)


@dataclass(frozen=True)
class RowMap:
    """Entries in turn; of rows that are longer than every constant.

        x[:, :-1]                   [0, T - 1) of x
        F.pad(x, (0, 0, 2, 0))      0 0, [0, T) of x
        x.roll(1, 1)                [T - 1, T) of x, [0, T - 1) of x
        x.flip(1)                   T - 1, T - 2, …, 0 of x

    Maps follow each other: x.roll(1, 1)[:, 2:] is [2, T) of what is [T - 1, T), [0, T - 1) of x: [1, T - 1) of x.
    """

    pieces: tuple[Piece, ...]

    @classmethod
    def entries(cls, start: TokenCount, length: TokenCount) -> RowMap:
        """`length` of what is mapped, from one on."""
        return cls((Piece(length, start),))

    @classmethod
    def same(cls, length: TokenCount, of: Any) -> RowMap:
        """One row again and again."""
        return cls((Piece(length, step=0, of=of),) if length != ZERO else ())

    @property
    def length(self) -> TokenCount:
        return sum((piece.length for piece in self.pieces), ZERO)

    @property
    def is_identity(self) -> bool:
        """True if all entries are where they were, of a row or of its first tokens."""
        return self == RowMap.entries(ZERO, self.length)

    def __add__(self, other: RowMap) -> RowMap:
        """The entries of one, then those of the other."""
        return RowMap((*self.pieces, *other.pieces))

    def then(self, after: RowMap) -> RowMap | None:
        """The composed map: `after`, read of this map's entries; None: it reads more than there are."""
        found: list[Piece] = []
        for piece in after.pieces:
            if piece.of is not None:
                found.append(piece)
                continue
            assert piece.step
            forward = piece if piece.step > 0 else piece.turned()
            taken = self._taken(forward.start, forward.length)
            if taken is None:
                return None
            found += taken if piece.step > 0 else [each.turned() for each in reversed(taken)]
        return RowMap(tuple(found))

    def _taken(self, start: TokenCount, length: TokenCount) -> list[Piece] | None:
        found: list[Piece] = []
        if min(start, length, key=TokenCount.order).order() < ZERO.order():
            return None
        for piece in self.pieces:
            skipped = min(start, piece.length, key=TokenCount.order)
            taken = min(piece.length - skipped, length, key=TokenCount.order)
            start, length = start - skipped, length - taken
            if taken != ZERO:
                found.append(piece.part(skipped, taken))
        return found if length == start == ZERO else None

    def reaches_beyond(self) -> bool:
        """True if rows behind the last token are read."""
        return any(piece.end.order() > ROW.order() for piece in self.pieces if piece.of is None)

    def stays_near(self) -> bool:
        """True if each entry is so many tokens from its place, whatever the row's length."""
        entry = ZERO
        for piece in self.pieces:
            if piece.of is None and (piece.step < 0 or (piece.start - entry).times):
                return False
            entry += piece.length
        return True

    def rows(self, entries: Int, tokens: int | Int) -> Int:
        """The row of each entry, where its row has so many tokens; of an entry of something else `tokens` and its row.

        Raises:
            ValueError: there are no such entries.
        """
        found, begin = np.full(entries.shape, -1), np.zeros(entries.shape, dtype=np.int64)
        short = False
        for piece in self.pieces:
            length = piece.length.of(tokens)
            row = piece.start.of(tokens) + tokens * (piece.of is not None) + (entries - begin) * piece.step
            found = np.where((begin <= entries) & (entries < begin + length), row, found)
            begin, short = begin + length, short or bool(np.any(length < 0))
        if short or (entries >= begin).any():
            least = int(np.min(tokens))
            raise ValueError(f"the model shifts tokens by more than a row has, {least}: give it longer rows")
        return found


@dataclass(frozen=True)
class PlanTensor:
    """A tensor of a batch's plan. Args: on_host: ops read it on the host; all others live on the device. static: its
    size follows from the number of ranks alone."""

    name: str
    on_host: bool = False
    static: bool = False


KERNEL_TABLES = (
    PlanTensor("cu_seqlens_q"),
    PlanTensor("cu_seqlens_k"),
    PlanTensor("pieces", on_host=True),
    PlanTensor("launches", on_host=True),
)
"""Tensors that `Schedule.attention` makes, and every attention kernel reads."""


EXTRAS = "extras"
"""Source, in `Neighbours.entries`, of pieces that are no tokens: rows that all ranks have."""


@dataclass(frozen=True)
class Neighbours:
    """The rows that each token's local row reads.

    Args:
        entries: all, of tokens and of `EXTRAS`.
        first, span: as drawn in `reads.py`; `first` may not be negative.
        extras: how many rows all ranks have, for each row of the batch.
        keeps_fill: local rows without a token read themselves; else what the token reads of which they are copies.
        apart: tokens of documents may not read tokens of none, whose values attention made.
        across: rows that were joined to one are read over their ends.
        resets: each document has entries of its own, as a row.
    """

    entries: RowMap
    first: int = 0
    span: int = 1
    extras: int = 0
    keeps_fill: bool = False
    apart: bool = False
    across: bool = False
    resets: bool = False


SENT_ROWS = (
    PlanTensor("send_rows"),
    PlanTensor("splits", on_host=True, static=True),
    PlanTensor("sum_ptr"),
    PlanTensor("sum_rows"),
    PlanTensor("return_ptr"),
    PlanTensor("return_rows"),
)
"""Which rows go to the ranks that read them, and how their gradients are summed there and here, in order."""
NEIGHBOURS = (PlanTensor("rows"), *SENT_ROWS)
"""Tensors that `neighbour_rows` reads of the plan, in order."""
OUT_ROWS = PlanTensor("out_rows")


@dataclass(frozen=True)
class Scan:
    """The line of tokens that a running operation runs over.

    Args:
        joined: all rows of the batch, one behind another, as one line.
        apart: tokens of documents may not take in tokens of none, whose values attention made.
    """

    joined: bool = False
    apart: bool = False


SCAN = (
    PlanTensor("scan_order"),
    PlanTensor("scan_place"),
    PlanTensor("scan_piece"),
    PlanTensor("scan_ends"),
    PlanTensor("scan_before"),
)
"""Tensors that a running operation reads of the plan, in order; the first three have an entry for each local row."""


@dataclass(frozen=True)
class States:
    """The sequences that a state passes through.

    Args:
        resets: the tokens of one document; else those of a row of the batch.
        apart: without `resets`, documents may not take in tokens of none, whose values attention made.
    """

    resets: bool
    apart: bool = False


STATES = (
    PlanTensor("chunk_rows"),
    PlanTensor("chunk_levels", on_host=True),
    PlanTensor("cut_pieces"),
    PlanTensor("summed_chunks"),
    PlanTensor("summed_levels", on_host=True),
    *(
        PlanTensor(f"{name}{way}", on_host=name in ("fold_levels", "splits"), static=name == "splits")
        for way in ("", "_back")
        for name in ("send_summaries", "splits", "fold_order", "fold_levels", "fold_place")
    ),
    PlanTensor("runs", on_host=True),
    PlanTensor("run_offsets"),
    PlanTensor("run_chunks"),
    PlanTensor("run_states"),
)
"""Tensors that an op over states reads of the plan, in order. The reference reads chunks, kernels read runs."""


@dataclass(frozen=True)
class PlanInput:
    """One extra input of a rewritten graph: a tensor of the schedule of `mask`, as `exchange` needs it; or of the route
    of `read`, what is read of other tokens."""

    tensor: PlanTensor
    mask: PackedMask | None = None
    exchange: str | None = None
    read: Neighbours | Scan | States | None = None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_per_token(self) -> bool:
        """True if it has an entry for each of this rank's tokens, of one row of the batch or of all."""
        if isinstance(self.read, Scan):
            return self.tensor in SCAN[:3]
        narrow = isinstance(self.read, Neighbours) and self.read.span == 1
        return (
            self in (ROW_INDEX, HAS_TOKEN, TOKEN_INDEX) or self.tensor == OUT_ROWS or (narrow and self.name == "rows")
        )

    @staticmethod
    def of_scan(scan: Scan) -> tuple[PlanInput, ...]:
        """Inputs of a running operation."""
        return tuple(PlanInput(x, read=scan) for x in SCAN)

    @staticmethod
    def of_states(states: States) -> tuple[PlanInput, ...]:
        """Inputs of a recurrence over pieces."""
        return tuple(PlanInput(x, read=states) for x in STATES)

    @staticmethod
    def of_neighbours(read: Neighbours) -> tuple[PlanInput, ...]:
        """Inputs of `neighbour_rows`; where a token reads several rows, `out_rows` too."""
        return tuple(PlanInput(x, read=read) for x in NEIGHBOURS + (OUT_ROWS,) * (read.span > 1))


ROW_INDEX = PlanInput(PlanTensor("row_index"))
"""(T_l,) int64: index in the global row of each local token. It belongs to no mask or exchange."""
HAS_TOKEN = PlanInput(PlanTensor("has_token"))
"""(B, T_l) bool: whether a local row holds a token or fills the rank up. It belongs to no mask or exchange."""
TOKEN_INDEX = PlanInput(PlanTensor("token_index"))
"""(B, T_l) int64: as `row_index`, for each row of the batch its own."""
COPIED_ROWS = PlanInput(PlanTensor("copied_rows"))
"""(B, T_l) int64: the local row that each is a copy of, T_l where this rank has not that row. No graph reads it."""
TOKEN_ROWS = PlanInput(PlanTensor("token_rows"))
"""(T, B) int64: the local row of each token of the global rows, -1 of another rank's. It belongs to no mask."""
IN_DOCUMENT = PlanInput(PlanTensor("in_document"))
"""(T, B) bool: whether each token of the global rows belongs to a document. It belongs to no mask or exchange."""
ROW_TOKENS = PlanInput(PlanTensor("row_tokens", static=True))
"""(1,) int64: the tokens of a row, of all ranks together. It belongs to no mask or exchange."""
