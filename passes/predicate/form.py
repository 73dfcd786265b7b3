"""What a mask's cells come to, and which of them do otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .within import Held, Kin
from .worlds import Cell, Chunks, World

Kept = Mapping[Cell, bool | str]
"""Whether a mask keeps the keys of each cell; a text: what else it does."""


@dataclass(frozen=True)
class Form:
    """What a mask's cells come to.

    Args:
        window: (left, right) inside of a document; None: there is none.
        spans, tree: keys of the query's span, and of other nodes, are treated otherwise than plain ones.
        levels: how many levels above the query's node; None: all.
    """

    window: tuple[int | None, int | None] | None
    packed: bool
    chunk: Chunks | None
    spans: bool
    tree: bool
    levels: int | None

    def reaches_span(self, low: float, high: float) -> bool:
        """Whether a key of the query's span may be so far: spans are not longer than the window."""
        left = None if self.window is None else self.window[0]
        return left is None or (low <= left and high >= -left)


def differs(kept: Kept, plain: Kept, of: str) -> bool:
    """Whether keys of the query's span (`held`), or of other nodes (`kin`), are treated otherwise than plain ones."""
    own = {"held": {"held": Held.NONE, "types": (None, None)}, "kin": {"kin": Kin.NODE, "depth": None}}[of]
    for cell, answer in kept.items():
        other = cell.held is Held.ONE if of == "held" else cell.kin not in (None, Kin.NODE)
        if cell.world is World.SAME and other and plain.get(replace(cell, **own), answer) != answer:
            return True
    return False


def levels_of(kept: Kept) -> int | None:
    """How many levels of nodes above its own a query sees, by the last one; None: all, or the mask reads no parents."""
    last = max((cell.depth for cell, answer in kept.items() if cell.depth is not None and answer), default=0)
    read = next((cell.levels for cell in kept if cell.levels is not None), None)
    return last if read is not None and last <= read else None


def chunk_of(kept: Kept) -> Chunks | None:
    """The chunks of a mask that drops the keys of other ones; None where it keeps some."""
    others = [cell for cell in kept if cell.world is World.SAME and cell.together is False]
    return others[0].chunks if others and not any(kept[cell] for cell in others) else None


def odd_cell(kept: Kept, form: Form) -> str:
    """Where the mask does otherwise than with the keys of the query's own document, or chunk, at the same distance."""
    for cell, answer in kept.items():
        if cell.world is World.DIFFERENT and form.packed:
            continue
        if cell.marks is not None and cell.marks.kind == "prefix" and cell.world is World.DIFFERENT:
            # The row is one document, whose prefix comes first.
            if (cell.held is Held.KEY and cell.span[1] < 0) or (cell.held is Held.QUERY and cell.span[0] > 0):
                continue
        expected = expected_in(kept, cell, form)
        if expected is not None and expected != answer:
            return f"the mask keeps {cell}" if answer else f"the mask drops {cell}"
    return ""


def expected_in(kept: Kept, cell: Cell, form: Form) -> bool | str | None:
    """What the mask does in a cell if it is of this form; None: no batch has such pairs."""
    if form.spans and cell.held is Held.ONE:
        return True if form.reaches_span(*cell.span) else None
    if form.tree and cell.kin not in (None, Kin.NODE):
        return cell.kin is Kin.ABOVE and (form.levels is None or (cell.depth or 0) <= form.levels)
    kin = Kin.NODE if any(each.kin for each in kept) else None
    alike = replace(
        cell, world=World.SAME, kin=kin, depth=None, types=(None, None), held=None if cell.held is None else Held.NONE
    )
    if form.chunk is None and cell.chunks is not None:
        alike = replace(alike, together=False if cell.span != (0, 0) else True)
    return kept.get(alike, False)
