"""A picture of a plan. The only file that imports matplotlib, and only to draw: it may be missing."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # plan.py imports this file
    from .plan import Plan


def draw_plan(plan: Plan, path: str | Path | IO[bytes]) -> None:
    """Draw who owns which tokens of which document, and each rank's work, received and expanded rows, into a file.

        row     [ 1: 3104 ][   2: 3200   ][3: 160]     documents: number and length in tokens
        rank 0  [ own    ]      [ own ]                the document's colour
                     ---                               keys that come from other ranks, below

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # it may be missing
    except ImportError as error:
        raise ImportError("plotting needs matplotlib: pip install 'cp_rewrite[plot]'") from error
    figure = Figure(figsize=(11, 2.4 + 0.36 * plan.world_size), layout="constrained")
    grid = figure.add_gridspec(1, 3, width_ratios=[5, 1, 1.2])
    _draw_owners(figure.add_subplot(grid[0]), plan)
    ranks = np.arange(plan.world_size)
    work = figure.add_subplot(grid[1])
    work.barh(ranks, plan.load.tiles / plan.load.tiles.mean(), color="#4c78a8")
    work.axvline(1.0, color="black", linewidth=0.8)
    work.set_title("work / mean", fontsize=9)
    rows = figure.add_subplot(grid[2])
    rows.barh(ranks, plan.expanded_rows, color="#dddddd", label="read by the kernel")
    rows.barh(ranks, plan.recv_rows, color="#333333", height=0.25, label="from other ranks")
    rows.set_title("rows of keys", fontsize=9)
    figure.legend(*rows.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=7, frameon=False)
    for axes in (work, rows):
        axes.set_ylim(plan.world_size - 0.5, -1.1)
        axes.set_yticks([])
        axes.tick_params(labelsize=7)
    figure.suptitle(
        f"{plan.layout}, {plan.mask}: {plan.documents.total} tokens on {plan.world_size} ranks, "
        f"imbalance {plan.imbalance:.3f}, received {plan.recv_fraction[0]:.0%} of an all-gather",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _draw_owners(axes: Any, plan: Plan) -> None:
    """The row's documents on top, then one bar per rank; below it what it receives. Grey tokens are in no document."""
    _draw_documents(axes, plan)
    for rank, (own, received) in enumerate(zip(plan.order.intervals, _received(plan), strict=True)):
        axes.broken_barh([(a, b - a) for a, b in own.tolist()], (rank - 0.4, 0.55), color="#eeeeee")
        _draw_runs(axes, plan, own, (rank - 0.4, 0.55))
        _draw_runs(axes, plan, received, (rank + 0.22, 0.16), alpha=0.5)
    axes.set_ylim(plan.world_size - 0.5, -1.1)
    axes.set_xlim(0, plan.documents.total)
    axes.set_yticks([-0.8, *range(plan.world_size)], ["row", *range(plan.world_size)])
    axes.set_ylabel("rank", fontsize=9)
    axes.set_title("tokens of the row; below each rank's own: keys from other ranks", fontsize=9)
    axes.tick_params(labelsize=7)


def _draw_documents(axes: Any, plan: Plan) -> None:
    """Number and length of each document, where there is room for them."""
    whole = np.array([[0, plan.documents.total]])
    _draw_runs(axes, plan, whole, (-1.0, 0.4))
    for i, (start, length) in enumerate(zip(plan.documents.starts, plan.documents.lengths, strict=True), 1):
        if length > 0.08 * plan.documents.total:
            axes.text(start + length / 2, -0.8, f"{i}: {length}", ha="center", va="center", fontsize=7, color="white")


def _draw_runs(axes: Any, plan: Plan, runs: Any, place: tuple[float, float], alpha: float = 1.0) -> None:
    """Runs of tokens [start, stop), cut at documents, each part in its document's colour."""
    starts = np.asarray(plan.documents.starts)
    stops = starts + np.asarray(plan.documents.lengths)
    for doc, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        inside = [(max(a, start), min(b, stop)) for a, b in runs.tolist() if a < stop and b > start]
        bars = [(a, b - a) for a, b in inside if a < b]
        axes.broken_barh(
            bars, place, facecolors=_COLORS[doc % len(_COLORS)], alpha=alpha, edgecolor="white", linewidth=0.2
        )


def _received(plan: Plan) -> list[Any]:
    """For each rank, the runs of tokens, (N, 2), whose keys it reads and does not own."""
    owner, found = plan.rank_of, list[Any]()
    pieces, starts, stops = plan.schedule.pieces.key_runs
    reader = plan.schedule.pieces.rank[pieces]
    for rank in range(plan.world_size):
        edges = np.zeros(len(owner) + 1, np.int64)
        np.add.at(edges, starts[reader == rank], 1)
        np.add.at(edges, stops[reader == rank], -1)
        foreign = (np.cumsum(edges[:-1]) > 0) & (owner != rank)
        found.append(np.flatnonzero(np.diff(foreign, prepend=False, append=False)).reshape(-1, 2))
    return found


_COLORS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#f58518", "#439894", "#9d755d", "#d6616b", "#6b6ecf")
"""Colors of documents, in turns: neighbours differ, and white text can be read on each."""
