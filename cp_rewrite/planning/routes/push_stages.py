"""In how many stages of heads rows travel beside the kernel, under `push`.

Heads are independent: while the kernel works on those of one stage, those of the next arrive, and gradients of the one
before go home. The first stage waits for its rows, the last one's gradients for their way.

    link      rows 0 | rows 1 | rows 2                | gradients 0 | gradients 1          | gradients 2
    kernel             stage 0 | stage 1      | stage 2                                …

What a stage costs is a launch and its tail, so little data travels in one stage. Only speed depends on the numbers
here, but all ranks must find the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from cp_rewrite.planning.cost.constants import (
    BACKWARD_FLOPS,
    PUSH_BESIDE_LINK,
    PUSH_BESIDE_MEMORY,
    PUSH_LINK,
    PUSH_PARTS_LINK,
    PUSH_SHARES,
    PUSH_SHARES_BACK,
    PUSH_STAGE,
    PUSH_STAGE_BACK,
    PUSH_STAGES_GAIN,
    PUSH_TAKEN,
    PUSH_TAKEN_BACK,
    TILE,
)
from cp_rewrite.planning.cost.devices import Device

_DEVICE = Device.named("h200")


class StageLoad(NamedTuple):
    """Work of one rank in one call.

    Args:
        early, late: tiles per query head of the two parts of `choose_cut`, in the order in which they run.
        awaited: rows of peers that the early part reads. coming: rows of peers, all.
        own: expanded rows that are copies of own ones. near: so many of these a forward in one stage reads in place.
    """

    early: int
    late: int
    awaited: int
    coming: int
    own: int
    near: int


class Shape(NamedTuple):
    """Sizes of an attention. Args: heads, heads_kv. dim, dim_v: of k and of v. item_bytes: of an element."""

    heads: int
    heads_kv: int
    dim: int
    dim_v: int
    item_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.heads_kv * (self.dim + self.dim_v) * self.item_bytes


@lru_cache(maxsize=1024)
def forward_stages(loads: tuple[StageLoad, ...], shape: Shape) -> tuple[int, ...]:
    """Key heads of each stage of a forward. Args: loads: of all ranks."""
    return _best(PUSH_SHARES, shape, lambda sizes: max(forward_seconds(load, shape, sizes) for load in loads))


@lru_cache(maxsize=1024)
def backward_stages(loads: tuple[StageLoad, ...], shape: Shape, kept: bool) -> tuple[int, ...]:
    """Key heads of each stage of a backward. Args: kept: rows are here already."""
    return _best(
        PUSH_SHARES_BACK, shape, lambda sizes: max(backward_seconds(load, shape, sizes, kept) for load in loads)
    )


def forward_seconds(load: StageLoad, shape: Shape, sizes: Sequence[int], device: Device = _DEVICE) -> float:
    """Predicted seconds of a rank's forward with its exchange, in stages of so many key heads; one stage is cut in an
    early and a late part."""
    kernel, rows = _kernel_seconds(load, shape, device.forward), _link_seconds(load.coming, shape, device, PUSH_LINK)
    if len(sizes) == 1:
        early = kernel * load.early / max(1, load.early + load.late)
        start = max(
            _link_seconds(load.awaited, shape, device, PUSH_LINK), _copy_seconds(load.own - load.near, shape, device)
        )
        return max(start + early + PUSH_TAKEN * rows, rows) + kernel - early
    end, sent = _copy_seconds(load.own, shape, device), 0.0
    for size in sizes:
        share = size / shape.heads_kv
        sent += rows * share
        end = max(end, sent) + kernel * share + PUSH_STAGE
    return end + PUSH_TAKEN * rows


def backward_seconds(
    load: StageLoad, shape: Shape, sizes: Sequence[int], kept: bool, device: Device = _DEVICE
) -> float:
    """The same of a backward. In one stage rows come before the kernel, or beside its early part, and gradients go home
    after it, both faster."""
    kernel = BACKWARD_FLOPS * _kernel_seconds(load, shape, device.backward)
    copies = _copy_seconds(load.own, shape, device)
    alone = max(_link_seconds(load.coming, shape, device), copies)  # of rows before the kernel, of gradients after it
    if len(sizes) == 1 and load.near:
        early, copies = (
            kernel * load.early / (load.early + load.late),
            _copy_seconds(load.own - load.near, shape, device),
        )
        rows = copies if kept else max(_link_seconds(load.coming, shape, device, PUSH_PARTS_LINK), copies)
        home = max(_link_seconds(load.coming, shape, device), copies)
        return max(kernel + PUSH_TAKEN * rows, rows + kernel - early) + PUSH_STAGE_BACK + home
    if len(sizes) == 1:
        return (0.0 if kept else alone) + kernel + alone
    rows = 0.0 if kept else _link_seconds(load.coming, shape, device, PUSH_LINK)
    back = max(_link_seconds(load.coming, shape, device, PUSH_BESIDE_LINK), copies / 2 / PUSH_BESIDE_MEMORY)
    end, sent, home = 0.0 if kept else copies, 0.0, rows
    for size in sizes[:-1]:
        share = size / shape.heads_kv
        sent += rows * share
        end = max(end, sent) + kernel * share + PUSH_STAGE_BACK + PUSH_TAKEN_BACK * back * share
        home = max(home, end) + back * share
    share = sizes[-1] / shape.heads_kv
    return max(max(end, rows) + kernel * share + PUSH_STAGE_BACK, home) + alone * share + PUSH_TAKEN * rows


def _best(
    all_shares: Sequence[Sequence[int]], shape: Shape, seconds: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """The stages that take least; one where several gain little."""
    one = (shape.heads_kv,)
    several = {sizes for shares in all_shares if (sizes := _sizes(shares, shape.heads_kv))}
    best = min(sorted(several), key=seconds, default=one)
    return best if seconds(best) < PUSH_STAGES_GAIN * seconds(one) else one


def _sizes(shares: Sequence[int], heads: int) -> tuple[int, ...]:
    """Whole numbers of heads, at least 2 each: kernels read rows of one head through other strides. Empty: too few
    heads."""
    bounds = [round(heads * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    sizes = tuple(stop - start for start, stop in zip([0, *bounds], bounds, strict=False))
    return sizes if min(sizes) >= 2 and heads < 256 else ()


def _kernel_seconds(load: StageLoad, shape: Shape, speed: float) -> float:
    flops = 2.0 * TILE * TILE * (shape.dim + shape.dim_v) * shape.heads
    return (load.early + load.late) * flops / speed


def _link_seconds(rows: int, shape: Shape, device: Device, speed: float = 1.0) -> float:
    """Seconds that rows of peers take, at a share of the link's speed."""
    return rows * shape.row_bytes / (speed * device.link)


def _copy_seconds(rows: int, shape: Shape, device: Device) -> float:
    """Seconds that copies of own rows take, or sums of their gradients, by the whole GPU."""
    return 2 * rows * shape.row_bytes / device.memory
