"""Whole numbers made from the token count of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
