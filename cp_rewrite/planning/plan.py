"""The plan of one row and what it costs: `cp.plan`, for people who choose a layout and an exchange.

`draw_plan` makes a picture of a `Plan`, the only one to need matplotlib, which may be missing; `compare` makes a table
of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from cp_rewrite.arguments import whole_number
from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask

from .batch_plan import BatchPlan
from .choose_exchange import exchange_seconds, needed_bytes, scattered_bytes
from .cost.devices import Device, Model
from .cost.load import Load, from_nodes, load_of
from .cost.states import StateLayers
from .cost.tiles import imbalance
from .intervals import Int
from .layouts.by_name import lay_out
from .layouts.options import LayoutOptions
from .layouts.share_out import Slices
from .layouts.token_order import TokenOrder
from .names import over_part
from .routes.grid import inner_sizes, outer_schedule
from .schedule import Schedule, build


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


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of one row under one mask, and what it costs. Pickles; made by `plan`.

    Args:
        documents: of the row.
        layout: its name.
        order: who owns which tokens.
        mask: what attention sees.
        model, device: what costs are predicted for.
        ranks_per_node: ranks that share fast links.
        states: layers of a hybrid beside those of attention.
    """

    documents: Documents
    layout: str
    order: TokenOrder
    mask: PackedMask
    model: Model
    device: Device
    ranks_per_node: int
    states: StateLayers | None = None

    @property
    def world_size(self) -> int:
        return self.order.world_size

    @cached_property
    def schedule(self) -> Schedule:
        """Pieces and routes of all ranks."""
        return build([self.documents], [self.order], self.mask)

    @cached_property
    def load(self) -> Load:
        """Work of ranks, device and links."""
        whole = float(Slices.of_row(self.documents, self.mask).work.sum())
        return load_of(self.schedule, whole)

    @property
    def imbalance(self) -> float:
        """Work of the rank that has most over the mean of ranks, in kernel tiles."""
        return imbalance(self.load.tiles)

    @property
    def recv_rows(self) -> Int:
        """(P,) int64 KV rows that each rank receives from others, each row once."""
        return self.load.received.sum(1)

    @property
    def node_rows(self) -> Int:
        """(P,) int64: of `recv_rows`, those from other nodes."""
        return from_nodes(self.load.received, self.ranks_per_node)[1]

    @cached_property
    def places(self) -> Mapping[int, Load]:
        """Ranks of a node over which `a2a+…` scatters heads -> the load of places of so many ranks, each one owner of
        its ranks' tokens. Nothing where there is one node."""
        if not 1 < self.ranks_per_node < self.world_size:
            return {}
        batch = BatchPlan((self.documents,), (self.order,), self.world_size)
        sizes = inner_sizes(self.ranks_per_node, self.model.heads[1])
        return {inner: load_of(outer_schedule(batch, self.mask, inner)) for inner in sizes}

    @property
    def moved_bytes(self) -> Mapping[str, tuple[float, float]]:
        """Bytes received in a forward, mean over ranks: exchange -> (from the rank's own node, from other nodes).

        For `needed`, and for `a2a+needed` where `seconds` has it.
        """
        moved = {"needed": needed_bytes(self.load, self.model, self.ranks_per_node)}
        for inner, places in self.places.items():
            name = "a2a+needed" if inner == self.ranks_per_node else over_part("a2a+needed", inner)
            if name in self.seconds:
                moved[name] = scattered_bytes(self.load, places, self.model, self.ranks_per_node)
        return {name: (float(inside.mean()), float(across.mean())) for name, (inside, across) in moved.items()}

    @property
    def recv_fraction(self) -> tuple[float, float]:
        """(mean, maximum) over ranks of the KV rows received, as a share of those that an all-gather would receive."""
        gathered = max(1, (self.world_size - 1) * self.order.local_size)
        return float(self.recv_rows.mean()) / gathered, float(self.recv_rows.max()) / gathered

    @property
    def expanded_rows(self) -> Int:
        """(P,) int64 KV rows that each rank's kernel reads, copies included."""
        return self.load.expanded

    @property
    def pieces(self) -> Int:
        """(P,) int64 pieces of each rank."""
        return np.diff(self.schedule.piece_bounds)

    @property
    def fill_rows(self) -> int:
        """Local rows, over all ranks, that hold no token: fill."""
        return self.order.fill_rows

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Predicted seconds of one layer's attention, forward and backward, by exchange that can be asked for; with
        what the rest of the layer spends on local rows beyond an even share of the tokens. Over several nodes with
        `a2a+…`, heads scattered inside of nodes and keys between them; with few key heads also `a2a:2+…`, heads
        scattered over so many ranks of a node."""
        seconds = exchange_seconds(self.load, self.device, self.model, self.ranks_per_node, self.places)
        return {name: time + self.state_seconds for name, time in seconds.items() if name != "push"}

    @cached_property
    def state_seconds(self) -> float:
        """Seconds that `states` take beside a layer of attention; they are part of `seconds`."""
        if self.states is None:
            return 0.0
        return self.states.seconds(self.documents, self.order, self.device, self.ranks_per_node)

    @property
    def exchange(self) -> str:
        """The exchange with the least predicted time."""
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def rank_of(self) -> Int:
        """(T,) int64: the owner of each token."""
        return self.order.rank_of()

    def local_order(self, rank: int) -> Int:
        """(T_l,) int64: the token of the row in each local row of a rank, -1 for the fill at its end.

        Raises:
            TypeError, ValueError: `rank` is no whole number, or none of the ranks.
        """
        if whole_number("rank", rank, 0) >= self.world_size:
            raise ValueError(f"rank must be below world_size {self.world_size}, got {rank}")
        return self.order.local_indices(rank)

    def plot(self, path: str | Path | IO[bytes]) -> None:
        """Draw who owns what, work and rows received per rank, into an image file; PNG into an open one.

        Raises:
            ImportError: matplotlib is not installed.
        """
        draw_plan(self, path)

    def __str__(self) -> str:
        tiles = self.load.tiles / max(1e-9, float(self.load.tiles.mean()))
        mean, worst = self.recv_fraction
        nodes = f" (of nodes {imbalance(self.places[self.ranks_per_node].tiles):.3f})" if self.places else ""
        lines = [
            f"{self.layout}: {len(self.documents.lengths)} documents, {self.documents.total} tokens on "
            f"{self.world_size} ranks, {self.mask}",
            f"imbalance {self.imbalance:.3f}{nodes}, received {mean:.1%} of an all-gather (worst rank {worst:.1%}), "
            f"{self.fill_rows} rows of fill",
            "rank   tokens     work  received  expanded  pieces",
        ]
        columns = zip(self.order.sizes, tiles, self.recv_rows, self.expanded_rows, self.pieces, strict=True)
        for rank, (tokens, work, received, expanded, pieces) in enumerate(columns):
            lines.append(f"{rank:4d} {tokens:8d} {work:8.3f} {received:9d} {expanded:9d} {pieces:7d}")
        if self.ranks_per_node < self.world_size:
            for name, (inside, across) in self.moved_bytes.items():
                lines.append(
                    f"{name}: a rank receives {inside / 1e6:.1f} MB inside its node of {self.ranks_per_node}, "
                    f"{across / 1e6:.1f} MB from other nodes, per layer and forward"
                )
        predicted = ", ".join(f"{name} {1e3 * s:.2f}" for name, s in self.seconds.items())
        beside = f", {1e3 * self.state_seconds:.2f} of them states" if self.states else ""
        lines.append(f"predicted ms per layer on {self.device.name}: {predicted}; best: {self.exchange}{beside}")
        return "\n".join(lines)


def plan(
    lengths: Sequence[int] | Documents,
    world_size: int,
    layout: str = "balanced",
    mask: PackedMask | None = None,
    heads: tuple[int, int] = (64, 8),
    head_dim: int = 128,
    *,
    total: int | None = None,
    chunk_size: int = 1,
    pad_to_multiple: int = 1,
    device: str | Device = "h200",
    ranks_per_node: int | None = None,
    states: StateLayers | None = None,
) -> Plan:
    """Plan one row of packed documents. Host code only: no GPU, no process group.

    Args:
        lengths: document lengths in tokens, one after another from the row's start; or Documents.
        world_size: ranks.
        layout: `contiguous`, `head_tail`, `dual_chunk` or `balanced`.
        mask: what attention sees; by default causal within documents.
        heads: (query heads, key/value heads), for predicted times.
        head_dim: of queries, keys and values.
        total: tokens of the row where it is longer than its documents: the rest is padding.
        chunk_size: documents are cut only at multiples of it, counted from the document's start. Tokens per rank stay
            equal, so documents must start at multiples of it and chunk_size * world_size divide the row's tokens, or
            `pad_to_multiple` be a multiple of it. The simple layouts pad ranks as much as their chunks need.
        pad_to_multiple: tokens per rank are rounded up to a multiple of it, with fill at the end.
        device: name of a device, a file made by `calibrate`, or a Device.
        ranks_per_node: ranks that share fast links; None: all.
        states: layers of a hybrid beside each layer of attention, whose time counts, too.
    Raises:
        TypeError, ValueError: lengths that are no whole numbers, are negative or exceed `total`, no tokens, an unknown
            layout or device, a mask that is none, bad heads, a number below 1, or chunks that can't be had with equal
            tokens per rank.
    """
    documents = _documents(lengths, total)
    mask = PackedMask() if mask is None else mask
    if not isinstance(mask, PackedMask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"mask must be a cp_rewrite.PackedMask or None, got {mask!r}")
    model = Model.of(heads, head_dim)
    speeds = device if isinstance(device, Device) else Device.named(device)
    options = LayoutOptions(chunk_size, pad_to_multiple, ranks_per_node, speeds, model, states=states)
    order = lay_out(documents, world_size, layout, mask, options)
    return Plan(documents, layout, order, mask, model, speeds, options.node_size(world_size), states)


def _documents(lengths: Sequence[int] | Documents, total: int | None) -> Documents:
    if not isinstance(lengths, Documents):
        documents = Documents.from_lengths(lengths, total)
    elif total in (None, lengths.total):
        documents = lengths
    else:
        raise ValueError(f"total is {total}, but the Documents given as lengths have {lengths.total} tokens")
    if documents.total < 1:
        raise ValueError("lengths hold no token: nothing to plan")
    return documents


def compare(plans: Mapping[str, Plan]) -> str:
    """A table of plans of one row, the cheapest first, with the best exchange for each and why."""
    lines = ["layout      imbalance  received  worst  expanded  pieces     fill  exchange        ms  why"]
    for name, p in sorted(plans.items(), key=lambda item: min(item[1].seconds.values())):
        mean, worst = p.recv_fraction
        best = p.exchange
        others = ", ".join(f"{e} {1e3 * s:.2f}" for e, s in p.seconds.items() if e != best)
        lines.append(
            f"{name:10s} {p.imbalance:10.3f} {mean:9.1%} {worst:6.1%} {p.expanded_rows.max():9d} "
            f"{p.pieces.max():7d} {p.fill_rows:8d}  {best:10s} {1e3 * p.seconds[best]:7.3f}  against {others}"
        )
    return "\n".join(lines)
