"""Masks as expressions over what tokens hold at the query and at the key, and how they are changed at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

Batch = dict[str, Tensor]
Side = Literal["q", "k"]
X = TypeVar("X")


@dataclass(frozen=True, eq=False)
class Term:
    """Something that tokens hold: (B, T) or (T,) integers. `by_index`: the same of an index itself, where it is made of
    nothing else."""

    name: str
    of_batch: Callable[[Batch], Tensor]
    by_index: Callable[[Tensor], Tensor] | None = None


class View:
    """Reads terms at the query and the key, as a dense mask does: (B, 1, T, 1) and (B, 1, 1, T), or without B and 1."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.known: dict[Term, Tensor] = {}

    def tokens(self, term: Term) -> Tensor:
        if term not in self.known:
            self.known[term] = term.of_batch(self.batch)
        return self.known[term]

    def at(self, term: Term, side: Side) -> Tensor:
        x = self.tokens(term)
        x = x[:, None] if x.ndim > 1 else x
        return x[..., :, None] if side == "q" else x[..., None, :]


class Indexed(View):
    """Reads them as a mask function does, at 0-d indices b, q and k."""

    def __init__(self, batch: Batch, b: Tensor, q: Tensor, k: Tensor) -> None:
        super().__init__(batch)
        self.b, self.places = b, {"q": q, "k": k}

    def at(self, term: Term, side: Side) -> Tensor:
        place = self.places[side]
        if term.by_index is not None:
            return term.by_index(place)
        x = self.tokens(term)
        # What `x[b, q]` is in a captured graph; on real tensors plain indexing would read the indices' values.
        return torch.ops.aten.index(x, [self.b, place] if x.ndim > 1 else [place])


def _difference(x: Tensor, y: Tensor | int) -> Tensor:
    return _number(x) - (_number(y) if isinstance(y, Tensor) else y)


def _number(x: Tensor) -> Tensor:
    return x.int() if x.dtype == torch.bool else x


OPS: dict[str, Callable[[Tensor, Tensor | int], Tensor]] = {
    "==": torch.eq,
    "!=": torch.ne,
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "- ==": lambda x, y: _difference(x, y) == 0,
    "not !=": lambda x, y: ~torch.ne(x, y),
    "near": lambda x, y: _difference(x, y).abs() < 3,
}
OFTEN = tuple(OPS)[:6]


@dataclass(frozen=True)
class Relation:
    """`left[side] op right[side] + offset`; without `right`, `left[side] op offset`."""

    left: Term
    left_side: Side
    op: str
    right: Term | None
    right_side: Side = "k"
    offset: int = 0

    def __str__(self) -> str:
        right = "" if self.right is None else f"{self.right.name}[{self.right_side}] + "
        return f"({self.left.name}[{self.left_side}] {self.op} {right}{self.offset})"

    def value(self, view: View) -> Tensor:
        left = view.at(self.left, self.left_side)
        right = self.offset if self.right is None else view.at(self.right, self.right_side)
        if self.right is not None and self.offset:
            right = right + self.offset
        return OPS[self.op](left, right)


@dataclass(frozen=True)
class Junction:
    """`and`, `or`, `xor` of two masks, or `not` of one."""

    op: Literal["&", "|", "^", "~"]
    parts: tuple[Mask, ...]

    def __str__(self) -> str:
        return f"~{self.parts[0]}" if self.op == "~" else f"({self.parts[0]} {self.op} {self.parts[1]})"

    def value(self, view: View) -> Tensor:
        x, *rest = (part.value(view) for part in self.parts)
        if self.op == "~":
            return ~x
        return x & rest[0] if self.op == "&" else x | rest[0] if self.op == "|" else x ^ rest[0]


Mask = Relation | Junction


def both(*parts: Mask) -> Mask:
    """All of them."""
    first, *rest = parts
    return Junction("&", (first, both(*rest))) if rest else first


def either(*parts: Mask) -> Mask:
    """One of them at least."""
    first, *rest = parts
    return Junction("|", (first, either(*rest))) if rest else first


def changed(mask: Mask, terms: Sequence[Term], pool: Sequence[Mask], rng: np.random.Generator) -> Mask:
    """The mask with one place changed: a relation's parts, a junction's op, or a part left out, put in or negated."""
    if isinstance(mask, Junction) and rng.random() < 0.8:
        at = int(rng.integers(len(mask.parts)))
        parts = list(mask.parts)
        parts[at] = changed(parts[at], terms, pool, rng)
        return replace(mask, parts=tuple(parts))
    if isinstance(mask, Junction):
        return _other_junction(mask, pool, rng)
    return _other_relation(mask, terms, pool, rng)


def _pick(rng: np.random.Generator, options: Sequence[X]) -> X:
    return options[int(rng.integers(len(options)))]


def _other_junction(mask: Junction, pool: Sequence[Mask], rng: np.random.Generator) -> Mask:
    match int(rng.integers(4)):
        case 0:  # a part alone
            return _pick(rng, mask.parts)
        case 1 if mask.op != "~":
            return replace(mask, op=_pick(rng, ["&", "|", "^"]))
        case 2:
            return Junction("~", (mask,))
        case _:
            return Junction(_pick(rng, ["&", "|"]), (mask, _pick(rng, pool)))


def _other_relation(mask: Relation, terms: Sequence[Term], pool: Sequence[Mask], rng: np.random.Generator) -> Mask:
    match int(rng.integers(9)):
        case 0:
            return replace(mask, op=_pick(rng, OFTEN))
        case 1:
            return replace(mask, op=_pick(rng, tuple(OPS)))
        case 2 | 3:
            return replace(mask, offset=mask.offset + _pick(rng, [-2, -1, 1, 2]))
        case 4:
            sides: dict[Side, Side] = {"q": "k", "k": "q"}
            one = rng.random() < 0.5 or mask.right is None
            return replace(
                mask,
                left_side=sides[mask.left_side] if one else mask.left_side,
                right_side=mask.right_side if one else sides[mask.right_side],
            )
        case 5:
            return replace(mask, left=_pick(rng, terms))
        case 6 if mask.right is not None:
            return replace(mask, right=_pick(rng, terms))
        case 7:
            return Junction(_pick(rng, ["&", "|", "^"]), (mask, _pick(rng, pool)))
        case _:
            return _pick(rng, pool) if rng.random() < 0.5 else Junction("~", (mask,))
