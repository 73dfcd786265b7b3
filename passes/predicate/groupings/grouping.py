"""Groupings of tokens: what a mask may read beside documents, and how a cell's relation by it bounds terms.

A grouping has a file here, with two classes, and a line in `table`:

    Grouping   what a mask reads it by: which terms, how they are read, the relations of a cell, fields of the mask
    Relation   how it holds the query and the key of a cell: what is known of its terms there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from cp_rewrite.passes.predicate.cells import CellValues
from cp_rewrite.passes.predicate.context import Leaf
from cp_rewrite.passes.predicate.symbolic import Expr
from cp_rewrite.passes.predicate.worlds import FROM_0, Cell, Linear, Span

Kept = Mapping[Cell, bool | str]
"""For each cell whether a mask keeps its keys; a text: what else it does."""


@dataclass(frozen=True)
class Form:
    """The form that a mask's cells come to.

    Args:
        window: (left, right) inside of a document; None: there is none.
        fields: of `PackedMask`, that groupings have.
    """

    window: tuple[int | None, int | None] | None
    packed: bool
    fields: Mapping[str, Any]

    def reaches(self, low: float, high: float) -> bool:
        """True if the window's left side reaches distances of a range."""
        left = None if self.window is None else self.window[0]
        return left is None or (low <= left and high >= -left)


class Relation:
    """How a grouping holds query and key. Frozen dataclasses; `str` is what a refusal says of the key by it."""

    plain: bool = True
    """The mask's window is read off such cells: the key is of the query's own group, or neither is of one."""
    special: bool = False
    """A mask that treats such cells otherwise than plain ones has the grouping."""

    def reduced(self, cell: Cell, linear: Linear, add: Callable[[Expr, Expr], None]) -> set[Expr]:
        """Adds the query's terms as the key's and a difference; which terms these were."""
        return set()

    def regrouped(self, cell: Cell, reduced: Linear) -> Linear:
        """A reduced form in terms of groups, where it reads any."""
        return reduced

    def bounds(self, cell: Cell) -> dict[Expr, Span]:
        """Bounds of terms, narrower ones than a cell has by itself perhaps."""
        return {}

    def nonzero(self, cell: Cell) -> set[Expr]:
        """Terms that are never 0."""
        return set()

    def never(self, term: Expr, value: Expr) -> bool:
        """True if `term` never has this value."""
        return False

    def numbers(self, cell: Cell) -> tuple[Span, Span, Span]:
        """Ranges of group numbers: the query's less the key's, the query's, the key's."""
        return cell.never_falls, FROM_0, FROM_0

    def impossible(self, cell: Cell) -> bool:
        """True if no batch may have such a pair."""
        return False

    def expected(self, cell: Cell, form: Form) -> bool | type[Relation] | None:
        """True if a mask of this form keeps such a cell; None: no batch has such pairs; `Relation`: as in plain
        cells."""
        return Relation

    def alike(self, cell: Cell, form: Form) -> Relation:
        """The relation of the plain cells that the mask should treat alike."""
        return self


class Grouping:
    """A grouping, as one mask reads it. Frozen dataclasses."""

    relation: ClassVar[type[Relation]]

    @classmethod
    def given(cls, reader: CellValues) -> Grouping | None:
        """The grouping, where the annotation has it, whatever the mask reads."""
        return None

    @classmethod
    def arguments(cls, reader: CellValues) -> set[str]:
        """The arguments with one entry per token that tell groups apart."""
        return set()

    @classmethod
    def at_token(cls, reader: CellValues, side: tuple[Expr, ...], leaf: Leaf) -> Linear | None:
        """The value of one of `arguments` at the token whose symbols are `side`; None: this grouping has no say."""
        return None

    @classmethod
    def of_leaf(cls, reader: CellValues, term: Any, leaf: Leaf) -> Linear | None:
        """A read of another argument; None: this grouping has no say."""
        return None

    @classmethod
    def of_term(cls, reader: CellValues, term: Any) -> Linear | None:
        """A floor or a modulus; None: this grouping has no say."""
        return None

    @classmethod
    def is_numbered(cls, reader: CellValues, inner: Any, j: Any) -> bool:
        """True if a running sum of `inner` over j grows with each group."""
        return False

    @property
    def distances(self) -> set[int]:
        """Distances at which its relations change."""
        return set()

    def relations(self, cell: Cell) -> Sequence[Relation | None]:
        """All ways in which it may hold a cell's query and key; None: it has no say there."""
        return (None,)

    @property
    def unknown(self) -> Relation | None:
        """The relation of cells in which nothing is known of groups; None: it says nothing there."""
        return None

    def fields(self, kept: Kept, plain: Kept) -> dict[str, Any]:
        """Fields of `PackedMask`, by what a mask does in its cells. plain: its plain cells of one document."""
        return {}

    def odd(self, form: Form) -> str:
        """The trouble with a mask of this form that reads the grouping; "": none."""
        return ""


def differs(kept: Kept, plain: Kept, kind: type[Relation]) -> bool:
    """True if special cells of a grouping are treated otherwise than plain ones of the same distance."""
    none = Form(None, True, {})
    for cell, answer in kept.items():
        found = cell.of(kind)
        if cell.same and found is not None and found.special:
            own = tuple(each.alike(cell, none) if each is found else each for each in cell.relations)
            if plain.get(replace(cell, relations=own), answer) != answer:
                return True
    return False


def sides(linear: Linear, query: Expr, key: Expr) -> bool:
    """True if a form reads a term as the query's less the key's alone."""
    return linear.get(query) == -linear.get(key, sympy.S.Zero)
