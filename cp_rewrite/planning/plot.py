"""A picture of a plan. The only file that imports matplotlib, and only to draw: it may be missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # plan.py imports this file
    from .plan import Plan


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw who owns which tokens of which document, and each rank's work, received and expanded rows, into a file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # it may be missing
    except ImportError as error:
        raise ImportError("plotting needs matplotlib: pip install 'cp_rewrite[plot]'") from error
    figure = Figure(figsize=(11, 2.2 + 0.28 * plan.world_size), layout="constrained")
    grid = figure.add_gridspec(1, 3, width_ratios=[5, 1, 1.2])
    colors = _colors(len(plan.documents.lengths))
    _draw_owners(figure.add_subplot(grid[0]), plan, colors)
    ranks = np.arange(plan.world_size)
    work = figure.add_subplot(grid[1])
    work.barh(ranks, plan.load.tiles / plan.load.tiles.mean(), color="#4c78a8")
    work.axvline(1.0, color="black", linewidth=0.8)
    work.set_title("work / mean", fontsize=9)
    rows = figure.add_subplot(grid[2])
    rows.barh(ranks, plan.expanded_rows, color="#dddddd", label="expanded")
    rows.barh(ranks, plan.recv_rows, color="#e45756", label="received")
    rows.legend(fontsize=7)
    rows.set_title("KV rows", fontsize=9)
    for axes in (work, rows):
        axes.set_ylim(plan.world_size - 0.5, -0.5)
        axes.set_yticks([])
        axes.tick_params(labelsize=7)
    figure.suptitle(
        f"{plan.layout}, {plan.mask}: {plan.documents.total} tokens on {plan.world_size} ranks, "
        f"imbalance {plan.imbalance:.3f}, received {plan.recv_fraction[0]:.0%} of an all-gather",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _draw_owners(axes: Any, plan: Plan, colors: Any) -> None:
    """One bar per rank along the row; colour tells the document; grey tokens are in none."""
    for rank, intervals in enumerate(plan.order.intervals):
        axes.broken_barh([(a, b - a) for a, b in intervals.tolist()], (rank - 0.4, 0.8), color="#eeeeee")
    pieces = plan.schedule.pieces
    token = _token_of_row(plan)
    doc = np.searchsorted(plan.documents.starts, token, side="right") - 1
    for rank in range(plan.world_size):
        mine = pieces.rank == rank
        bars = list(zip(token[mine].tolist(), (pieces.q1 - pieces.q0)[mine].tolist(), strict=True))
        axes.broken_barh(bars, (rank - 0.4, 0.8), facecolors=colors[doc[mine]], edgecolor="white", linewidth=0.2)
    axes.set_ylim(plan.world_size - 0.5, -0.5)
    axes.set_xlim(0, plan.documents.total)
    axes.set_yticks(np.arange(plan.world_size))
    axes.set_ylabel("rank", fontsize=9)
    axes.set_title("tokens of the row, one colour per document", fontsize=9)
    axes.tick_params(labelsize=7)


def _token_of_row(plan: Plan) -> Any:
    """(N,) the token of the row at which each piece starts."""
    # Segments by owner and local row: as sorted numbers `owner x local rows + source`, to find each piece's among them.
    starts, _, owners, sources = plan.schedule.segments
    by_owner = np.lexsort((sources, owners))
    pieces, size = plan.schedule.pieces, plan.schedule.local_rows
    key = (owners * size + sources)[by_owner]
    at = np.searchsorted(key, pieces.rank * size + pieces.q0, side="right") - 1
    segment = by_owner[at]
    return starts[segment] + pieces.q0 - sources[segment]


def _colors(count: int) -> Any:
    """(count, 4) colours; neighbours differ."""
    from matplotlib import colormaps  # it may be missing

    return colormaps["tab20"](np.arange(max(count, 1)) * 7 % 20)
