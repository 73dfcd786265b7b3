"""Claims that a trial makes of an op's operands: where their tokens are, and what each rank holds of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Kind(Enum):
    SAME = "same"
    """All ranks hold it: a weight."""
    ROWS = "rows"
    """A rank holds its tokens' rows."""
    PART = "part"
    """A sum over tokens: each rank holds a part of it."""
    WHOLE = "whole"
    """The largest of all tokens'."""


@dataclass(frozen=True)
class Claim:
    """The claim about one tensor. dim: its token dim. fill: what rows without a token hold; None: anything, copies of
    others."""

    kind: Kind = Kind.SAME
    dim: int = 0
    fill: int | None = None

    def __str__(self) -> str:
        fill = "" if self.fill is None else f" fill {self.fill}"
        return f"rows({self.dim}){fill}" if self.kind is Kind.ROWS else self.kind.value


SAME = Claim()


@dataclass(frozen=True)
class Claims:
    """The claims about all tensors of a sample.

    Args:
        each: by tensor.
        tokens: T, how many tokens a row has. rows: B; above 1, the dim before each token dim counts the batch's rows.
    """

    each: tuple[Claim, ...]
    tokens: int
    rows: int = 1

    def __str__(self) -> str:
        batch = f", {self.rows} rows of the batch" if self.rows > 1 else ""
        return f"{', '.join(map(str, self.each))} of {self.tokens} tokens{batch}"


FILLS = (None, None, 0, 1)
"""Values of `fill` to draw from: half of the time anything."""


def draw(tensors: Sequence[Tensor], count: int, chance: random.Random) -> list[Claims]:
    """Up to `count` claims of a sample's tensors, at least one of which has tokens."""
    found = [*_of_rows(tensors), *_of_sums(tensors)]
    picked = chance.sample(found, min(count, len(found)))
    return [_filled(claims, chance) for claims in picked]


def _of_rows(tensors: Sequence[Tensor]) -> Iterator[Claims]:
    """Each tensor has its tokens in a dim of T entries, or none."""
    for tokens in sorted({size for x in tensors for size in x.shape if size > 2}):
        choices = [[SAME, *_row_claims(x, tokens)] for x in tensors[:4]]
        for each in itertools.product(*choices):
            each = (*each, *[SAME] * (len(tensors) - len(each)))
            if all(claim is SAME for claim in each):
                continue
            yield Claims(each, tokens)
            before = {x.shape[c.dim - 1] if c.dim else 0 for x, c in zip(tensors, each, strict=True) if c is not SAME}
            if len(before) == 1 and (rows := before.pop()) > 1:
                yield Claims(each, tokens, rows)


def _row_claims(x: Tensor, tokens: int) -> list[Claim]:
    return [Claim(Kind.ROWS, dim) for dim, size in enumerate(x.shape) if size == tokens]


def _of_sums(tensors: Sequence[Tensor]) -> Iterator[Claims]:
    """Tensors without tokens: sums over some, and the largest."""
    if not tensors or not all(x.is_floating_point() for x in tensors):
        return
    for kinds in itertools.product((Kind.SAME, Kind.PART, Kind.WHOLE), repeat=min(len(tensors), 3)):
        if any(kind is not Kind.SAME for kind in kinds):
            each = [Claim(kind) for kind in kinds]
            yield Claims((*each, *[SAME] * (len(tensors) - len(each))), tokens=5)


def _filled(claims: Claims, chance: random.Random) -> Claims:
    each = (Claim(c.kind, c.dim, chance.choice(FILLS)) if c.kind is Kind.ROWS else c for c in claims.each)
    return Claims(tuple(each), claims.tokens, claims.rows)
