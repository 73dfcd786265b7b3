"""Which row each entry of a token dim is, piece by piece, in rows of any number of tokens.

TokenCount       whole numbers made from the token count of a row
Piece, RowMap    entries in turn, and how maps follow each other
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
        """A key that sorts counts by their numbers in rows that are longer than every constant."""
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
        """The place behind the greatest row that is read."""
        return self.start + (self.length if self.step > 0 else TokenCount(1))

    def row(self, entry: TokenCount) -> TokenCount:
        """The source row of entry i."""
        return self.start + TokenCount(self.step * entry.plus, self.step * entry.times)

    def part(self, entry: TokenCount, length: TokenCount) -> Piece:
        """`length` entries from one on."""
        return replace(self, start=self.row(entry), length=length)

    def turned(self) -> Piece:
        """The same entries, the last one first."""
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
