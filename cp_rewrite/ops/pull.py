"""The exchange of exactly the needed rows over symmetric memory, as ops. See `kernels/symm.py` and `pull.py`.

`pull.NAMES` lists a route's tensors in the order in which these ops take them. Shapes: R local rows, E expanded rows,
C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.nvtx import nvtx
from cp_rewrite.pull import NAMES

_ops: Any = torch.ops.cp_rewrite
PULLED = slice(NAMES.index("stages"))
STAGES = slice(NAMES.index("stages"), NAMES.index("return_rows"))
RETURNED = slice(NAMES.index("return_rows"), None)
"""Of a route's tensors: those of the pull, of the kernel's two parts, and of the return."""


@custom_op("cp_rewrite::pull_rows", mutates_args=())
def pull_rows(
    k: Tensor,
    v: Tensor,
    publish_rows: Tensor,
    job_source: Tensor,
    job_ptr: Tensor,
    job_rows: Tensor,
    remote_jobs: Tensor,
    early_jobs: Tensor,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    """(E, C) expanded rows from all ranks' k (R, Hkv, D) and v (R, Hkv, V); only rows that some piece needs travel.

    `after` is not read: see `exchange_rows`.
    """
    from cp_rewrite.kernels import symm

    with nvtx("exchange"):
        return symm.pull_rows(k, v, publish_rows, job_source, job_ptr, job_rows, remote_jobs, early_jobs, group)


@pull_rows.register_fake
def _(
    k: Tensor,
    v: Tensor,
    publish_rows: Tensor,
    job_source: Tensor,
    job_ptr: Tensor,
    job_rows: Tensor,
    remote_jobs: Tensor,
    early_jobs: Tensor,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    return k.new_empty(job_rows.shape[0], k.shape[1] * (k.shape[2] + v.shape[2]))


@custom_op("cp_rewrite::return_pulled", mutates_args=())
def return_pulled(
    dkv: Tensor,
    return_rows: Tensor,
    pull_ptr: Tensor,
    pull_rows: Tensor,
    capacity: Tensor,
    size: int,
    heads: int,
    dim: int,
    dim_v: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """dk (size, heads, dim) and dv (size, heads, dim_v): sums over all ranks' expanded gradients (E, C), in fp32, in a
    fixed order, rounded once to dkv's dtype. `size` is R; `capacity` (1,) is on the host."""
    from cp_rewrite.kernels import symm

    most = int(capacity)
    with nvtx("exchange_backward"):
        return symm.return_rows(dkv, return_rows, pull_ptr, pull_rows, most, heads, (dim, dim_v), group)


@return_pulled.register_fake
def _(
    dkv: Tensor,
    return_rows: Tensor,
    pull_ptr: Tensor,
    pull_rows: Tensor,
    capacity: Tensor,
    size: int,
    heads: int,
    dim: int,
    dim_v: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return dkv.new_empty(size, heads, dim), dkv.new_empty(size, heads, dim_v)


def pull_kv(k: Any, v: Any, route: Sequence[Any], group: str, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows. `route` is in the order of `pull.NAMES`. Works on tensors and on graph proxies."""
    return _ops.pull_rows.default(k, v, *route[PULLED], group, after)


def return_kv(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], group: str) -> tuple[Tensor, Tensor]:
    """dk and dv, shaped and typed like k (R, Hkv, D) and v (R, Hkv, V)."""
    return _ops.return_pulled.default(dkv, *route[RETURNED], k.shape[0], k.shape[1], k.shape[2], v.shape[2], group)
