"""All local rows of a rank as runs, one behind another, which is how chunked kernels take packed sequences.

Each piece is a run, and so are the rows between pieces, which hold fill or tokens of no sequence:

    pieces [3, 7) [9, 12) of 14 rows        runs  [0, 3) [3, 7) [7, 9) [9, 12) [12, 14)

Shapes: E runs, C chunks of all runs, N cut pieces.
"""

from __future__ import annotations

import numpy as np

from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.routes.route import Arrays
from cp_rewrite.planning.schedule import at_least

from .chunks import chunk_counts


def run_tables(starts: Int, lengths: Int, entered: Int, left: Int, rows: int, fill: int) -> Arrays:
    """The runs of pieces [start, start + length), none empty and none on another.

    Args:
        entered, left: of each piece that is cut at its start, and at its end, the number among the N cut ones; else -1.
        rows: of the rank. fill: the number of none, what `run_states` has where no state enters.
    Returns:
        runs: (E, 4) int64, the first row, the row behind the last, `entered` and `left`, both -2 of what is no piece. E
            is at least 2: empty runs fill it up.
        run_offsets: (E + 1,) int32, ascending to `rows`.
        run_chunks: (C, 2) int32, the run of each chunk, and the chunk's number in it; filled up to 2 with the last.
        run_states: (E,) int32, the cut piece whose state enters or leaves each run, else `fill`.
    """
    order = np.argsort(starts, kind="stable")
    first, stop = starts[order], (starts + lengths)[order]
    before, behind = np.append(0, stop), np.append(first, rows)
    gaps = np.flatnonzero(before < behind)
    none = np.full(len(gaps), -2)
    columns = (first, before[gaps]), (stop, behind[gaps]), (entered[order], none), (left[order], none)
    found = np.stack([np.concatenate(column) for column in columns], 1).astype(np.int64)
    found = found[np.argsort(found[:, 0], kind="stable")]
    found = np.concatenate([found, np.tile([[rows, rows, -2, -2]], (max(0, 2 - len(found)), 1))])
    counts = chunk_counts(found[:, 1] - found[:, 0])
    run = np.repeat(np.arange(len(found)), counts)
    chunks = np.stack([run, np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)], 1)
    cut = found[:, 2:].max(1)
    return {
        "runs": found,
        "run_offsets": np.append(found[:, 0], rows).astype(np.int32),
        "run_chunks": at_least(chunks.astype(np.int32), 2),
        "run_states": np.where(cut < 0, fill, cut).astype(np.int32),
    }
