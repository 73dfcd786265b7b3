"""State-space layers, chunk by chunk, in torch.

    SSD               S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_tᵀ            o_t = S_tᵀ C_t
    selective scan    S_t = exp(dt_t A) ∘ S_{t-1} + (dt_t x_t) B_tᵀ        o_t = S_t C_t

Of Dao and Gu, Mamba-2 (arXiv 2405.21060), and Gu and Dao, Mamba (arXiv 2312.00752).

Shapes: C chunks of L tokens, H heads of dim P, G groups, N numbers of a state for each of P or of E channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .maps import Maps, Read


def ssd_maps(inputs: Sequence[Tensor]) -> tuple[Maps, Read]:
    """Maps of states (H, N, P). inputs: x (C, L, H, P), dt (C, L, H), A (H,), B and C (C, L, G, N)."""
    x, dt, rate, write, look = inputs
    heads = x.shape[2]
    write, look = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (write, look))
    values = (x * dt.unsqueeze(-1)).transpose(1, 2)
    decay = (dt * rate).cumsum(1).transpose(1, 2)
    above = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=x.device).triu(1)
    pairs = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    inside = (look @ write.transpose(-1, -2) * pairs) @ values
    reading = look * decay.exp().unsqueeze(-1)
    last = decay[..., -1:]
    leaving = write * (last - decay).exp().unsqueeze(-1)

    def read(states: Tensor) -> Tensor:
        return (inside + reading @ states).transpose(1, 2)

    return Maps(last.exp().unsqueeze(-1), leaving.transpose(-1, -2) @ values, dense=False), read


def selective_maps(inputs: Sequence[Tensor]) -> tuple[Maps, Read]:
    """Maps of states (E, N). inputs: x and dt (C, L, E), A (E, N), B and C (C, L, N)."""
    x, dt, rate, write, look = inputs
    values = x * dt
    decay = dt.cumsum(1)
    state = x.new_zeros(x.shape[0], *rate.shape)
    inside: list[Tensor] = []
    for token in range(x.shape[1]):
        added = values[:, token].unsqueeze(-1) * write[:, token].unsqueeze(1)
        state = (dt[:, token].unsqueeze(-1) * rate).exp() * state + added
        inside.append((state @ look[:, token].unsqueeze(-1)).squeeze(-1))

    def read(states: Tensor) -> Tensor:
        entered = [
            (((decay[:, token].unsqueeze(-1) * rate).exp() * states) @ look[:, token].unsqueeze(-1)).squeeze(-1)
            for token in range(x.shape[1])
        ]
        return torch.stack(inside, 1) + torch.stack(entered, 1)

    return Maps((decay[:, -1].unsqueeze(-1) * rate).exp(), state, dense=False), read
