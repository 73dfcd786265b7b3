"""One rank's attention as kernels see it: tables, query rows, expanded keys and values, and the fp32 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import reference
from cp_rewrite.kernels.select import Params, Tables
from cp_rewrite.masks import PackedMask
from tests.helpers.packed import make_schedule


@dataclass(frozen=True)
class Case:
    """q (R, Hq, D), dout (R, Hq, V), k (E, Hkv, D) and v (E, Hkv, V) as views of one (E, C) buffer."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    tables: Tables
    padding: Tensor
    """(R,) bool on the CPU: rows of no piece."""

    def poisoned(self, value: float) -> Case:
        """The case with `value` in the padding rows of q and dout."""
        q, dout, gaps = self.q.clone(), self.dout.clone(), self.padding.to(self.q.device)
        q[gaps], dout[gaps] = value, value
        return Case(q, self.k, self.v, dout, self.tables, self.padding)

    def oracle(self, params: Params) -> tuple[Tensor, ...]:
        """out, lse, dq, dk, dv of the reference in fp32 on the CPU."""
        q, k, v, dout = (x.float().cpu() for x in (self.q, self.k, self.v, self.dout))
        tables = Tables(*(t.cpu() for t in vars(self.tables).values()))
        out, lse = reference.forward(q, k, v, tables, params)
        return out, lse, *reference.backward(dout, q, k, v, out, lse, tables, params)


def make_case(
    documents: Documents,
    mask: PackedMask,
    *,
    world_size: int = 2,
    rank: int = 0,
    layout: str = "balanced",
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A rank of a schedule with random tensors."""
    schedule, _ = make_schedule([documents], world_size, layout, mask)
    arrays = schedule.attention(rank)
    cu_q, cu_k = (torch.from_numpy(arrays[name]).to(device) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    tables = Tables(cu_q, cu_k, torch.from_numpy(arrays["pieces"]), torch.from_numpy(arrays["launches"]))
    expanded = max(2, int(schedule.expanded[rank]))
    generator = torch.Generator().manual_seed(seed)
    q, dout = (torch.randn(schedule.local_rows, heads[0], dim, generator=generator) for dim in dims)
    kv = torch.randn(expanded, heads[1] * sum(dims), generator=generator).to(dtype).to(device)
    k = kv[:, : heads[1] * dims[0]].view(expanded, heads[1], dims[0])
    v = kv[:, heads[1] * dims[0] :].view(expanded, heads[1], dims[1])
    padding = torch.ones(schedule.local_rows, dtype=torch.bool)
    for q0, q1 in tables.pieces[:, :2].tolist():
        padding[q0:q1] = False
    return Case(q.to(dtype).to(device), k, v, dout.to(dtype).to(device), tables, padding)
