"""The gated delta rule, chunk by chunk, in torch: a number a token decays the state, or one for each of K channels.

    S_t = (I - beta_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} + beta_t k_t v_tᵀ        o_t = S_tᵀ q_t · scale

Of Yang et al., Gated Delta Networks (arXiv 2412.06464), and Kimi Linear (arXiv 2510.26692), whose WY form of a chunk
becomes one map here. Shapes: C chunks of L tokens, H heads, K and V head dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .maps import Maps, Read

_BLOCK = 16


def delta_maps(inputs: Sequence[Tensor], scale: float, l2norm: bool) -> tuple[Maps, Read]:
    """Maps of states (H, K, V).

    Args:
        inputs: q, k (C, L, Hk, K), v (C, L, H, V), g (C, L, H) or (C, L, H, K), beta (C, L, H).
        scale: of q. l2norm: q and k are divided by their norms.
    """
    q, k, v, g, beta = (x.transpose(1, 2) for x in inputs)
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * scale, k))
    g = g.unsqueeze(-1) if g.ndim == 3 else g
    decay = g.cumsum(2)
    k_beta, v_beta = k * beta.unsqueeze(-1), v * beta.unsqueeze(-1)
    system = _decayed_products(k_beta, k, decay)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([v_beta, k_beta * decay.exp()], -1), upper=False, unitriangular=True
    )
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    weights = _decayed_products(q, k, decay)
    last = decay[:, :, -1:]
    leaving = (k * (last - decay).exp()).transpose(-1, -2)
    kept = torch.diag_embed(last.squeeze(2).exp().expand(*k.shape[:2], k.shape[-1]))
    reading = q * decay.exp() - weights @ keys
    inside = weights @ values

    def read(states: Tensor) -> Tensor:
        return (inside + reading @ states).transpose(1, 2)

    return Maps(kept - leaving @ keys, leaving @ values, dense=True), read


def _decayed_products(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """(C, H, L, L): the sum over channels of a_i b_j exp(decay_i - decay_j) for i ≥ j, else 0. decay (C, H, L, 1 or K).

    No exponent is above 0 where `decay` falls. With a decay of each channel, products of different blocks are taken
    through the decay at the start of the later one.
    """
    if decay.shape[-1] == 1:
        return a @ b.transpose(-1, -2) * _pairs(decay).squeeze(-1)
    length = a.shape[2]
    rows: list[Tensor] = []
    for start in range(0, length, _BLOCK):
        own = slice(start, start + _BLOCK)
        parts = [(a[:, :, own].unsqueeze(3) * b[:, :, own].unsqueeze(2) * _pairs(decay[:, :, own])).sum(-1)]
        if start:
            border = decay[:, :, start : start + 1]
            left = a[:, :, own] * (decay[:, :, own] - border).exp()
            right = b[:, :, :start] * (border - decay[:, :, :start]).exp()
            parts.insert(0, left @ right.transpose(-1, -2))
        rows.append(torch.nn.functional.pad(torch.cat(parts, -1), (0, length - start - _BLOCK)))
    return torch.cat(rows, 2)


def _pairs(decay: Tensor) -> Tensor:
    """exp(decay_i - decay_j) for i ≥ j, else 0: (…, L, L, K) of (…, L, K)."""
    length = decay.shape[-2]
    above = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu(1).unsqueeze(-1)
    return (decay.unsqueeze(-2) - decay.unsqueeze(-3)).masked_fill(above, float("-inf")).exp()
