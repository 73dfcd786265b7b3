"""How heads are dealt to ranks when tokens are gathered and heads scattered (Ulysses), whatever their numbers.

Each key/value head with its group of query heads is one unit. With fewer units than ranks, units are split: the key
head is copied and its query heads are dealt to the copies. What is still missing to an equal deal is padded with heads
of zeros.

    12 query heads, 2 key heads, 4 ranks     copies 2, 3 query heads and 1 key head per rank, nothing padded
    12 query heads, 12 key heads, 8 ranks    2 query heads and 2 key heads per rank, 4 of each padded
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadDeal:
    """Args: heads, heads_kv: of the whole model. ranks: they are dealt to. copies: of each key/value head."""

    heads: int
    heads_kv: int
    ranks: int
    copies: int

    @classmethod
    def best(cls, heads: int, heads_kv: int, ranks: int) -> HeadDeal:
        """The deal with the fewest query heads per rank; among those, the fewest key/value heads.

        Raises:
            ValueError: `heads` is no multiple of `heads_kv`.
        """
        if heads % heads_kv:
            raise ValueError(f"{heads} query heads are no multiple of {heads_kv} key/value heads")
        deals = [cls(heads, heads_kv, ranks, copies) for copies in range(1, max(1, heads // heads_kv) + 1)]
        return min(deals, key=lambda deal: (deal.local, deal.local_kv))

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.heads // self.heads_kv

    @property
    def part(self) -> int:
        """Query heads of one copy of a key/value head."""
        return -(-self.group // self.copies)

    @property
    def local_kv(self) -> int:
        """Key/value heads on each rank."""
        return -(-self.heads_kv * self.copies // self.ranks)

    @property
    def local(self) -> int:
        """Query heads on each rank."""
        return self.part * self.local_kv

    def __str__(self) -> str:
        padded = self.local * self.ranks - self.heads
        words = [f"{self.local} query and {self.local_kv} key/value heads per rank"]
        words += [f"each key/value head {self.copies} times"] if self.copies > 1 else []
        words += [f"{padded} query heads padded"] if padded else []
        return ", ".join(words)
