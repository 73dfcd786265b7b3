"""Small models whose keys and values come from a narrower tensor, and what tests change in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import VOCAB, Output, next_token_loss

HEADS, NOPE, ROPE, V, RANK, WIDTH = 4, 8, 4, 6, 7, 24


class Latent(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Attention as DeepSeek's: keys and values are projected up from latents, beside one rotary key for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.c_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(RANK)
        self.q = nn.Linear(WIDTH, HEADS * (NOPE + ROPE))
        self.down = nn.Linear(WIDTH, RANK + ROPE)
        self.up = nn.Linear(RANK, HEADS * (NOPE + V), bias=False)
        self.out = nn.Linear(HEADS * V, WIDTH)
        self.extra()

    def extra(self) -> None:
        """More parameters."""

    def project_up(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, T, D) keys and (B, H, T, V) values of latents (B, T, RANK) and rotary keys (B, 1, T, ROPE)."""
        kv = self.up(self.c_norm(c)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = kv.split([NOPE, V], -1)
        return torch.cat([k, r.expand(-1, HEADS, -1, -1)], -1), v

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor, c: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, -1).transpose(1, 2)
        return torch.cat([q[..., :NOPE], turned(q[..., NOPE:], cos, sin)], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(h)
        c, r = self.down(x).split([RANK, ROPE], -1)
        k, v = self.project_up(c, turned(r.unsqueeze(1), cos, sin))
        return h + self.out(self.attend(self.queries(x, cos, sin, c), k, v, mask))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class LatentModel(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Embedding, two layers, a head and a loss."""

    def __init__(self, layer: Callable[[], nn.Module] = Latent, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def run(self, layer: Any, *args: Tensor) -> Tensor:
        return layer(*args)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Output:
        doc = (position_ids == 0).cumsum(1)
        mask = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
        angles = position_ids[:, None, :, None] * torch.tensor([1.0, 0.1])
        h = self.embed(input_ids)
        for layer in self.layers:
            h = self.run(layer, h, angles.cos(), angles.sin(), mask)
        logits = self.head(h).float()
        return Output(next_token_loss(logits, labels, shift_labels, num_items_in_batch), logits)


class Checkpointed(LatentModel):
    """Layers run again in the backward."""

    def run(self, layer: Any, *args: Tensor) -> Tensor:
        return checkpoint(layer, *args, use_reentrant=False)


class Autocast(LatentModel):
    """Layers under autocast, entered inside of the model."""

    def run(self, layer: Any, *args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(*args)


class ReadElsewhere(Latent):
    """Keys and values are read beside attention too."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        beside = (k[..., :V] * v).transpose(1, 2).flatten(2)
        return super().attend(q, k, v, mask) + beside


class Buffered(Latent):
    """Keys are written into a buffer, as by transformers."""

    def project_up(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        b, t, _ = c.shape
        kv = self.up(self.c_norm(c)).view(b, t, HEADS, NOPE + V).transpose(1, 2)
        k, v = kv.split([NOPE, V], -1)
        keys = k.new_empty(b, HEADS, t, NOPE + ROPE)
        keys[..., :NOPE].copy_(k)
        keys[..., NOPE:] = r.expand(-1, HEADS, -1, -1)
        return keys, v


class Mixed(Latent):
    """Values are averaged with those of the tokens before: a convolution over tokens behind the latents."""

    def extra(self) -> None:
        self.conv = nn.Conv1d(HEADS * V, HEADS * V, 3, groups=HEADS * V, bias=False)

    def project_up(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().project_up(c, r)
        flat = F.pad(v.transpose(1, 2).flatten(2).mT, (2, 0))
        return k, self.conv(flat).mT.unflatten(-1, (HEADS, V)).transpose(1, 2)


class Averaged(Latent):
    """Keys hold a mean over all tokens."""

    def project_up(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().project_up(c, r)
        return k - c.mean((1, 2))[:, None, None, None], v


class Dropped(Latent):
    """Random numbers are drawn behind the latents."""

    def project_up(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().project_up(c, r)
        return torch.dropout(k, 0.5, True), v


class Written(Latent):
    """A tensor that values are made of is changed in place before keys are made of it."""

    def project_up(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().project_up(c, r)
        total = c.sum(-1)[:, None, :, None]
        v = v + total
        total.mul_(2.0)
        return k + total, v


class FromQueries(Latent):
    """Keys are made of what queries are made of, which is as wide."""

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(h)
        q = self.queries(x, cos, sin, x)
        return h + self.out(self.attend(q, q.flip(-1), q[..., :V], mask))


LAYERS: dict[str, type[Latent]] = {
    "latent": Latent,
    "read_elsewhere": ReadElsewhere,
    "buffered": Buffered,
    "mixed": Mixed,
    "averaged": Averaged,
    "written": Written,
    "from_queries": FromQueries,
}
MODELS: dict[str, type[LatentModel]] = {"checkpointed": Checkpointed, "autocast": Autocast}


def build(name: str) -> nn.Module:
    """A model by name, the same weights on every call."""
    torch.manual_seed(0)
    return MODELS[name]() if name in MODELS else LatentModel(LAYERS[name])
