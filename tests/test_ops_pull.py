"""Attention over pulled rows, group of heads after group: the same as in one go. Peers' memory is played by tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import symm
from cp_rewrite.kernels.params import Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops import pull
from cp_rewrite.ops.attention import attend
from cp_rewrite.pull import NAMES, pull_route
from cp_rewrite.schedule import Schedule
from tests.packed import make_schedule

HEADS, HEADS_KV, DIM, DIM_V = 12, 6, 8, 4
RANKS = 3


class Peers:
    """All ranks' tensors in one process, in the place of symmetric memory."""

    def __init__(self, schedule: Schedule) -> None:
        generator = torch.Generator().manual_seed(0)
        self.schedule = schedule
        self.q, self.k, self.v = (
            [torch.randn(schedule.rows, heads, dim, generator=generator) for _ in range(RANKS)]
            for heads, dim in ((HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V))
        )
        self.rank, self.calls = 0, 0
        self.sent: list[list[Tensor]] = [[] for _ in range(RANKS)]

    def pull_rows(self, k: Tensor, v: Tensor, *_: Any, out_EC: Tensor, **__: Any) -> None:
        """Whose heads are asked for is read off the values: they are a part of this rank's own."""
        first = int((self.k[self.rank] == k[:, :1]).all(-1).all(0).nonzero()[0])
        heads = slice(first, first + k.shape[1])
        rows = torch.from_numpy(self.schedule.route("all_gather", self.rank)["kv_rows"]).long()
        everything = torch.cat([torch.cat([x[:, heads].flatten(1) for x in self.k]),
                                torch.cat([x[:, heads].flatten(1) for x in self.v])], 1)  # fmt: skip
        out_EC.copy_(everything[rows])
        self.calls += 1

    def return_rows(self, grad: Tensor, *rest: Any) -> None:
        self.sent[self.rank].append(grad)
        rest[4].copy_(torch.zeros(()).expand_as(rest[4]) + self.rank)
        rest[5].copy_(torch.zeros(()).expand_as(rest[5]) - self.rank)


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_groups_of_heads_are_one_attention(groups: int, keep_kv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, _ = make_schedule([Documents.from_lengths([40, 7, 1, 30], 81)], RANKS, "balanced", PackedMask())
    peers = Peers(schedule)
    monkeypatch.setattr(symm, "pull_rows", peers.pull_rows)
    monkeypatch.setattr(symm, "return_rows", peers.return_rows)
    monkeypatch.setattr(pull, "head_groups", lambda *_: groups)
    for rank in range(RANKS):
        peers.rank, peers.calls = rank, 0
        got = run(peers, schedule, rank, "pull", keep_kv)
        assert peers.calls == groups * (1 if keep_kv else 2)
        expected = run(peers, schedule, rank, "gathered", keep_kv)
        for mine, other in zip(got[:3], expected[:3], strict=True):
            torch.testing.assert_close(mine, other)
        sent = torch.cat(split(peers.sent[rank]), 1)
        torch.testing.assert_close(sent, expected[3])
        assert (got[4] == rank).all()
        assert (got[5] == -rank).all()


def split(sent: list[Tensor]) -> list[Tensor]:
    """Gradients of all groups as keys of all heads, then values of all heads."""
    heads = HEADS_KV // len(sent)
    return [x[:, : heads * DIM] for x in sent] + [x[:, heads * DIM :] for x in sent]


def run(peers: Peers, schedule: Schedule, rank: int, how: str, keep_kv: bool) -> list[Tensor]:
    """out, lse, dq, the gradient of expanded rows, dk, dv (the last two as far as there are)."""
    tables = [torch.from_numpy(a) for a in schedule.attention(rank).values()]
    q, k, v = (x[rank].clone().requires_grad_() for x in (peers.q, peers.k, peers.v))
    params = Params(DIM**-0.5)
    if how == "pull":
        route = [torch.from_numpy(pull_route(schedule, rank)[name]) for name in NAMES]
        out, lse, *_ = attend(q, k, v, tables, route, ("pull", "", RANKS), params, "reference", keep_kv)
        out.square().sum().backward()
        return [out, lse, q.grad, q.grad, k.grad, v.grad]
    rows = torch.from_numpy(schedule.route("all_gather", rank)["kv_rows"]).long()
    keys, values = (torch.cat(list(x))[rows].requires_grad_() for x in (peers.k, peers.v))
    own = [torch.arange(len(rows), dtype=torch.int32), torch.arange(len(rows) + 1, dtype=torch.int32)]
    local = [own[0], own[1], own[0]]
    out, lse = attend(q, keys, values, tables, local, ("local", "", 1), params, "reference")
    out.square().sum().backward()
    return [out, lse, q.grad, torch.cat([keys.grad.flatten(1), values.grad.flatten(1)], 1)]


def test_groups_follow_from_what_all_ranks_know() -> None:
    def groups(rows: int, heads: int, heads_kv: int, dim: int, capacity: int) -> int:
        q, k = (torch.empty(rows, n, dim, dtype=torch.bfloat16, device="meta") for n in (heads, heads_kv))
        return pull.head_groups(q, k, k, torch.tensor([capacity]))

    assert groups(8192, 64, 8, 128, 40000) == 4
    assert groups(8192, 64, 8, 128, 12000) == 2
    assert groups(128, 8, 2, 64, 300) == 1
    assert groups(32768, 64, 1, 128, 40000) == 1
    assert groups(32768, 96, 6, 128, 40000) == 6
