"""The terms that a mask's symbolic value is made of: reads of leaves, index symbols, and generators.

Eq(RunningSum(starts(j), j, q) - RunningSum(starts(j), j, k), 0) & (k - q <= 0)
   generator                     generator                         index symbols
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch.fx as fx
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from cp_rewrite.refusal import Reason

from .symbolic import Expr, RepeatIndex, RunningMax, RunningSum, SumOver
from .worlds import IK, IQ, PK, PQ, K, Q

GENERATORS = (RunningSum, RunningMax, SumOver, RepeatIndex)
"""Functions that run over all tokens or offsets: what numbers documents is made of them."""


@dataclass(frozen=True)
class Trouble:
    """Why a term can't be read: what to refuse a mask for that hangs on it."""

    reason: Reason
    detail: str
    node: fx.Node | None = None


@dataclass(frozen=True)
class Pair:
    """How a value calls the query token, the key token and the batch row: by an index expression each.

    `others` are symbols that a mask over tokens must not depend on, each with what it is: b and h.
    """

    query: Expr
    key: Expr
    batch: Expr
    others: Mapping[Expr, str] = field(default_factory=dict)

    def side(self, index: Expr) -> tuple[Expr, ...] | None:
        """(index, position, id): symbols of the token that an index expression names; None for neither token's."""
        if sympy.expand(index - self.query) == 0:
            return Q, PQ, IQ
        if sympy.expand(index - self.key) == 0:
            return K, PK, IK
        return None

    def at(self, side: Expr) -> Expr:
        """The index expression of the token at Q or K."""
        return self.query if side == Q else self.key


def maximal_terms(value: Any) -> Iterator[Any]:
    """The outermost reads and generators in a value, and index symbols that stand outside them."""
    if isinstance(value, (AppliedUndef, sympy.Symbol, *GENERATORS)):
        yield value
        return
    for arg in value.args:
        yield from maximal_terms(arg)


def relations(value: Any) -> Iterator[Relational]:
    """The relations that a value is built of, outside reads and generators."""
    if isinstance(value, Relational):
        yield value
    elif not isinstance(value, (AppliedUndef, *GENERATORS)):
        for arg in value.args:
            yield from relations(arg)
