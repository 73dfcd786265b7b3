"""How even the work of recurrent layers is under plans that balance attention alone; no GPU needed.

    python examples/bench/state_plans.py

Rows of web_mix, 32K tokens a GPU, each document a sequence of states: the mean of 8 rows. The rank with most of each,
over the mean of ranks: tokens, chunks of 64 tokens that states pass through (over tokens / 64, so that chunks which are
less than full count), pairs of attention. Cuts inside of documents, and the summaries that the rank receives which
receives most.
"""

from __future__ import annotations

import numpy as np
from packs import Pack, draw

from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.intervals import CHUNK, chunk_counts
from cp_rewrite.planning.plan_input import States
from cp_rewrite.planning.states import state_tables

ROWS = 8


def measures(ranks: int, layout: str, seed: int) -> tuple[float, ...]:
    """Numbers of the table for one row that is drawn with `seed`."""
    pack = Pack("web_mix", draw("web_mix", 32768 * ranks, seed))
    plan = plan_batch([pack.documents], ranks, layout, pack.mask)
    ids = pack.documents.document_ids()
    places = np.arange(len(ids)) - pack.documents.starts[ids]
    tokens, chunks, pairs, left, received = ([0] * ranks for _ in range(5))
    for rank in range(ranks):
        tables = state_tables(plan, States(resets=True), rank)
        pieces = tables["runs"][tables["runs"][:, 2] > -2]
        held = plan.local_indices(rank)[0]
        held = held[held >= 0]
        tokens[rank], pairs[rank] = int((ids[held] >= 0).sum()), int((places[held] + 1).sum())
        chunks[rank] = int(chunk_counts(pieces[:, 1] - pieces[:, 0]).sum())
        left[rank], received[rank] = int((pieces[:, 3] >= 0).sum()), int(tables["splits"][1].sum())
    mean = sum(tokens) / ranks
    even = max(tokens) / mean, CHUNK * max(chunks) / mean, max(pairs) * ranks / sum(pairs)
    return *even, sum(left), max(received)


def main() -> None:
    print("| GPUs | layout | tokens | chunks | attention | cuts | summaries received |\n|---|---|---|---|---|---|---|")
    for ranks in (2, 4, 8):
        for layout in ("balanced", "dual_chunk", "contiguous"):
            found = np.mean([measures(ranks, layout, seed) for seed in range(ROWS)], 0)
            cells = [*(f"{x:.3f}" for x in found[:3]), *(f"{x:.1f}" for x in found[3:])]
            print(f"| {ranks} | {layout} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
