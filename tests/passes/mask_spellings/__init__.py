"""A catalogue of packed attention masks as people write them, right and subtly wrong, with what each one means.

Each spelling is a function of the batch: input_ids (B, T), position_ids (B, T), doc_ids (B, T), cu_seqlens (N + 1,).
"""

from tests.passes.mask_spellings import chunks, documents, offsets, positions, tokens, wrong
from tests.passes.mask_spellings.base import (
    COUNTED,
    DOCUMENTS,
    ENDED,
    INF,
    LOWEST,
    OFFSETS,
    POSITIONS,
    STARTED,
    Mask,
    Packing,
    Spelling,
    annotate,
    attend,
    capture,
    kept,
    make_batch,
    tokens_of_documents,
)
from tests.passes.mask_spellings.documents import ids_equal_and_index

SPELLINGS: list[Spelling] = [
    *documents.SPELLINGS,
    *positions.SPELLINGS,
    *offsets.SPELLINGS,
    *tokens.SPELLINGS,
    *chunks.SPELLINGS,
    *wrong.SPELLINGS,
]

__all__ = [
    "COUNTED", "DOCUMENTS", "ENDED", "INF", "LOWEST", "OFFSETS", "POSITIONS", "SPELLINGS", "STARTED", "Mask", "Packing",
    "Spelling", "annotate", "attend", "capture", "ids_equal_and_index", "kept", "make_batch", "tokens_of_documents",
]  # fmt: skip
