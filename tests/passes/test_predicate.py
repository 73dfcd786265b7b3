"""Meanings of masks: the catalogue of spellings, and the steps that read them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import sympy
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite import Documents, PackedMask, Reason, Refusal
from cp_rewrite.passes.graph.canonicalize import canonicalize
from cp_rewrite.passes.graph.nodes import Scope, written_nodes
from cp_rewrite.passes.predicate.cells import holds, turning_points
from cp_rewrite.passes.predicate.rules import reshape, split_index
from cp_rewrite.passes.predicate.symbolic import ZERO, Select, SymTensor, compare, outer_select
from cp_rewrite.passes.predicate.worlds import PK, PQ, Cell, K, Q, World, distances
from cp_rewrite.passes.values.state import Site
from tests.helpers.matching import BATCH, match_each, match_model, meaning
from tests.passes.mask_spellings import (
    DOCUMENTS,
    OFFSETS,
    SPELLINGS,
    Spelling,
    annotate,
    attend,
    capture,
    kept,
    make_batch,
)

PROVEN = [s for s in SPELLINGS if isinstance(s.means, PackedMask)]
REFUSED = [s for s in SPELLINGS if s not in PROVEN]


FIXED = frozenset({"constant_blocks"})
"""Masks of one token count, which the masks beside them would have too."""


def in_groups(spellings: list[Spelling], most: int = 6) -> list[tuple[Spelling, ...]]:
    """Groups of spellings of one packing: a model of several costs a third of as many models."""
    of_packing: dict[Any, list[Spelling]] = {}
    for spelling in spellings:
        fixed = spelling.name if spelling.mask.__name__ in FIXED else ""
        of_packing.setdefault((spelling.packing, fixed), []).append(spelling)
    return [tuple(group[i : i + most]) for group in of_packing.values() for i in range(0, len(group), most)]


@pytest.mark.shared
@pytest.mark.long
@pytest.mark.parametrize("spellings", in_groups(PROVEN), ids=lambda group: "+".join(s.name for s in group))
def test_every_proven_spelling_means_what_it_says(spellings: tuple[Spelling, ...]) -> None:
    def model(**batch: Tensor) -> list[Tensor]:
        return [attend(spelling.mask, **batch) for spelling in spellings]

    assert [meaning(f) for f in match_each(model, annotate(spellings[0].packing))] == [s.means for s in spellings]


@pytest.mark.shared
@pytest.mark.long
@pytest.mark.parametrize("spellings", in_groups(REFUSED), ids=lambda group: "+".join(s.name for s in group))
def test_every_refused_spelling_has_its_reason(spellings: tuple[Spelling, ...]) -> None:
    def model(**batch: Tensor) -> list[Tensor]:
        return [attend(spelling.mask, **batch) for spelling in spellings]

    assert [meaning(f) for f in match_each(model, annotate(spellings[0].packing))] == [{s.means} for s in spellings]


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_every_spelling_alone_is_read_so(spelling: Spelling) -> None:
    def model(**batch: Tensor) -> Tensor:
        return attend(spelling.mask, **batch)

    (found,) = match_each(model, annotate(spelling.packing))
    assert meaning(found) in (spelling.means, {spelling.means})


@pytest.mark.parametrize("spelling", PROVEN, ids=lambda s: s.name)
def test_the_catalogue_tells_the_truth_about_itself(spelling: Spelling) -> None:
    for lengths in ([[5, 3, 4], [5, 3, 4]], [[1, 1, 7, 3], [12]], [[12], [1, 11]]):
        batch = make_batch(lengths)
        mask = kept(spelling.mask(**batch))
        whole = mask.expand(len(lengths), 1, *mask.shape[-2:]) if mask.ndim > 2 else mask.expand(2, 1, *mask.shape)
        rows = lengths[:1] if spelling.packing == OFFSETS else lengths
        for row, lens in enumerate(rows):
            assert isinstance(spelling.means, PackedMask)
            expected = spelling.means.materialize(Documents.from_lengths(lens))
            assert whole[row, 0].numpy().tolist() == expected.tolist()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("low", "drops"), [(-65504.0, True), (-1e9, True), (-3e4, False), (-1e4, False)])
def test_additive_masks_drop_what_no_logit_can_outweigh(dtype: torch.dtype, low: float, drops: bool) -> None:
    def model(**b: Tensor) -> Tensor:
        x = b["input_ids"][:, None, :, None].to(dtype).expand(-1, 2, -1, 4)
        keep = (b["doc_ids"][:, None, :, None] == b["doc_ids"][:, None, None, :]).tril()
        mask = torch.zeros_like(keep, dtype=dtype).masked_fill(~keep, max(low, torch.finfo(dtype).min))
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    (found,) = match_model(model, annotate(DOCUMENTS))
    if drops:
        assert isinstance(found, Site)
        assert found.mask == PackedMask()
        return
    assert isinstance(found, Refusal)
    assert found.reason is Reason.MASK_NOT_PACKED
    assert f"adds {torch.tensor(low, dtype=dtype):g} to the logits" in found.detail


def test_refusals_name_the_op_and_its_line() -> None:
    def model(**batch: Tensor) -> Tensor:
        ids = batch["doc_ids"].float().sin()
        return attend(lambda **_: ids[:, None, :, None] == ids[:, None, None, :], **batch)

    (refusal,) = match_model(model, annotate(DOCUMENTS))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.MASK_UNSUPPORTED_OP
    assert "aten.sin" in refusal.detail
    assert "test_predicate.py" in refusal.where
    assert "sin()" in refusal.where


def test_all_reasons_at_once() -> None:
    def model(**batch: Tensor) -> Tensor:
        a, b = batch["doc_ids"].float().sin(), batch["input_ids"]
        same = (a[:, :, None] == a[:, None, :]) & (b[:, :, None] == b[:, None, :])
        return attend(lambda **_: same[:, None], **batch)

    reasons = {f.reason for f in match_model(model, annotate(DOCUMENTS)) if isinstance(f, Refusal)}
    assert reasons == {Reason.MASK_UNSUPPORTED_OP, Reason.MASK_WRONG_SOURCE}


def test_padding_between_documents_needs_causality() -> None:
    batch = {**BATCH, "cu_padded": torch.tensor([0, 6, 9, 12])}
    packing = cp.CuSeqlens("cu_seqlens", padded_arg="cu_padded")

    def ids(b: dict[str, Tensor]) -> Tensor:
        n = torch.bucketize(torch.arange(b["input_ids"].shape[1]), b["cu_padded"], right=True)
        return n[:, None] == n[None, :]

    def causal(**b: Tensor) -> Tensor:
        return attend(lambda **c: ids(c).tril(), **b)

    def full(**b: Tensor) -> Tensor:
        return attend(lambda **c: ids(c), **b)

    (site,) = match_model(causal, annotate(packing), batch=batch)
    (refusal,) = match_model(full, annotate(packing), batch=batch)
    assert isinstance(site, Site)
    assert site.mask == PackedMask()
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.MASK_NOT_PACKED


# -- the steps -----------------------------------------------------------------------------------------------


def test_slices_are_pure_aten() -> None:
    def model(**batch: Tensor) -> Tensor:
        mask = torch.zeros(12, 12)
        mask.masked_fill_(torch.ones(12, 12, dtype=torch.bool).triu(1), float("-inf"))
        mask[0] += 1
        return attend(lambda **_: mask, **batch)

    gm = capture(model, BATCH, dynamic=False)
    site = next(n for n in gm.graph.nodes if "scaled_dot" in n.name)
    canonical = canonicalize(Scope(gm), site.kwargs["attn_mask"], lambda *_: False)
    names = [str(call.func) for call in canonical.calls if "select" in str(call.func) or "fill" in str(call.func)]
    assert "aten.masked_fill.Scalar" in names
    assert "aten.select_scatter.default" in names
    assert not canonical.leaves
    assert all(isinstance(call.node, fx.Node) for call in canonical.calls)


def test_comparisons_see_through_choices() -> None:
    x, c = sympy.symbols("x c", integer=True)
    value: Any = Select(sympy.Gt(c, 0), sympy.Integer(1), sympy.Integer(0))
    assert compare("ne", value, ZERO) == sympy.Gt(c, 0)
    assert compare("eq", value, ZERO) == sympy.Le(c, 0)
    assert outer_select(x + 2 * value) == value
    assert compare("lt", sympy.Integer(3), sympy.Integer(4)) == sympy.true
    assert compare("eq", -sympy.oo, -sympy.oo) == sympy.true


def test_reshape_splits_what_it_joined() -> None:
    b, t = sympy.symbols("b t", integer=True, nonnegative=True)
    rows, tokens = sympy.symbols("B T", integer=True, positive=True)
    sizes = {b: rows, t: tokens}
    x = SymTensor((rows, tokens), torch.int64, lambda i: sympy.Function("x")(*i))
    flat = reshape(x, (rows * tokens,), sizes)
    back = reshape(flat, (rows, sympy.Integer(1), tokens), sizes)
    assert back.at((b, ZERO, t)) == sympy.Function("x")(b, t)
    assert split_index(b * tokens + t, tokens, sizes) == (b, t)


def test_distances_cover_the_integers_once() -> None:
    spans = distances({0, 3})
    assert spans == [(-float("inf"), -1), (0, 0), (1, 2), (3, 3), (4, float("inf"))]
    one = sympy.S.One
    assert turning_points({Q: one, K: -one, one: sympy.Integer(-3)}) == {3}
    assert turning_points({PQ: one, PK: -one}) == {0}
    assert turning_points({PQ: one, K: -one}) == set()


@pytest.mark.parametrize(
    ("op", "terms", "world", "span", "expected"),
    [
        ("GreaterThan", {Q: 1, K: -1}, World.SAME, (1, 4), True),
        ("GreaterThan", {PQ: 1, PK: -1}, World.SAME, (1, 4), True),
        ("GreaterThan", {PQ: 1, PK: -1}, World.DIFFERENT, (1, 4), None),
        ("Equality", {PQ: 1}, World.ADJACENT, (1, 1), True),
        ("Equality", {PQ: 1}, World.SAME, (1, 1), False),
        ("Equality", {PQ: 1, PK: -1, sympy.S.One: -1}, World.ADJACENT, (1, 1), False),
        ("GreaterThan", {K: 1}, World.DIFFERENT, (1, 4), True),
        ("Equality", {Q: 1, PQ: -1, K: -1, PK: 1}, World.DIFFERENT, (1, 4), False),
        ("Equality", {Q: 1, PQ: -1, K: -1, PK: 1}, World.SAME, (1, 4), True),
        ("StrictLessThan", {PQ: 1, K: -1}, World.SAME, (1, 4), None),
    ],
)
def test_relations_in_worlds(op: str, terms: Any, world: World, span: Any, expected: bool | None) -> None:
    linear = {term: sympy.Integer(c) for term, c in terms.items()}
    assert holds(op, linear, Cell(world, span), ()) is expected


def test_operators_named_like_in_place_ops_are_pure() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert written_nodes(graph.call_function(operator.and_, (x, y))) == []
    assert written_nodes(graph.call_method("__invert__", (x,))) == []
    assert written_nodes(graph.call_function(operator.iadd, (x, y))) == [x]
    assert written_nodes(graph.call_method("masked_fill_", (x, y, 0.0))) == [x]
    assert written_nodes(graph.call_function(F.relu, (x,), {"inplace": True})) == [x]
    assert written_nodes(graph.call_function(torch.add, (x, x), {"out": y})) == [y]
    assert written_nodes(graph.call_function(torch.ops.aten.copy_, (x, y))) == [x]
    assert written_nodes(graph.call_function(torch.ops.aten.add.out, (x, x), {"out": y})) == [y]
