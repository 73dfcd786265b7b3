"""Scalars of each batch over a run, for a log: how evenly work is shared, what travels, what planning takes.

All of it is read off plans, and off what experts told each other, on the host: no GPU is asked, no rank waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cp_rewrite.experts.dispatch import LOADS
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.names import split_exchange

_open: list[Trace] = []


@dataclass(frozen=True)
class Traffic:
    """An attention site of a compiled graph. `exchange`: its name. `kv_bytes`, `qo_bytes`: of one token's keys and
    values, and of its queries and outputs, all heads."""

    mask: PackedMask
    exchange: str
    kv_bytes: int
    qo_bytes: int

    def received(self, plan: BatchPlan) -> tuple[int, int]:
        """(KV rows, bytes) that the rank which gets most gets from others in one forward."""
        ranks, rows = plan.world_size, plan.local_size * len(plan.rows)
        scattered, kind = split_exchange(self.exchange)
        if scattered:  # a share of all heads of all tokens; what travels between the outer ranks is left out
            return 0, rows * (ranks - 1) * (self.kv_bytes + self.qo_bytes) // ranks
        if kind in ("all_gather", "p2p"):
            return rows * (ranks - 1), rows * (ranks - 1) * self.kv_bytes
        most = int(plan.schedule(self.mask).received.sum(1).max())
        return most, most * self.kv_bytes


class Trace(AbstractContextManager["Trace"]):
    """The scalars that `cp.trace` gives, of every batch that is cut until `close()`, or to the end of its `with`.

    Attributes:
        steps: a dict per batch, in order. `last` is the newest, for a log:

            tokens          of the batch, all ranks
            documents       of the batch
            fill_rows       local rows without a token, all ranks
            imbalance       attention's work of the rank that has most over the mean, of the mask where it is most
            received_rows   KV rows that the rank which gets most gets from others, of the layer where these are most
            received_bytes  that it gets in one forward, all layers
            expert_rows     rows that experts of the rank which gets most of its group get, of the layer where these are
                            most; 0 where no ranks share experts
            expert_mean     the mean over the group's ranks there
            planning_ms     host time of `sharding.shard` before the block begins, comparisons of ranks among it
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._sites: Sequence[Traffic] = ()
        _open.append(self)

    @property
    def last(self) -> dict[str, float]:
        """The newest batch's scalars; empty before the first."""
        return dict(self.steps[-1]) if self.steps else {}

    def close(self) -> None:
        """Record no more."""
        if self in _open:
            _open.remove(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def note(self, plan: BatchPlan, sites: Sequence[Traffic], seconds: float) -> None:
        """Record a batch whose block has ended. A step that is replayed names no sites: it has those of before."""
        self._sites = sites or self._sites
        received = [site.received(plan) for site in self._sites]
        loads = max(LOADS, key=max, default=[0])
        masks = dict.fromkeys(site.mask for site in self._sites) or {None: None}
        self.steps.append(
            {
                "tokens": float(sum(int(row.lengths.sum()) for row in plan.rows)),
                "documents": float(sum(len(row.lengths) for row in plan.rows)),
                "fill_rows": float(plan.fill * len(plan.rows)),
                "imbalance": max(plan.imbalance(mask) for mask in masks),
                "received_rows": float(max((rows for rows, _ in received), default=0)),
                "received_bytes": float(sum(size for _, size in received)),
                "expert_rows": float(max(loads)),
                "expert_mean": sum(loads) / len(loads),
                "planning_ms": 1e3 * seconds,
            }
        )

    def __str__(self) -> str:
        lines = [f"{len(self.steps)} batches" + " " * 10 + "".join(f"{name:>14}" for name in ("mean", "least", "most"))]
        for name in self.steps[0] if self.steps else ():
            values = np.array([step[name] for step in self.steps])
            lines.append(f"{name:20}" + "".join(f"{x:14,.3f}" for x in (values.mean(), values.min(), values.max())))
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw imbalance, received MiB and planning time by batch, into an image file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure  # it may be missing
        except ImportError as error:
            raise ImportError("plotting needs matplotlib: pip install 'cp_rewrite[plot]'") from error
        figure = Figure(figsize=(9, 6), layout="constrained")
        shown: Mapping[str, tuple[str, float]] = {
            "imbalance": ("imbalance", 1.0),
            "received MiB, a forward": ("received_bytes", 2.0**-20),
            "planning ms": ("planning_ms", 1.0),
        }
        for place, (title, (name, factor)) in enumerate(shown.items(), 1):
            axes = figure.add_subplot(len(shown), 1, place)
            axes.plot([factor * step[name] for step in self.steps], linewidth=1, color="#4c78a8")
            axes.set_ylabel(title, fontsize=8)
            axes.tick_params(labelsize=7)
        figure.savefig(path, dpi=150)


def trace() -> Trace:
    """Record scalars of every batch that this process cuts from now on, for TensorBoard, W&B or a table.

        run = cp.trace()
        for step, batch in enumerate(batches):
            with sharding.shard(batch) as local:
                ...
            wandb.log(run.last, step)      # the batch whose block ended last
        print(run); run.plot("run.png"); run.close()

    Some tens of microseconds of the host per batch; nothing waits for a GPU or for other ranks, and all ranks of a
    group record the same but for `planning_ms`. `Trace` lists the scalars.
    """
    return Trace()


def begin_batch() -> None:
    """Forget what experts told each other outside of batches' blocks."""
    LOADS.clear()


def note_batch(plan: BatchPlan, sites: Sequence[Traffic], seconds: float) -> None:
    """Tell all open traces of a batch whose block has ended. `sites`: of the graphs that ran in it."""
    for each in _open:
        each.note(plan, sites, seconds)
