"""Rows that each rank has of its own, joined to one batch of the whole group.

    rank 0's rows    a a a b      rank 1's    d d d d d e
                     c c c c
    joined           a a a b c c c c d d d d d e           one packed row, the same on both

They travel from host to host, so that nothing waits for a device and a thread may do it ahead of time.
"""

from __future__ import annotations

import pickle
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.agree.turns import talks
from cp_rewrite.arguments import named_values
from cp_rewrite.packing import PositionIds
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import all_bytes, host_group

from .labels import COUNT
from .marks import Marks
from .read_documents import shape_of

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = weakref.WeakKeyDictionary()
"""Sharding's group -> the one by which hosts exchange rows in `shard`."""
_made: Counter[str] = Counter()
"""How many groups of hosts this process has made, by group."""


@dataclass(frozen=True)
class Given:
    """A batch of the whole group.

    Args:
        batch: argument name -> value, the same on every rank.
        seams: token of the joined row at which each row begins, but for the first; none where nothing was joined.
        marks: of the batch's tensors when it was planned, where that was ahead of time.
    """

    batch: Mapping[str, Any]
    seams: tuple[int, ...] = ()
    marks: Marks = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class _Rows:
    """A rank's message to the others: its rows, or why it has none.

    Args:
        sizes: tokens of each of its rows.
        arrays: of each token argument dtype, sizes of all dims with one packed row, token dim, and bytes.
        others: numbers, strings and flags that go with it.
        error: what went wrong here; the others raise, too.
    """

    sizes: tuple[int, ...] = ()
    arrays: Mapping[str, tuple[torch.dtype, tuple[int, ...], int, NDArray[np.uint8]]] = field(
        default_factory=dict[str, Any]
    )
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


def hosts_of(sharding: Sharding) -> dist.ProcessGroupGloo:
    """A new group by which one thread's rows go from host to host. All ranks make it together."""
    _made[sharding.group_name] += 1
    return host_group(sharding.group, f"cp_rewrite/rows/{_made[sharding.group_name]}")


def join_rows(
    sharding: Sharding,
    batch: Mapping[str, Any] | None,
    hosts: dist.ProcessGroupGloo | None = None,
    error: BaseException | None = None,
) -> Given | None:
    """The rows of all ranks, one behind another, as one packed row. All ranks of the group call it together.

    Args:
        sharding: names what has tokens.
        batch: this rank's rows, on the host; without a token argument, or None: it has none.
        hosts: by whom they travel, from `hosts_of`; None: one that is made once.
        error: what this rank raises instead of having rows: it is told to the others, and raised here.
    Returns: None where no rank has rows.
    Raises:
        KeyError, TypeError, ValueError: rows that do not go together, within a rank or over ranks. RuntimeError:
            another rank has an error.
    """
    mine = _Rows()
    try:
        if error is not None:
            raise error
        mine = _rows_of(sharding, batch or {})
    except BaseException as found:
        if talks(sharding):
            _exchanged(sharding, _Rows(error=f"{type(found).__name__}: {found}"), hosts)
        raise
    ranks = _exchanged(sharding, mine, hosts) if talks(sharding) else [mine]
    if wrong := [f"rank {rank}: {rows.error}" for rank, rows in enumerate(ranks) if rows.error]:
        raise RuntimeError("the rows of all ranks are one batch, and some have none: " + "; ".join(wrong))
    filled = [rows for rows in ranks if rows.sizes]
    if not filled:
        return None
    _check_alike(ranks)
    joined = {name: _joined([rows.arrays[name] for rows in filled]) for name in sharding.tokens}
    others = {**filled[0].others, **(batch or {})}
    if COUNT in others:
        others[COUNT] = torch.tensor(sum(rows.others[COUNT] for rows in ranks))
    sizes = [size for rows in filled for size in rows.sizes]
    return Given(dict(sorted({**others, **joined}.items())), tuple(np.cumsum(sizes)[:-1].tolist()))


def check_seams(sharding: Sharding, plan: BatchPlan) -> None:
    """Raise where a document of one row goes on in the next one, as the joined row tells its documents apart."""
    documents, at = plan.rows[0], plan.row_bounds[1:-1]
    before = np.searchsorted(documents.starts, at) - 1  # the last document that begins before a seam
    across = before[(before >= 0) & (np.append(documents.ends, 0)[before] > at)]
    if across.size:
        raise ValueError(
            f"rows of all ranks are joined to one, and in it the document at token {documents.starts[across[0]]} goes "
            f"on behind the end of its row, by {sharding.packing}: "
            + (
                "begin each row with a document, at position 0"
                if isinstance(sharding.packing, PositionIds)
                else "tell documents apart by PositionIds, or so that no two rows, of whatever ranks, share one"
            )
        )


def _rows_of(sharding: Sharding, batch: Mapping[str, Any]) -> _Rows:
    """A rank's rows, checked."""
    named_values("batch", batch)
    there = [name for name in sharding.tokens if name in batch]
    rows, total = shape_of(sharding, batch) if there else (0, 0)
    arrays: dict[str, Any] = {}
    for name, dim in sharding.tokens.items() if there else ():
        value: Tensor = batch[name]
        if value.device.type != "cpu":
            raise ValueError(f"batch[{name!r}] is on {value.device}: rows travel from host to host, before they move")
        one = value.detach().flatten(dim - 1, dim).unsqueeze(dim - 1) if dim else value.detach()
        # The token dim in front, so that rows of ranks stand one behind another in memory.
        flat = one.movedim(dim, 0).contiguous()
        arrays[name] = value.dtype, tuple(flat.shape), dim, flat.reshape(-1).view(torch.uint8).numpy()
    others = {name: value for name, value in batch.items() if isinstance(value, bool | int | float | str)}
    count: Any = batch.get(COUNT)
    if isinstance(count, Tensor):
        if count.device.type != "cpu" or count.numel() != 1:
            raise ValueError(f"{COUNT!r} counts this rank's own targets: give it as a number, or one on the host")
        others[COUNT] = count.item()
    return _Rows((total,) * rows, arrays, {name: x for name, x in others.items() if name not in sharding.tokens})


def _joined(parts: Sequence[tuple[torch.dtype, tuple[int, ...], int, NDArray[np.uint8]]]) -> Tensor:
    dtype, shape, dim, _ = parts[0]
    data = torch.from_numpy(np.concatenate([part[3] for part in parts])).view(dtype)
    return data.view(-1, *shape[1:]).movedim(0, dim)


def _check_alike(ranks: Sequence[_Rows]) -> None:
    """Raise where ranks have other arguments, or other kinds of them."""
    kinds = {
        rank: {name: (dtype, shape[1:]) for name, (dtype, shape, _, _) in rows.arrays.items()}
        | {name: None for name in rows.others}
        for rank, rows in enumerate(ranks)
        if rows.sizes
    }
    if COUNT in {name for rows in ranks for name in rows.others}:
        if without := [rank for rank, rows in enumerate(ranks) if COUNT not in rows.others]:
            raise ValueError(
                f"{COUNT!r} is the sum over all ranks, and ranks {without} gave none: one without rows gives "
                f"{{{COUNT!r}: …}} alone, of its own targets in all batches that it counts"
            )
    first, expected = next(iter(kinds.items()))
    for rank, found in kinds.items():
        if wrong := sorted(n for n in {*expected, *found} if expected.get(n, "none") != found.get(n, "none")):
            raise ValueError(
                f"rows of all ranks are joined, and {wrong} are of other kinds on rank {rank} than on rank {first}: "
                f"{[found.get(n, 'none') for n in wrong]}, {[expected.get(n, 'none') for n in wrong]}"
            )


def _exchanged(sharding: Sharding, mine: _Rows, hosts: dist.ProcessGroupGloo | None) -> list[_Rows]:
    if hosts is None:
        if sharding.group not in _groups:
            _groups[sharding.group] = hosts_of(sharding)
        hosts = _groups[sharding.group]
    return [pickle.loads(rows) for rows in all_bytes(hosts, pickle.dumps(mine, pickle.HIGHEST_PROTOCOL))]
