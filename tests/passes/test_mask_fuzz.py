"""Random masks, right and wrong, against brute force: what the matcher accepts equals the mask on every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cp_rewrite import Documents, PackedMask, Reason
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.match.find_sites import match_sites
from tests.helpers.amount import drawn
from tests.passes.mask_spellings import (
    COUNTED,
    DOCUMENTS,
    ENDED,
    INF,
    LOWEST,
    OFFSETS,
    POSITIONS,
    STARTED,
    Packing,
    annotate,
    attend,
    capture,
    kept,
    tokens_of_documents,
)
from tests.passes.mask_spellings.atoms import Batch, Expression, atoms

pytestmark = pytest.mark.long

TOKENS = 14
MASK_REASONS = {r for r in Reason if r.name.startswith("MASK_")}


# -- batches -------------------------------------------------------------------------------------------------


def batches(packing: Packing, rows: list[list[int]], padded: bool) -> tuple[Batch, list[Documents]]:
    """Rows of TOKENS tokens; with `padded`, each row's last document is padding where the packing knows any, and where
    ids tell it the second one too."""
    lengths = [[*row, TOKENS - sum(row)] for row in rows]
    docs = [Documents.from_lengths(row) for row in lengths]
    positions = np.concatenate([np.concatenate([np.arange(n) for n in row]) for row in lengths]).reshape(-1, TOKENS)
    ids = np.stack([(d.document_ids() * 7 + 3) % 11 for d in docs])
    cu = np.cumsum([0, *lengths[0]])
    tokens = tokens_of_documents(torch.from_numpy(positions))
    if padded and packing in (DOCUMENTS, COUNTED):
        keep = [np.delete(np.arange(len(d.lengths)), [len(d.lengths) - 1, min(1, len(d.lengths) - 1)]) for d in docs]
        real = np.stack([np.isin(d.document_ids(), k) for d, k in zip(docs, keep, strict=True)])
        ids = np.where(real, ids, -1)
        tokens["counted_ids"] = tokens["counted_ids"] * torch.from_numpy(real)
        docs = [Documents(d.starts[k], d.lengths[k], TOKENS) for d, k in zip(docs, keep, strict=True)]
    if padded and packing == OFFSETS:
        cu = cu[:-1]
        docs = [Documents.from_lengths(row[:-1], TOKENS) for row in lengths]
    batch = {
        "input_ids": torch.arange(positions.size).view(positions.shape) * 5 % 7,
        "position_ids": torch.from_numpy(positions),
        "doc_ids": torch.from_numpy(ids),
        "cu_seqlens": torch.from_numpy(cu),
        **tokens,
    }
    return batch, docs


def rows_of(draw: Any, count: int) -> list[list[int]]:
    """Cuts of each row, the last document left out; lengths of 1 and of the whole row among them."""
    rows: list[list[int]] = []
    for _ in range(count):
        cuts = sorted(draw(st.sets(st.integers(1, TOKENS - 1), max_size=5)))
        rows.append(np.diff([0, *cuts]).tolist())
    return rows


def combine(children: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    def both(op: str, function: Any) -> Callable[[Expression, Expression], Expression]:
        return lambda x, y: Expression(f"({x} {op} {y})", lambda b: function(x.function(b), y.function(b)))

    def negated(x: Expression) -> Expression:
        return Expression(f"~{x}", lambda b: ~x.function(b))

    def multiplied(x: Expression, y: Expression) -> Expression:
        return Expression(f"({x} * {y})", lambda b: (x.function(b).int() * y.function(b).int()) != 0)

    ands = st.builds(both("&", torch.logical_and), children, children)
    return st.one_of(
        ands,
        ands,
        ands,
        st.builds(both("|", torch.logical_or), children, children),
        st.builds(both("^", torch.logical_xor), children, children),
        st.builds(multiplied, children, children),
        st.builds(negated, children),
    )


FORMS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("bool", lambda m: m),
    ("masked_fill -inf", lambda m: torch.zeros(m.shape).masked_fill(~m, -INF)),
    ("where min", lambda m: torch.where(m, 0.0, LOWEST)),
    ("(1 - m) * min", lambda m: (1 - m.float()) * LOWEST),
    ("log", lambda m: m.float().log()),
    ("two sums", lambda m: torch.where(m, 0.0, LOWEST) + torch.zeros(m.shape).masked_fill(~m, LOWEST)),
    ("-1", lambda m: torch.where(m, 0.0, -1.0)),
    ("kept 1", lambda m: torch.where(m, 1.0, -INF)),
    ("float", lambda m: m.float()),
    ("(1 - m) * -inf", lambda m: (1 - m.float()) * -INF),
    ("min kept", lambda m: torch.where(m, LOWEST, 0.0)),
]


@st.composite
def cases(draw: Any, packing: Packing) -> tuple[Packing, Expression, str, Any, list[tuple[Batch, list[Documents]]]]:
    wrong = draw(st.booleans())
    tree = draw(st.recursive(atoms(packing, wrong), combine, max_leaves=4))
    same = draw(atoms(packing, wrong=False).filter(lambda e: e.text.startswith("same")))
    if draw(st.integers(0, 4)):  # most random trees say nothing about documents
        inner = tree
        tree = Expression(f"({same} & {inner})", lambda b: same.function(b) & inner.function(b))
    form, make = draw(st.sampled_from(FORMS)) if draw(st.booleans()) else FORMS[0]
    padded = draw(st.booleans())
    seen = [batches(packing, rows_of(draw, 2), padded) for _ in range(4)]
    return packing, tree, form, make, seen


def check(case: tuple[Packing, Expression, str, Any, list[tuple[Batch, list[Documents]]]]) -> PackedMask | None:
    """Match the mask; compare it with brute force where it was accepted."""
    packing, tree, form, make, seen = case

    def mask(**b: Tensor) -> Tensor:
        return make(tree.function(b))

    gm = capture(lambda **b: attend(mask, **b), seen[0][0])
    sharding = annotate(packing)
    found = match_sites(gm, sharding, TokenAxis.read(gm, sharding).unified())
    sites, refusals = found.sites, found.refusals
    assert len(sites) + bool(refusals) == 1
    assert {r.reason for r in refusals} <= MASK_REASONS
    assert all(r.detail for r in refusals)
    for site in sites:
        for batch, docs in seen:
            assert_equal(site.mask, mask(**batch), packing, batch, docs, f"{tree} as {form}")
    return sites[0].mask if sites else None


def assert_equal(
    meaning: PackedMask, mask: Tensor, packing: Packing, batch: Batch, docs: list[Documents], text: str
) -> None:
    assert mask.dtype == torch.bool or not torch.isnan(mask).any(), text
    rows = 1 if packing == OFFSETS else 2
    whole = kept(mask).expand(2, 1, TOKENS, TOKENS) if mask.ndim > 2 else kept(mask).expand(2, 1, -1, -1)
    for row in range(rows):
        expected = meaning.materialize(docs[row] if meaning.packed else [TOKENS])
        real = docs[row].document_ids() >= 0
        difference = (whole[row, 0].numpy() != expected)[real]
        assert not difference.any(), f"{text} was read as {meaning}, documents {docs[row].lengths}"


PACKINGS = [POSITIONS, DOCUMENTS, OFFSETS, COUNTED, ENDED, STARTED]


@pytest.mark.shared
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: p.arg)
def test_accepted_masks_equal_brute_force(packing: Packing) -> None:
    """Many are accepted and many refused, or the drawing is bad."""
    verdicts: list[PackedMask | None] = []

    @drawn(200, quick=3)
    @given(cases(packing))
    def run(case: Any) -> None:
        verdicts.append(check(case))

    run()
    assert any(v is not None for v in verdicts)
    assert any(v is None for v in verdicts)
