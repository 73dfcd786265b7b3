"""Names that the planner, ops and kernels share: the columns of a plan's integer tables; layouts and exchanges, and
what an exchange's name says.

A row of a table is `PieceRow(*row)`, all columns of it are `PieceRow(*table.T)`, and `np.stack(columns, 1)` is a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args

if TYPE_CHECKING:
    import numpy as np  # late: --version answers without it
    from numpy.typing import NDArray

T = TypeVar("T")

SIZES_ARE_BOUNDS = -1
"""`max_q` of a second launch that says: sizes in the first are bounds for all batches (`Tables.sizes_are_bounds`)."""


class PieceRow(NamedTuple, Generic[T]):
    """A row of `pieces`: queries [q0, q1), local rows, see keys [k0, k1), expanded rows, through a window (left, right)
    of the kernel, aligned at the bottom right; -1: no limit. launch: the number of the launch that does it."""

    q0: T
    q1: T
    k0: T
    k1: T
    left: T
    right: T
    launch: T

    def take(self: PieceRow[NDArray[np.int64]], index: NDArray[Any]) -> PieceRow[NDArray[np.int64]]:
        """Columns of the pieces at `index`."""
        return PieceRow(*(column[index] for column in self))


class LaunchRow(NamedTuple, Generic[T]):
    """A row of `launches`: the window of all its pieces, and the longest entry of each side, in rows."""

    left: T
    right: T
    max_q: T
    max_k: T


class RoundRow(NamedTuple, Generic[T]):
    """A row of a ring's `rounds`: the step, and where the round's part of each other table begins and ends. A step of
    -1 only fills the table up to two rows."""

    step: T
    entry0: T
    entry1: T
    piece0: T
    piece1: T
    launch0: T
    launch1: T
    row0: T
    row1: T
    sum0: T
    sum1: T


class StageRow(NamedTuple, Generic[T]):
    """`stages` of a push: the kernel runs over the first `entries` entries, with their query rows and expanded rows
    (`queries`, `keys`), and over the rest. Part `early` (0 or 1) can begin while the other one's rows arrive, once
    `awaited` rows of peers are here. entries = 0: there is one part."""

    entries: T
    queries: T
    keys: T
    early: T
    awaited: T


class PlaceRow(NamedTuple, Generic[T]):
    """`place` of a push: which local rows are keys that are read in place: [source, source + early), the keys of the
    early part, or [source, source + whole), all keys. One of both counts is 0."""

    source: T
    early: T
    whole: T


Layout = Literal["contiguous", "head_tail", "dual_chunk", "balanced"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

ExchangeName = Literal["auto", "all_gather", "needed", "p2p", "a2a", "a2a+all_gather", "a2a+needed", "a2a+p2p"]
"""Exchanges that a user may ask for."""


def over_part(exchange: str, inner: int) -> str:
    """The name of `a2a+…` where heads are scattered over `inner` ranks, fewer than share a node: `a2a:2+needed`."""
    return exchange.replace("a2a+", f"a2a:{inner}+")


def part_of(exchange: str) -> int | None:
    """The ranks that `over_part` put into a name; None: all that share a node, or the mesh's last dim."""
    scattered = exchange.partition("+")[0]
    return int(scattered.removeprefix("a2a:")) if ":" in scattered else None


def split_exchange(exchange: str) -> tuple[bool, str]:
    """(whether heads are scattered, how keys travel then): `a2a+p2p` is (True, "p2p"), `a2a` (True, "local")."""
    scattered, _, outer = exchange.rpartition("+")
    return (True, "local") if exchange == "a2a" else (bool(scattered), outer)
