"""Layouts: the ways to share the tokens of a row out over ranks, by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cp_rewrite.arguments import whole_number
from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost import Device, Model

from .balanced import balanced
from .orders import TokenOrder, contiguous, dual_chunk

LAYOUTS = ("contiguous", "head_tail", "dual_chunk", "balanced")


def order_tokens(
    documents: Documents,
    world_size: int,
    layout: str,
    mask: PackedMask,
    *,
    chunk_size: int = 1,
    pad_to_multiple: int = 1,
    ranks_per_node: int | None = None,
    device: Device | None = None,
    model: Model | None = None,
) -> TokenOrder:
    """The token order of one row.

    Args:
        documents: the row's documents.
        world_size: ranks, >= 1.
        layout: one of LAYOUTS.
        mask: what attention sees. Only `balanced` depends on it.
        chunk_size: documents are cut only at multiples of it, counted from the document's start, so no chunk of a
            document is spread over ranks. Documents must start at multiples of it.
        pad_to_multiple: tokens per rank are rounded up to a multiple of it, with padding at the end of local rows.
        ranks_per_node: ranks that share fast links; None: all. Only for `balanced`, as what follows.
        device, model: what the cost model plans for.
    Raises:
        TypeError, ValueError: an unknown layout; a number that is no whole one or below 1; ranks_per_node that do not
            divide world_size; a document that starts inside a chunk; or chunks that `balanced` can't share out without
            more rows per rank than the tokens need.
    """
    _check(documents, world_size, layout, chunk_size, pad_to_multiple, ranks_per_node)
    if layout == "balanced":
        _check_equal_chunks(documents.total, world_size, chunk_size, pad_to_multiple)
        order = balanced(documents, world_size, mask, chunk_size, ranks_per_node, device, model)
    elif layout == "contiguous":
        order = contiguous(documents.total, world_size, chunk_size)
    else:
        spans = documents.spans if layout == "dual_chunk" else np.array([0, documents.total])
        order = dual_chunk(spans, world_size, chunk_size)
    return replace(order, pad_to_multiple=pad_to_multiple)


def _check(
    documents: Documents, world_size: int, layout: str, chunk_size: int, pad_to_multiple: int, per_node: int | None
) -> None:
    for name, value in (("world_size", world_size), ("chunk_size", chunk_size), ("pad_to_multiple", pad_to_multiple)):
        whole_number(name, value)
    if per_node is not None and world_size % whole_number("ranks_per_node", per_node):
        raise ValueError(f"ranks_per_node must divide world_size {world_size}, got {per_node}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    off = np.flatnonzero((documents.starts % chunk_size != 0) & (documents.lengths > 0))
    if off.size:
        raise ValueError(
            f"chunk_size {chunk_size} needs documents that start at multiples of it: document {off[0]} starts at "
            f"token {documents.starts[off[0]]}; pad the documents before it"
        )


def _check_equal_chunks(total: int, world_size: int, chunk_size: int, pad_to_multiple: int) -> None:
    """Ranks get whole chunks: that must not take more rows than equal tokens do."""
    rows = -(-total // (world_size * pad_to_multiple)) * pad_to_multiple
    needed = -(-total // (world_size * chunk_size)) * chunk_size
    if needed > rows and world_size > 1:
        raise ValueError(
            f"{total} tokens on {world_size} ranks are {rows} rows each, but whole chunks of {chunk_size} need "
            f"{needed}: chunk_size * world_size must divide the row's tokens, or pad_to_multiple be {chunk_size}"
        )
