"""All ranks must hold the same: compared through the group's store, so that a difference raises instead of hanging."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .sharding import Sharding

_rounds: Counter[str] = Counter()


def on_text(sharding: Sharding, text: str) -> None:
    """Compare `text` (a normalised graph, a refusal) over the context-parallel group.

    Raises:
        RuntimeError: on every rank, naming the ranks that differ and the first lines that do, or the ranks that did not
            come within the group's timeout.
    """
    if sharding.world_size == 1 or isinstance(sharding.mesh, int):
        return
    group, rank = sharding.group, sharding.rank
    store: Any = _get_process_group_store(group)
    turn = f"cp_rewrite/{_rounds[group.group_name]}"
    _rounds[group.group_name] += 1
    digest = hashlib.sha256(text.encode()).hexdigest()
    store.set(f"{turn}/text/{rank}", text)
    store.set(f"{turn}/hash/{rank}", digest)
    digests = [_wait(store, turn, other, group) for other in range(sharding.world_size)]
    different = [other for other, value in enumerate(digests) if value != digests[0]]
    if different:
        other = store.get(f"{turn}/text/{different[0] if rank == 0 else 0}").decode()
        names = (f"rank {rank}", f"rank {different[0] if rank == 0 else 0}")
        lines = [line for line in difflib.unified_diff(text.splitlines(), other.splitlines(), *names, n=0, lineterm="")]
        raise RuntimeError(
            f"cp_rewrite: ranks {different} of the group compiled another graph than rank 0, so collectives would not "
            "match. Give every rank the same model, annotation and batch shapes. First differences:\n"
            + "\n".join(lines[:12])
        )


def _wait(store: Any, turn: str, rank: int, group: dist.ProcessGroup) -> str:
    key = f"{turn}/hash/{rank}"
    try:
        store.wait([key], _timeout(group))
    except Exception as error:
        raise RuntimeError(
            f"cp_rewrite: rank {rank} of the group did not compile with the others within the group's timeout; "
            "every rank must call the model the same number of times"
        ) from error
    return store.get(key).decode()


def _timeout(group: dist.ProcessGroup) -> timedelta:
    device = group._device_types[0]
    options: Any = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", timedelta(minutes=10))
