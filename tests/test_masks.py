"""PackedMask against its definition, pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from tests.helpers.packs import MASKS, batches, grown, masks


@given(batches(max_rows=1, max_total=24), masks())
def test_materialize_by_definition(rows: tuple[Documents, ...], mask: PackedMask):
    documents = rows[0]
    ids, starts = documents.document_ids().tolist(), documents.starts.tolist()
    table = mask.materialize(documents)
    assert documents.spans is not None
    assert documents.nodes is not None
    spans = list(zip(documents.spans.starts, documents.spans.ends, strict=True))
    node_of, parents = documents.nodes.of_tokens(documents.total).tolist(), documents.nodes.parents.tolist()

    def path(node: int) -> list[int]:
        return [] if node < 0 else [node, *path(parents[node])]

    for q in range(documents.total):
        for k in range(documents.total):
            keep = not mask.packed or (ids[q] == ids[k] != -1)
            if mask.chunk is not None and keep:
                start = 0 if mask.chunk_of == "row" else starts[ids[q]]
                keep &= (q - start) // mask.chunk == (k - start) // mask.chunk
            keep &= mask.left is None or q - k <= mask.left
            keep &= mask.right is None or k - q <= mask.right
            if mask.spans:
                keep |= ids[q] == ids[k] and any(a <= min(q, k) and max(q, k) < b for a, b in spans)
            if mask.tree:
                keep &= node_of[k] in path(node_of[q])
            assert table[q, k] == keep


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_mask_that_looks_ahead_says_so(mask: PackedMask):
    seen = mask.materialize(grown(Documents.from_lengths([9, 7]), 0))
    assert mask.looks_ahead == np.triu(seen, 1).any()


def test_equal_masks_are_equal():
    assert PackedMask(causal=False, window=(None, 0)) == PackedMask()
    assert PackedMask(causal=False, window=(4, 0)) == PackedMask(window=(4, 7)) == PackedMask(window=(4, None))
    assert PackedMask(window=(-1, -1)) == PackedMask()
    assert PackedMask(causal=False, window=(None, None)) == PackedMask(causal=False) != PackedMask()
    assert PackedMask(chunk=4, window=(3, 0)) == PackedMask(chunk=4) != PackedMask(chunk=4, window=(2, 0))
    assert PackedMask(causal=False, chunk=4, window=(3, 5)) == PackedMask(causal=False, chunk=4)
    assert PackedMask(packed=False, chunk=4) == PackedMask(packed=False, chunk=4, chunk_of="row")
    assert PackedMask(chunk_of="row") == PackedMask()
    assert hash(PackedMask(window=(-1, 3))) == hash(PackedMask())


def test_says_what_it_is():
    assert str(PackedMask()) == "same document & causal"
    assert str(PackedMask(causal=False, packed=False)) == "whole row & full"
    assert str(PackedMask(causal=False, window=(2, None))) == "same document & window (2, ∞)"
    assert str(PackedMask(chunk=4)) == "same document & chunks of 4 & causal"
    assert str(PackedMask(chunk=4, chunk_of="row")) == "same document & chunks of 4 of the row & causal"
    assert str(PackedMask(spans=True)) == "same document & causal, or of one span"
    assert str(PackedMask(window=(3, 0), spans=True)) == "same document & causal & window (3, 0), or of one span"
    assert str(PackedMask(tree=True)) == "same document & own path of the tree & causal"
    assert str(PackedMask(window=(3, 0))) == "same document & causal & window (3, 0)"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": (-2, 0)}, r"window \(-1 or None: no limit\) must be >= -1, got -2"),
        ({"window": (1, 2, 3)}, "must be a pair"),
        ({"window": 3}, "must be a pair"),
        ({"window": (1.5, 0)}, "must be a whole number, got 1.5"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"chunk": 0}, "chunk must be >= 1, got 0"),
        ({"chunk": 4, "chunk_of": "batch"}, "chunk_of must be 'document' or 'row', got 'batch'"),
        ({"causal": False, "spans": True}, "spans or trees are causal"),
        ({"chunk": 4, "tree": True}, "have no chunks"),
        ({"window": (4, 0), "tree": True}, "neither a window nor spans"),
        ({"packed": None}, "packed must be True or False, got None"),
    ],
)
def test_bad_fields_are_errors(fields: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        PackedMask(**fields)
