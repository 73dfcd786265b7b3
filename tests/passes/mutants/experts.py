"""Mixtures of experts: each token is worked on by experts of its own choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.packed_model import WIDTH, PackedModel


class TopExperts(PackedModel):
    """Right as it is: each token picks its own experts and weighs them."""

    reason, line = None, ""

    def extra(self) -> None:
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weight, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(len(x), 4).scatter(1, chosen, weight)
        return h + torch.einsum("td,edf,te->tf", x, self.experts, gates).view_as(h)


class SortedExperts(PackedModel):
    """Right as it is: rows sorted by expert, worked on, and put back in place."""

    reason, line, rows = None, "", 2

    def extra(self) -> None:
        self.router = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.rand(3, WIDTH))

    def sorted(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(gates (T, 2), sorted experts (2T,), where they came from, rows in that order)."""
        x = h.flatten(0, 1)
        gate, chosen = self.router(x).softmax(-1).topk(2)
        expert, perm = torch.sort(chosen.flatten())
        return gate, expert, perm, x[perm // 2]

    def place(self, perm: Tensor) -> Tensor:
        place = torch.empty_like(perm)
        place[perm] = torch.arange(len(perm))
        return place

    def mix(self, h: Tensor) -> Tensor:
        gate, expert, perm, rows = self.sorted(h)
        out = (rows * self.scale[expert])[self.place(perm)]
        return h + (out.view(*gate.shape, -1) * gate[..., None]).sum(1).view_as(h)


class ExpertsNotPutBack(SortedExperts):
    reason, line = "TOKEN_MIXING", "out.view"

    def mix(self, h: Tensor) -> Tensor:
        gate, expert, _, rows = self.sorted(h)
        out = rows * self.scale[expert]
        return h + (out.view(*gate.shape, -1) * gate[..., None]).sum(1).view_as(h)


class CapacityByPlace(SortedExperts):
    reason, line = "TOKEN_MIXING", "place < 4"

    def mix(self, h: Tensor) -> Tensor:
        gate, expert, perm, rows = self.sorted(h)
        place = self.place(perm)
        out = (rows * self.scale[expert])[place] * (place < 4)[:, None]
        return h + (out.view(*gate.shape, -1) * gate[..., None]).sum(1).view_as(h)


class LoadOfExperts(SortedExperts):
    reason, line = "TOKEN_MIXING", "load / load.sum()"

    def mix(self, h: Tensor) -> Tensor:
        _, expert, _, _ = self.sorted(h)
        load = torch.histc(expert.float(), bins=3, min=0, max=2)
        return h * (load / load.sum()).max()


class SortedOutput(SortedExperts):
    reason, line = "TOKEN_MIXING", "perm // 2"

    def forward(self, **batch: Tensor) -> Any:  # type: ignore[override]
        return self.sorted(self.embed(batch["input_ids"]))[3], super().forward(**batch)


class OrdersMixed(SortedExperts):
    """Two sorts by two keys: rows of one order are added to rows of the other."""

    reason, line = "TOKEN_MIXING", "x[first] + x[second]"

    def sorts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.argsort(x[:, 0]), torch.argsort(x[:, 1])

    def mix(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        first, second = self.sorts(x)
        return h + (x[first] + x[second])[self.place(first)].view_as(h)


class OrdersOfMethodMixed(OrdersMixed):
    reason, line = "TOKEN_MIXING", "x[first] + x[second]"

    def sorts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, 0].argsort(), x[:, 1].argsort()


@torch.compiler.nested_compile_region
def order_of(keys: Tensor) -> Tensor:
    return torch.sort(keys).indices.clone()


class OrdersOfRegionMixed(OrdersMixed):
    reason, line = "TOKEN_MIXING", "x[first] + x[second]"

    def sorts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return order_of(x[:, 0]), order_of(x[:, 1])


class OrdersOfRegion(SortedExperts):
    """Right as it is: the order of a region's sort, of which nothing reads the values."""

    def mix(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        perm = order_of(x[:, 0])
        return h + (x[perm] * 2)[self.place(perm)].view_as(h)


class PlacesBackwards(SortedExperts):
    reason, line = "TOKEN_MIXING", "place[perm] ="

    def place(self, perm: Tensor) -> Tensor:
        place = torch.empty_like(perm)
        place[perm] = torch.arange(len(perm) - 1, -1, -1)
        return place


class PlacesAsValues(SortedExperts):
    reason, line = "TOKEN_MIXING", "unbind"

    def mix(self, h: Tensor) -> Tensor:
        perm = torch.argsort(h[..., 0].flatten())
        return h * self.place(perm)[:, None].unbind(1)[0].view(h.shape[:2])[..., None]


class ExpertsPickTokens(SortedExperts):
    reason, line = "TOKEN_MIXING", "softmax(0)"

    def mix(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        gate, token = self.router(x).softmax(0).topk(2, dim=0)
        return h + (x[token] * gate[..., None]).sum((0, 1))


class LossesByRank(SortedExperts):
    reason, line = "TOKEN_MIXING", "losses * rank"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        losses = logits.logsumexp(-1).flatten().long().sort().values
        rank = torch.arange(len(losses))
        return (losses * rank).sum() / num_items


class UnsortedByArgsort(SortedExperts):
    """Right as it is: the order of the order puts rows back."""

    reason, line, rows = None, "", 2

    def place(self, perm: Tensor) -> Tensor:
        return torch.argsort(perm)


class UnsortedBackwards(SortedExperts):
    reason, line = "TOKEN_MIXING", "descending=True"

    def place(self, perm: Tensor) -> Tensor:
        return torch.argsort(perm, descending=True)


class PutBackByIndex(SortedExperts):
    """Right as it is: sorted rows written to where they came from."""

    reason, line, rows = None, "", 2

    def mix(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        perm = torch.argsort(x[:, 0])
        out = torch.empty_like(x)
        out[perm] = x[perm] * 2
        return h + out.view_as(h)


class PutBackByOtherIndex(SortedExperts):
    reason, line = "TOKEN_MIXING", "out[second]"

    def mix(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        first, second = torch.argsort(x[:, 0]), torch.argsort(x[:, 1])
        out = torch.empty_like(x)
        out[second] = x[first] * 2
        return h + out.view_as(h)
