"""A mask's computation as a value that outlives its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
from torch import Tensor

from cp_rewrite.masks import PackedMask

from .canonicalize import Canonical, Ref


@dataclass(frozen=True, eq=False)
class RecordedMask:
    """A mask as the model computes it, and what the rewrite takes it for.

    Args:
        canonical: its computation as ATen calls.
        mask: its meaning, proven or assumed.
        assumed: it is the user's word.
        where: the attention node's source line.
        names: leaves that are arguments -> their names.
        places: leaves that are inputs of the graph -> their place among the inputs.
        values: leaves that are tensors held by the graph, or known numbers.
        indices: leaves that stand for b, h, q and k, in this order, when the mask is a function of them.
        tokens, rows: symbols that count tokens and batch rows.
    """

    canonical: Canonical
    mask: PackedMask
    assumed: bool
    where: str
    names: Mapping[Ref, str] = field(default_factory=dict[Ref, str])
    places: Mapping[Ref, int] = field(default_factory=dict[Ref, int])
    values: Mapping[Ref, Tensor] = field(default_factory=dict[Ref, Tensor])
    indices: tuple[Ref | None, ...] = ()
    tokens: frozenset[sympy.Expr] = frozenset()
    rows: frozenset[sympy.Expr] = frozenset()
