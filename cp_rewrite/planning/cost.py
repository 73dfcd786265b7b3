"""What attention under a schedule costs on a device: kernel tiles, bytes on links, rows copied, launches.

    forward   = slowest rank's exchange + slowest rank's kernel      (phases end together: ranks wait for each other)
    backward  = the keys again, 2.5 x the FLOPs, and dK/dV back in fp32: 3 x the forward's bytes

    padding   = the rest of the layer on every row that a rank has beyond an even share of the tokens

Every rank computes all its local rows in every layer, tokens or not, so rows that a layout adds are paid for outside
attention. Nothing is taken to overlap, except a ring's transfers with its kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.layouts.line import SeenKeys
from cp_rewrite.planning.layouts.orders import TokenOrder

from .intervals import Int
from .schedule import Schedule
from .tiles import TILE, TILE_ROW_OVERHEAD, Float, window_tiles


@dataclass(frozen=True)
class Device:
    """Speeds of one device and its links.

    Args:
        name: of the device.
        forward, backward: attention kernel at full tiles, FLOP/s (the backward counts 2.5 forwards).
        memory: read plus written bytes per second of a copy on the device.
        link: bytes per second that a rank receives from ranks of its node; node_link: from other nodes.
        latency: seconds that a collective or a signal between ranks takes at no size, in a node; node_latency: across.
        launch: seconds per kernel launch.
    """

    name: str
    forward: float
    backward: float
    memory: float
    link: float
    node_link: float
    latency: float
    node_latency: float
    launch: float

    @classmethod
    def named(cls, name: str) -> Device:
        """A device by name (see DEVICES), or one measured: a path to what `python -m cp_rewrite calibrate` wrote.

        Raises:
            ValueError: neither a known name nor a readable file of speeds.
        """
        if name in DEVICES:
            return DEVICES[name]
        try:
            device = cls(**json.loads(Path(name).read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"device must be one of {', '.join(DEVICES)}, or a file made by `calibrate`; got {name!r}"
            ) from error
        for f in fields(cls)[1:]:
            value = getattr(device, f.name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{f.name} in {str(name)!r} must be a number > 0, got {value!r}")
        return device

    def save(self, path: str | Path) -> None:
        """Keep the speeds as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")


DEVICES: Mapping[str, Device] = {
    "h200": Device("h200", 664e12, 595e12, 4250e9, 295e9, 48e9, 30e-6, 60e-6, 5e-6),
    "h100": Device("h100", 640e12, 570e12, 2950e9, 295e9, 48e9, 30e-6, 60e-6, 5e-6),
    "a100": Device("a100", 190e12, 170e12, 1700e9, 200e9, 24e9, 30e-6, 60e-6, 6e-6),
    "cpu": Device("cpu", 50e9, 40e9, 10e9, 2e9, 1e9, 300e-6, 600e-6, 20e-6),
}
"""h200: measured on 4 GPUs with NVLink; h100 and a100 are scaled from it by the vendor's figures; node_link is one
400 (a100: 200) Gbit/s adapter per GPU. cpu: processes over gloo, an order of magnitude. `calibrate` measures yours."""


@dataclass(frozen=True)
class Model:
    """The attention that is planned for: (query heads, key/value heads), head dim, bytes of an element."""

    heads: tuple[int, int] = (64, 8)
    head_dim: int = 128
    item_bytes: int = 2

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values, all heads."""
        return 2 * self.heads[1] * self.head_dim * self.item_bytes

    @property
    def tile_flops(self) -> float:
        """Forward FLOPs of one tile over all query heads."""
        return 4.0 * TILE * TILE * self.head_dim * self.heads[0]

    @property
    def row_flops(self) -> float:
        """Forward FLOPs of one row outside attention: a dense layer's 12 h^2 weights, h = query heads x head dim."""
        return 24.0 * (self.heads[0] * self.head_dim) ** 2


@dataclass(frozen=True, eq=False)
class Load:
    """What a schedule puts on ranks, device and link.

    Args:
        rows: R, local rows of each rank.
        tiles: (P,) kernel work per head.
        received: (P, P) rows that rank [0] needs from rank [1], each once.
        expanded: (P,) rows gathered for the kernel, copies included.
        launches: kernel launches of the rank that has most.
        whole_tiles: kernel work per head of the same documents without any cut.
        padding: local rows of each rank beyond an even share of the tokens.
    """

    rows: int
    tiles: Float
    received: Int
    expanded: Int
    launches: int
    whole_tiles: float
    padding: float = 0.0

    @property
    def world_size(self) -> int:
        return len(self.tiles)


def load_of(schedule: Schedule, whole_tiles: float | None = None) -> Load:
    """What the schedule of a batch puts on its ranks. Without `whole_tiles` cuts are taken to cost nothing."""
    pieces = schedule.pieces
    tiles = window_tiles(pieces.q1 - pieces.q0, pieces.key1 - pieces.key0, pieces.left, pieces.right)
    per_rank = np.bincount(pieces.rank, tiles, schedule.world_size).astype(np.float64)
    launches = int(schedule.launch.max(initial=0)) + 1
    whole = float(per_rank.sum()) if whole_tiles is None else whole_tiles
    starts, stops = schedule.segments[:2]
    padding = schedule.rows - float((stops - starts).sum()) / schedule.world_size
    return Load(schedule.rows, per_rank, schedule.received, schedule.expanded, launches, whole, padding)


def exchange_seconds(load: Load, device: Device, model: Model, ranks_per_node: int | None = None) -> dict[str, float]:
    """Predicted seconds of one layer's attention and padding, forward and backward, per exchange that can serve it."""
    per_node = ranks_per_node or load.world_size
    seconds = {
        "all_gather": all_gather_seconds(load, device, model, per_node),
        "needed": needed_seconds(load, device, model, per_node),
        "p2p": ring_seconds(load, device, model, per_node),
    }
    if model.heads[0] % load.world_size == 0:
        seconds["a2a"] = all_to_all_seconds(load, device, model, per_node)
    padding = padding_seconds(load, device, model)
    return {name: attention + padding for name, attention in seconds.items()}


def ideal_seconds(load: Load, device: Device, model: Model) -> float:
    """A P-th of the time that one device would take for the kernels alone."""
    return _kernel(load.whole_tiles / load.world_size, 0, device, model)


def padding_seconds(load: Load, device: Device, model: Model) -> float:
    """The rest of the layer on rows that are no rank's even share of tokens. At the attention kernel's speed: matrix
    products are faster, norms and activations slower."""
    flops = load.padding * model.row_flops
    return flops / device.forward + 2 * flops / device.backward


def needed_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """Only needed rows move; then one gather into the expanded rows, one sum out of them."""
    near = same_node(load.world_size, ranks_per_node)
    inside, across = np.where(near, load.received, 0), np.where(near, 0, load.received)
    there = _transfer(inside.sum(1), across.sum(1), model.kv_bytes, device)
    back = _transfer(inside.sum(0), across.sum(0), 2 * model.kv_bytes, device)
    return 2 * there + back + _copies(load, device, model) + _kernel(load.tiles.max(), load.launches, device, model)


def least_seconds(documents: Documents, order: TokenOrder, mask: PackedMask, device: Device, model: Model) -> float:
    """What an order costs at least under `needed`; far cheaper to tell than its schedule.

    A rank works at least on the keys that its queries see, in the tile rows of its intervals; and without a limit to
    the left it needs all keys of every document whose last token it owns.
    """
    docs = documents if mask.packed else Documents.from_lengths([documents.total])
    if not docs.lengths.any():
        return 0.0
    starts, stops, owners, _ = order.segments
    seen = SeenKeys(mask)
    work = seen.of(docs.lengths, docs.lengths) / TILE**2
    work_before, tokens_before = np.cumsum(work) - work, np.cumsum(docs.lengths) - docs.lengths
    # Work and tokens of documents in the row's first x tokens, for all bounds x of intervals.
    bounds = np.append(starts, docs.total)
    doc = np.maximum(docs.starts.searchsorted(bounds, side="right") - 1, 0)
    lengths = docs.lengths[doc]
    inside = np.minimum(np.maximum(bounds - docs.starts[doc], 0), lengths)
    done = work_before[doc] + seen.of(lengths, inside) / TILE**2
    tokens = tokens_before[doc] + inside
    work, real_tokens = done[1:] - done[:-1], tokens[1:] - tokens[:-1]
    tile_rows = -(-real_tokens // TILE)
    tiles = np.bincount(owners, work + TILE_ROW_OVERHEAD * tile_rows, order.world_size)
    seconds = _kernel(float(tiles.max()), 1, device, model)
    if mask.left is None:
        real = docs.lengths > 0
        last_owner = owners[np.searchsorted(stops, docs.ends[real] - 1, side="right")]
        needed = np.bincount(last_owner, docs.lengths[real], order.world_size)
        missing = float((needed - np.bincount(owners, real_tokens, order.world_size)).max())
        seconds += 2 * max(0.0, missing) * model.kv_bytes / device.link
    return seconds


def most_runs(documents: Documents, order: TokenOrder, mask: PackedMask) -> int:
    """A bound on the runs of keys of an order's schedule (`Schedule.runs`): what memory and time building it takes.

    Every interval of a document has keys in at most all of them.
    """
    docs = documents if mask.packed else Documents.from_lengths([documents.total])
    starts, stops = order.segments[:2]
    first = np.searchsorted(stops, docs.starts, side="right")
    last = np.searchsorted(starts, docs.ends, side="left")
    return int((np.maximum(last - first, 0) ** 2).sum())


def all_gather_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """All rows go everywhere; across nodes each row enters a node once, over all its adapters."""
    g = min(ranks_per_node, load.world_size)
    inside = np.array([(load.world_size - 1) * load.rows])
    across = np.array([(load.world_size - g) * load.rows // g])
    moved = _transfer(inside, across, 4 * model.kv_bytes, device) + 2 * device.latency
    return moved + _copies(load, device, model) + _kernel(load.tiles.max(), load.launches, device, model)


def ring_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """P steps, each a transfer beside a kernel over one rank's keys; out and log-sum-exp merged after each."""
    steps = load.world_size - 1
    across = np.array([load.rows if ranks_per_node < load.world_size else 0])
    step = _transfer(np.array([load.rows]) - across, across, 4 * model.kv_bytes, device)
    more_rows = steps * TILE_ROW_OVERHEAD * load.rows / TILE
    kernel = _kernel(load.tiles.max() + more_rows, load.launches * (steps + 1), device, model)
    out_bytes = load.rows * model.heads[0] * model.head_dim * 4
    return max(kernel, 2 * steps * step) + steps * 4 * out_bytes / device.memory


def all_to_all_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """Queries, keys, values and outputs change from token shards to head shards; documents stay whole."""
    heads = 2 * model.heads[0] + 2 * max(model.heads[1], load.world_size)
    row_bytes = heads * model.head_dim * model.item_bytes
    g = min(ranks_per_node, load.world_size)
    inside = np.array([load.rows * (g - 1) // load.world_size])
    across = np.array([load.rows * (load.world_size - g) // load.world_size])
    moved = 2 * _transfer(inside, across, row_bytes, device) + 6 * device.latency
    reorder = 8 * load.rows * row_bytes / device.memory
    return moved + reorder + _kernel(load.whole_tiles / load.world_size, 1, device, model)


def same_node(world_size: int, ranks_per_node: int) -> np.ndarray:
    """(P, P) True where two ranks share a node."""
    node = np.arange(world_size) // ranks_per_node
    return node[:, None] == node[None, :]


def _transfer(inside: Int, across: Int, row_bytes: int, device: Device) -> float:
    """Seconds until the slowest rank has its rows from its node and from other nodes."""
    slowest = float((inside / device.link + across / device.node_link).max()) * row_bytes
    return slowest + (device.node_latency if across.any() else device.latency)


def _copies(load: Load, device: Device, model: Model) -> float:
    """Gather forward and backward, dK/dV summed once: five reads or writes of the expanded rows."""
    return 5 * float(load.expanded.max()) * model.kv_bytes / device.memory + 3 * device.launch


def _kernel(tiles: float, launches: int, device: Device, model: Model) -> float:
    flops = float(tiles) * model.tile_flops
    return flops / device.forward + 2.5 * flops / device.backward + 4 * launches * device.launch
