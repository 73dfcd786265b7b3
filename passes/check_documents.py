"""Refuse attention that sees more than the packing tells apart: no mask came into it, or one of documents for trees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_rewrite.packing import PaddingMask, Tree, WholeRows
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.refusal import Reason, Refusal


@dataclass(frozen=True)
class Unmasked:
    """Attention that sees more than a query's document, or path of a tree, though nobody said so.

    Args:
        rows: what stands against batches with several documents in a row. trees: against trees with branches.
    """

    rows: tuple[Refusal, ...] = ()
    trees: tuple[Refusal, ...] = ()

    @staticmethod
    def of(state: State) -> Unmasked:
        sharding, packing = state.sharding, state.sharding.packing
        if sharding.across_documents or isinstance(packing, WholeRows | PaddingMask):
            return Unmasked()
        said = {sharding.assume_mask, *sharding.masks.values()}
        rows: list[Refusal] = []
        trees: list[Refusal] = []
        for site in state.sites:
            detail = f"attention is '{site.mask}', and rows hold several documents, which {packing!r} tells apart"
            if site.mask in said:
                continue
            if not site.mask.packed:
                rows.append(Refusal(Reason.DOCUMENTS_SEEN, detail, site.node))
            elif isinstance(packing, Tree) and not site.mask.tree:
                detail = f"attention is '{site.mask}', and documents are trees, whose paths {packing!r} tells apart"
                trees.append(Refusal(Reason.DOCUMENTS_SEEN, detail, site.node))
        return Unmasked(tuple(rows), tuple(trees))

    def against(self, plan: BatchPlan) -> list[Refusal]:
        """What stands against a batch."""
        branched = any(row.nodes is not None and (np.diff(row.nodes.parents) != 1).any() for row in plan.rows)
        several = branched or any((row.lengths > 0).sum() > 1 for row in plan.rows)
        return [*(self.rows if several else ()), *(self.trees if branched else ())]


def check_documents(state: State) -> State:
    """Attention must keep the documents of this batch apart; with a capacity, those of any: its steps are replayed."""
    found = Unmasked.of(state)
    captured = state.sharding.capacity is not None
    against = (*found.rows, *found.trees) if captured else found.against(state.plan.plan)
    return replace(state, refusals=(*state.refusals, *against))
