"""Why rows can't travel through symmetric memory: reasons of a group of ranks, and of the rows themselves."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from cp_rewrite import torch_internals
from cp_rewrite.kernels import cuda

_MAX_RANKS = 32
"""The same in `csrc/peers.cuh`."""


@cache
def group_reasons(group: str) -> tuple[str, ...]:
    """Why rows of this group can't travel through symmetric memory; empty: they can. The same on all ranks.

    A collective call of all ranks of the group, the first time.
    """
    process_group = torch_internals.process_group(group)
    mine = _own_reasons(process_group)
    everyone: list[Any] = [None] * process_group.size()
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    dist.all_gather_object(everyone, (mine, socket.gethostname(), kind), group=process_group)
    return tuple(sorted(_joint_reasons(everyone)))


def _joint_reasons(everyone: Sequence[tuple[list[str], str, str]]) -> set[str]:
    """All ranks' own reasons, hosts and kinds of GPU."""
    whys, hosts, kinds = zip(*everyone, strict=True)
    found = {reason for why in whys for reason in why}
    if len(set(hosts)) > 1:
        found.add("the ranks are on several hosts")
    if len(set(kinds)) > 1:  # what gradients are rounded to on their way depends on it
        found.add(f"the ranks' GPUs are of several kinds: {', '.join(sorted(set(kinds)))}")
    return found


def row_reasons(dtype: torch.dtype, *columns: int) -> list[str]:
    """Why rows of these many elements (of k, and of v) can't travel so; empty: they can."""
    found: list[str] = []
    if dtype not in cuda.DTYPES:
        found.append(f"gradients are summed in bfloat16, float16 and float32 only, got {str(dtype)[6:]}")
    if any(count * dtype.itemsize % 16 for count in columns):
        found.append(f"rows must be whole 16-byte chunks, got {columns} elements of {dtype.itemsize} bytes")
    return found


def _own_reasons(group: dist.ProcessGroup) -> list[str]:
    if group.size() > _MAX_RANKS:
        return [f"more than {_MAX_RANKS} ranks"]
    found = cuda.reasons()
    if found:
        return found
    here = torch.cuda.current_device()
    peers = [i for i in range(torch.cuda.device_count()) if i != here]
    # With one visible device per process nothing is known about the others; mapping them tells.
    if not all(torch.cuda.can_device_access_peer(here, peer) for peer in peers):
        found.append("a GPU can't map another one's memory")
    return found
