"""The largest logits per head of compiled models. Under every exchange, mask and padding the ops' part is in each
conformance cell."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.helpers.packed_model import HEADS, TOKENS, WIDTH, PackedModel


class Attention(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Two attentions, whose sizes the scale sets apart."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(WIDTH, 3 * WIDTH), scale

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        once = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        twice = F.scaled_dot_product_attention(q, k.roll(1, -1), once, attn_mask=mask, scale=-self.scale)
        return h + twice.transpose(1, 2).flatten(2)


class Layers(PackedModel):
    """Two layers, the second in a checkpoint, before the model's own attention."""

    def extra(self) -> None:
        self.layers = nn.ModuleList([Attention(2.0), Attention(0.1)])

    def attended(self, h: Tensor, mask: Tensor | None, angles: Tensor | None = None) -> Tensor:
        h = self.layers[0](h, mask)
        h = checkpoint(self.layers[1], h, mask, use_reentrant=False)  # type: ignore[assignment]
        return super().attended(h, mask, angles)


SITES = ["attention", "layers.0", "layers.0#2", "layers.1", "layers.1#2"]


def expected(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the plain model on one process, by the order of its calls."""
    found: list[Tensor] = []
    plain = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float | None = None) -> Tensor:
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        found.append(logits.masked_fill(~attn_mask, -torch.inf).amax((0, 2, 3)))
        return plain(q, k, v, attn_mask=attn_mask, scale=scale)

    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", attention):
        model(**batch)
    return dict(zip([*SITES[1:], SITES[0]], found, strict=True))


def steps(
    mesh: DeviceMesh, batches: list[dict[str, Tensor]], every: bool | int, layout: Any, exchange: Any, inner: Any,
    how: dict[str, Any],
) -> list[dict[str, Tensor]]:  # fmt: skip
    """What is found after each step; compiled once."""
    packing = cp.DocumentIds("doc_ids")
    sharding = cp.Sharding(mesh, TOKENS, packing, layout, exchange, inner=inner, max_logits=every, **how)
    torch._dynamo.reset()
    model = Layers().double()
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    found: list[dict[str, Tensor]] = []
    with torch._dynamo.config.patch(error_on_recompile=len(batches) > 1):
        for batch in batches:
            with sharding.shard(batch) as local:
                compiled(**local).backward()
            found.append(cp.max_logits(sharding))
    assert cp.max_logits(sharding).keys() == ({*SITES} if how else set())
    return found
