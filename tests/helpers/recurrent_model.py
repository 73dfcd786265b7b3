"""A packed model of recurrent layers of every kind, which calls the whole ops itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = {"input_ids": 1, "labels": 1}
KINDS = ("gated_delta_rule", "kimi_delta", "ssd", "selective_scan")
VOCAB, WIDTH, HEADS, DIM = 19, 12, 2, 6
_ops: Any = torch.ops.cp_rewrite


class RecurrentModel(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Embedding, one layer for each of `kinds`, a head and a sum of losses.

    resets: states start anew at `cu_seqlens`, (D + 1,) int32; else a row is one sequence.
    """

    def __init__(self, kinds: Sequence[str] = KINDS, resets: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds, self.resets = tuple(kinds), resets
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rows = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH + HEADS) for _ in kinds)
        self.rates = nn.ParameterList(-torch.rand(WIDTH, DIM) - 0.1 for _ in kinds)
        self.head = nn.Linear(WIDTH, VOCAB)

    def offsets(self, number: int, cu_seqlens: Tensor) -> Tensor | None:
        """Offsets for layer `number`, (D + 1,); None: its states never start anew."""
        return cu_seqlens if self.resets else None

    def layer(self, kind: str, number: int, h: Tensor, offsets: Tensor | None) -> Tensor:
        a, b, c, d, beta = self.rows[number](h).split([WIDTH] * 4 + [HEADS], -1)
        rate = self.rates[number]
        if kind == "selective_scan":
            return _ops.selective_scan(a, F.softplus(b), rate, c[..., :DIM], d[..., :DIM], offsets)
        q, k, v, g = (x.unflatten(-1, (HEADS, DIM)) for x in (a, b, c, d))
        if kind == "ssd":
            return _ops.ssd(v, F.softplus(beta), rate[:HEADS, 0], q[:, :, :1], k[:, :, :1], offsets).flatten(2).to(h)
        decay = F.logsigmoid(g if kind == "kimi_delta" else g[..., 0])
        return getattr(_ops, kind)(q, k, v, decay, beta.sigmoid(), offsets, DIM**-0.5, True).flatten(2)

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        h = self.embed(input_ids)
        for number, kind in enumerate(self.kinds):
            h = h + self.layer(kind, number, h, self.offsets(number, cu_seqlens))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), reduction="sum")


def packed(lengths: Sequence[int]) -> dict[str, Tensor]:
    """(1, T) documents of these lengths, and their offsets."""
    generator = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    ids, labels = (torch.randint(0, VOCAB, (1, total), generator=generator) for _ in range(2))
    return {
        "input_ids": ids,
        "labels": labels,
        "cu_seqlens": F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32),
    }
