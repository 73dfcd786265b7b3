"""Matching of a model that a test writes: packed rows of documents, masked as each test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import Tensor

import cp_rewrite as cp
from cp_rewrite import Reason, Refusal
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.match import find_sites
from cp_rewrite.passes.match.find_sites import Found, match_sites
from cp_rewrite.passes.values.state import Site
from tests.passes.mask_spellings import DOCUMENTS, annotate, capture, ids_equal_and_index, make_batch

BATCH = make_batch([[5, 3, 4], [5, 1, 6]])
PACKED = ids_equal_and_index
Model = Callable[..., Any]


def heads(batch: dict[str, Tensor], count: int = 2) -> Tensor:
    """(B, count, T, 4), no weights in it."""
    return batch["input_ids"][:, None, :, None].float().expand(-1, count, -1, 4) * 1.0


def match_model(model: Model, sharding: cp.Sharding | None = None, **options: Any) -> list[Site | Refusal]:
    batch = options.pop("batch", BATCH)
    gm = capture(model, batch, **options)
    sharding = sharding or annotate(DOCUMENTS)
    tokens = TokenAxis.read(gm, sharding).unified()
    found = match_sites(gm, sharding, tokens)
    return [*found.sites, *tokens.refusals, *found.refusals]


def match_each(model: Model, sharding: cp.Sharding | None = None, **options: Any) -> list[Found]:
    """Findings for each attention node by itself, in graph order: many models beside each other are one graph."""
    each: list[Found] = []
    match = find_sites._Matcher.match

    def record(matcher: Any, *node: Any) -> Found:
        each.append(match(matcher, *node))
        return each[-1]

    with mock.patch.object(find_sites._Matcher, "match", record):
        match_model(model, sharding, **options)
    return each


def meaning(found: Found) -> Any:
    """The mask of a site, or the set of reasons why there is none."""
    return found.mask if isinstance(found, Site) else {refusal.reason for refusal in found}


def the_site(model: Model, sharding: cp.Sharding | None = None, **options: Any) -> Site:
    (site,) = match_model(model, sharding, **options)
    assert isinstance(site, Site), site
    return site


def reasons(model: Model, sharding: cp.Sharding | None = None, **options: Any) -> set[Reason]:
    found = match_model(model, sharding, **options)
    assert all(isinstance(f, Refusal) for f in found)
    return {f.reason for f in found if isinstance(f, Refusal)}
