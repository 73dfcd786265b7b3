"""The layouts by name: rules that decide which rank owns which tokens of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cp_rewrite.arguments import whole_number
from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.names import LAYOUTS

from .balanced import balanced
from .options import LayoutOptions
from .simple import contiguous, dual_chunk
from .token_order import TokenOrder

Rule = Callable[[Documents, int, PackedMask, LayoutOptions], TokenOrder]


def lay_out(
    documents: Documents, world_size: int, layout: str, mask: PackedMask, options: LayoutOptions | None = None
) -> TokenOrder:
    """The token order of one row.

    Args:
        documents: the row's documents.
        world_size: ranks, >= 1.
        layout: one of LAYOUTS.
        mask: what attention sees. Only `balanced` reads it.
        options: None: cuts anywhere, on one node of H200.
    Raises:
        TypeError, ValueError: an unknown layout; a world_size that is no whole number or below 1, or that nodes do not
            divide; a document that starts inside a chunk; or chunks that `balanced` can't share out without more rows
            per rank than the tokens need.
    """
    options = options or LayoutOptions()
    options.node_size(whole_number("world_size", world_size))
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    _check_starts(documents, options.chunk_size)
    order = _RULES[layout](documents, world_size, mask, options)
    return replace(order, pad_to_multiple=options.pad_to_multiple)


def _balanced(documents: Documents, world_size: int, mask: PackedMask, options: LayoutOptions) -> TokenOrder:
    _check_equal_chunks(documents.total, world_size, options)
    return balanced(documents, world_size, mask, options)


def _check_starts(documents: Documents, chunk_size: int) -> None:
    off = np.flatnonzero((documents.starts % chunk_size != 0) & (documents.lengths > 0))
    if off.size:
        raise ValueError(
            f"chunk_size {chunk_size} needs documents that start at multiples of it: document {off[0]} starts at "
            f"token {documents.starts[off[0]]}; pad the documents before it"
        )


def _check_equal_chunks(total: int, world_size: int, options: LayoutOptions) -> None:
    """Ranks get whole chunks: that must not take more local rows than equal tokens do."""
    chunk_size, multiple = options.chunk_size, options.pad_to_multiple
    rows = -(-total // (world_size * multiple)) * multiple
    needed = -(-total // (world_size * chunk_size)) * chunk_size
    if needed > rows and world_size > 1:
        raise ValueError(
            f"{total} tokens on {world_size} ranks are {rows} rows each, but whole chunks of {chunk_size} need "
            f"{needed}: chunk_size * world_size must divide the row's tokens, or pad_to_multiple be {chunk_size}"
        )


_RULES: dict[str, Rule] = {
    "contiguous": lambda row, ranks, _, options: contiguous(row.total, ranks, options.chunk_size),
    "head_tail": lambda row, ranks, _, options: dual_chunk(np.array([0, row.total]), ranks, options.chunk_size),
    "dual_chunk": lambda row, ranks, _, options: dual_chunk(row.bounds, ranks, options.chunk_size),
    "balanced": _balanced,
}
