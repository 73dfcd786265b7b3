"""nanoGPT (`model.py`) and nanochat (`nanochat/gpt.py`, `nanochat/flash_attention.py`): what a training step runs.

Statements of the forwards are as published, with annotations and without comments; what only inference reads and the
initialisation are left out.

Copyright (c) 2022, 2025 Andrej Karpathy. MIT License:

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, KEY_HEADS, LAYERS, ROW = 64, 64, 4, 2, 4, 64


class SelfAttention(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """nanoGPT's."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, 0.0
        self.resid_dropout = nn.Dropout(self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class NanoBlock(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), SelfAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Positions are made inside, and the loss is a mean with -1 for tokens that are no targets."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(ROW, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(NanoBlock() for _ in range(LAYERS)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        parts: Any = self.transformer
        device = idx.device
        _, t = idx.size()
        assert t <= ROW, f"Cannot forward sequence of length {t}, block size is only {ROW}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        tok_emb = parts.wte(idx)
        pos_emb = parts.wpe(pos)
        x = parts.drop(tok_emb + pos_emb)
        for block in parts.h:
            x = block(x)
        x = parts.ln_f(x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert x.ndim == 4
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    y1 = x1 * cos + x2 * sin
    y2 = x1 * (-sin) + x2 * cos
    return torch.cat([y1, y2], 3)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
    """nanochat's attention where FlashAttention 3 is not to be had."""
    Tq = q.size(2)
    Tk = k.size(2)
    window = window_size[0]
    if (window < 0 or window >= Tq) and Tq == Tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)
    device = q.device
    row_idx = (Tk - Tq) + torch.arange(Tq, device=device).unsqueeze(1)
    col_idx = torch.arange(Tk, device=device).unsqueeze(0)
    mask = col_idx <= row_idx
    if window >= 0 and window < Tk:
        mask = mask & ((row_idx - col_idx) <= window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)


class ChatBlock(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """nanochat's attention with value embeddings and norms of queries and keys, and its squared ReLU."""

    def __init__(self, has_ve: bool) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = HEADS, KEY_HEADS, WIDTH // HEADS
        self.c_q = nn.Linear(WIDTH, HEADS * self.head_dim, bias=False)
        self.c_k = nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False)
        self.c_v = nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ve_gate_channels = 12
        self.ve_gate = nn.Linear(self.ve_gate_channels, KEY_HEADS, bias=False) if has_ve else None
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def attend(
        self, x: Tensor, ve: Tensor | None, cos_sin: tuple[Tensor, Tensor], window_size: tuple[int, int]
    ) -> Tensor:
        B, T, _ = x.size()
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.c_v(x).view(B, T, self.n_kv_head, self.head_dim)
        if ve is not None:
            assert self.ve_gate is not None
            ve = ve.view(B, T, self.n_kv_head, self.head_dim)
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate_channels]))
            v = v + gate.unsqueeze(-1) * ve
        cos, sin = cos_sin
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        q, k = norm(q), norm(k)
        q = q * 1.2
        k = k * 1.2
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        enable_gqa = q.size(1) != k.size(1)
        y = sdpa_attention(q, k, v, window_size, enable_gqa).transpose(1, 2)
        y = y.contiguous().view(B, T, -1)
        return self.c_proj(y)

    def forward(
        self, x: Tensor, ve: Tensor | None, cos_sin: tuple[Tensor, Tensor], window_size: tuple[int, int]
    ) -> Tensor:
        x = x + self.attend(norm(x), ve, cos_sin, window_size)
        return x + self.c_out(F.relu(self.c_fc(norm(x))).square())


class NanoChat(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Windows in three of four layers, value embeddings in every second one; each token is smeared into the next.

    `published`: the smear is written as it was published, over rows of one token less.
    """

    def __init__(self, published: bool = False) -> None:
        super().__init__()
        self.published = published
        self.wte, self.lm_head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.h = nn.ModuleList(ChatBlock(bool(i % 2)) for i in range(LAYERS))
        self.value_embeds = nn.ModuleDict(
            {str(i): nn.Embedding(VOCAB, KEY_HEADS * WIDTH // HEADS) for i in range(LAYERS) if i % 2}
        )
        self.window_sizes = [(7, 0), (7, 0), (7, 0), (ROW, 0)]
        self.resid_lambdas = nn.Parameter(torch.ones(LAYERS))
        self.x0_lambdas = nn.Parameter(torch.full((LAYERS,), 0.1))
        self.smear_gate, self.smear_lambda = nn.Linear(24, 1, bias=False), nn.Parameter(torch.ones(1))
        self.backout_lambda = nn.Parameter(0.2 * torch.ones(1))
        frequencies = 1.0 / (100000 ** (torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)))
        freqs = torch.outer(torch.arange(10 * ROW), frequencies)
        self.register_buffer("cos", freqs.cos()[None, :, None, :], persistent=False)
        self.register_buffer("sin", freqs.sin()[None, :, None, :], persistent=False)

    def smear(self, x: Tensor) -> Tensor:
        if self.published:
            gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[:, 1:, :24]))
            return torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)
        gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[..., :24]))
        return x + gate * F.pad(x[:, :-1], (0, 0, 1, 0))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        _, T = idx.size()
        cos, sin = self.cos, self.sin
        assert isinstance(cos, Tensor)
        assert isinstance(sin, Tensor)
        cos_sin = cos[:, 0:T], sin[:, 0:T]
        x = norm(self.wte(idx))
        x = self.smear(x)
        x0 = x
        n_layer = LAYERS
        backout_layer = n_layer // 2
        x_backout = None
        for i, block in enumerate(self.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx).to(x.dtype) if str(i) in self.value_embeds else None
            x = block(x, ve, cos_sin, self.window_sizes[i])
            if i == backout_layer:
                x_backout = x
        if x_backout is not None:
            x = x - self.backout_lambda.to(x.dtype) * x_backout
        x = norm(x)
        softcap = 15
        logits = self.lm_head(x)
        logits = logits[..., :VOCAB]
        logits = logits.float()
        logits = softcap * torch.tanh(logits / softcap)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1, reduction="mean")
        return logits, loss
