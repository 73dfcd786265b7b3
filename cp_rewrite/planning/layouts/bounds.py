"""Lower bounds of what a token order costs, without its schedule: most simple layouts need not be weighed further."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.constants import TILE, TILE_ROW_OVERHEAD
from cp_rewrite.planning.cost.load import Load
from cp_rewrite.planning.cost.seen_keys import SeenKeys
from cp_rewrite.planning.cost.tiles import Float
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.sections import Sections, sections_of

from .slices import Slices
from .token_order import TokenOrder


@dataclass(frozen=True)
class Bounds:
    """Bounds of token orders of one row. Args: documents, mask: what attention is over."""

    documents: Documents
    mask: PackedMask

    @cached_property
    def slices(self) -> Slices:
        """The row's sections, each as one slice, then its padding."""
        return Slices.of_row(self.documents, self.mask)

    @cached_property
    def _sections(self) -> Sections:
        return sections_of(self.documents, self.mask)

    @cached_property
    def _docs(self) -> Documents:
        return self.mask.documents(self.documents)

    @cached_property
    def _real(self) -> tuple[Int, Int, Int]:
        """(starts, ends, runs) of documents with tokens: how many runs of keys each has that no rank cuts."""
        real = self._docs.lengths > 0
        starts, ends = self._docs.starts[real], self._docs.ends[real]
        if not self.mask.hangs_on_others:
            return starts, ends, np.ones_like(starts)
        first = np.searchsorted(self._sections.ends, starts, side="right")
        last = np.searchsorted(self._sections.starts, ends, side="left")
        return starts, ends, np.maximum(last - first, 1)

    @cached_property
    def _lines(self) -> tuple[Int, Int, Float, Float, Int]:
        """(sizes, keys before, tiles) of all sections; tiles and tokens of those before each, and before the end."""
        before, sizes = self._sections.before, self._sections.ends - self._sections.starts
        tiles = self.slices.work[: len(sizes)]
        return sizes, before, tiles, np.append(0, np.cumsum(tiles)), np.append(0, np.cumsum(sizes))

    def least_load(self, order: TokenOrder, local_rows: int | None = None) -> Load:
        """A load that takes no longer under any exchange than the order's, which has `local_rows` (None: its own).

        A rank's kernel works on whole sections as it does, and on parts of them at least on the pairs that their
        queries see, and on the rows of tiles of their tokens; its keys are copied. A token behind a cut sees the one
        before it. Where the mask has no limit to the left, a rank needs all keys of every document (but for trees)
        whose last token it owns. They stand as if half of them went to and fro by fast links: so they take as long as
        if they only came.
        """
        ranks, rows = order.world_size, order.local_size if local_rows is None else local_rows
        _, stops, owners, _ = order.segments
        tiles, owned, cut = self._least_tiles(order)
        received = np.zeros((ranks, ranks), dtype=np.int64)
        if self.mask.left != 0:
            received[owners[1:][cut], owners[:-1][cut]] = 1
            np.fill_diagonal(received, 0)
        if self.mask.left is None and self._sections.paths is None:
            # Documents that end on a rank: of those that end by each stop, all tokens up to there.
            starts, ends, _ = self._real
            tokens = np.append(0, np.cumsum(ends - starts))[np.searchsorted(ends, stops, side="right")]
            needed = np.bincount(owners, np.diff(tokens, prepend=0), ranks).astype(np.int64)
            np.fill_diagonal(received, np.maximum((needed - owned) // 2 - received.sum(1), 0))
        fill, whole = rows - self.documents.total / ranks, float(self.slices.work.sum())
        return Load(rows, tiles, received, owned, 1, whole, fill)

    def _least_tiles(self, order: TokenOrder) -> tuple[Float, Int, NDArray[np.bool_]]:
        """(tiles at least, tokens of documents), each (P,); which segments but the first begin inside of a section."""
        starts, _, owners, _ = order.segments
        sections, seen = self._sections, SeenKeys(self.mask)
        if not len(sections.starts):
            none = np.zeros(order.world_size, dtype=np.int64)
            return none.astype(np.float64), none, np.zeros(len(starts) - 1, dtype=np.bool_)
        sizes, before, exact, work_before, tokens_before = self._lines

        def part(s: Int, low: Int, high: Int) -> Float:
            """Least work of tokens [low, high) of sections `s`, in tiles."""
            length = before[s] + sizes[s]
            pairs = seen.of(length, before[s] + high) - seen.of(length, before[s] + low)
            least = pairs / TILE**2 + TILE_ROW_OVERHEAD * -(-(high - low) // TILE)
            return np.where((low == 0) & (high == sizes[s]), exact[s], least)

        # Each bound of a segment as a section, and how many of its tokens come before.
        bounds = np.append(starts, self.documents.total)
        at = np.maximum(sections.starts.searchsorted(bounds, side="right") - 1, 0)
        inside = np.minimum(np.maximum(bounds - sections.starts[at], 0), sizes[at])
        first, low, last, high = at[:-1], inside[:-1], at[1:], inside[1:]
        between = work_before[last] - work_before[first + 1]
        several = part(first, low, sizes[first]) + between + part(last, high * 0, high)
        work = np.where(first == last, part(first, low, high), several)
        owned = np.bincount(owners, np.diff(tokens_before[at] + inside), order.world_size)
        tiles = np.bincount(owners, work, order.world_size).astype(np.float64)
        return tiles, owned.astype(np.int64), (low[1:] > 0) & (low[1:] < sizes[first[1:]])

    def most_runs(self, order: TokenOrder) -> int:
        """The most runs of keys that an order's schedule may hold (`Schedule.runs`): its time and memory go by them.

        A document of m sections in n segments has up to n + m - 1 pieces, and each reads as many runs of keys.
        """
        starts, ends, runs = self._real
        cuts = order.segments[0]
        at = np.searchsorted(ends, cuts, side="right")
        inside = at < len(ends)
        inside[inside] = starts[at[inside]] < cuts[inside]
        cut, times = np.unique(at[inside], return_counts=True)
        # (runs + times)² of documents that are cut, runs² of all others.
        return int((runs**2).sum() + (times * (2 * runs[cut] + times)).sum())
