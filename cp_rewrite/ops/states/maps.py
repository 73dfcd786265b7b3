"""Maps of chunks: what a chunk of tokens makes of the state that enters it, and how states pass through chains of such
maps.

S_out = move · S_in + add. `move` is a matrix of each head, or numbers that broadcast with the state.

Shapes: C chunks of L tokens, n chains; H heads; of delta rules K and V head dims of keys and values; of state spaces
heads of dim P, G groups, N numbers of a state for each of P or of E channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Maps:
    """Maps of C chunks or pieces.

    Args:
        move: (C, H, K, K) with `dense`; else broadcasts with `add`.
        add: (C, *state).
    """

    move: Tensor
    add: Tensor
    dense: bool

    def take(self, index: Tensor) -> Maps:
        """The maps at `index`."""
        return Maps(self.move.index_select(0, index), self.add.index_select(0, index), self.dense)

    def zeros(self, count: int) -> Tensor:
        """(count, *state)."""
        return self.add.new_zeros(count, *self.add.shape[1:])


Read = Callable[[Tensor], Tensor]
"""States before each chunk (C, *state) -> results (C, CHUNK, …)."""


def run_chains(maps: Maps, levels: Sequence[int], start: Tensor) -> tuple[Tensor, Tensor]:
    """(C, *state) before each map and (n, *state) at the end of each chain, from (n, *state) at the starts.

    Args:
        maps: level-major, `levels` of each level: see `planning/token_reads/chunks.py`.
    """
    state, at = start, 0
    before: list[Tensor] = []
    ends: list[Tensor] = []
    for count in (count for count in levels if count):
        ends.append(state[count:])
        state = state[:count]
        before.append(state)
        move, add = maps.move[at : at + count], maps.add[at : at + count]
        state = (move @ state if maps.dense else move * state) + add
        at += count
    ends.append(state)
    return torch.cat(before) if before else start[:0], torch.cat(ends[::-1])


def compose(maps: Maps, levels: Sequence[int]) -> Maps:
    """(n) maps, each of all steps of a chain in turn."""
    chains = levels[0]
    _, add = run_chains(maps, levels, maps.zeros(chains))
    shape = maps.move.shape[1:]
    one = torch.eye(shape[-1], dtype=add.dtype, device=add.device) if maps.dense else add.new_ones(shape)
    moves = Maps(maps.move, maps.move.new_zeros(1).expand_as(maps.move), maps.dense)
    _, move = run_chains(moves, levels, one.expand(chains, *shape))
    return Maps(move, add, maps.dense)


_BLOCK = 16


def delta_maps(inputs: Sequence[Tensor], scale: float, l2norm: bool) -> tuple[Maps, Read]:
    """Maps of states (H, K, V) of the gated delta rule: a number decays the state, or one for each of K channels.

        S_t = (I - beta_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} + beta_t k_t v_tᵀ        o_t = S_tᵀ q_t · scale

    Of Yang et al., Gated Delta Networks (arXiv 2412.06464), and Kimi Linear (arXiv 2510.26692), whose WY form of a
    chunk becomes one map here.

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


def ssd_maps(inputs: Sequence[Tensor]) -> tuple[Maps, Read]:
    """Maps of states (H, N, P) of Dao and Gu, Mamba-2 (arXiv 2405.21060).

        S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_tᵀ            o_t = S_tᵀ C_t

    inputs: x (C, L, H, P), dt (C, L, H), A (H,), B and C (C, L, G, N).
    """
    x, dt, rate, write, look = inputs
    heads = x.shape[2]
    write, look = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (write, look))
    values = (x * dt.unsqueeze(-1)).transpose(1, 2)
    decay = (dt * rate).cumsum(1).transpose(1, 2)
    inside = _decayed_products(look, write, decay.unsqueeze(-1)) @ values
    reading = look * decay.exp().unsqueeze(-1)
    last = decay[..., -1:]
    leaving = write * (last - decay).exp().unsqueeze(-1)

    def read(states: Tensor) -> Tensor:
        return (inside + reading @ states).transpose(1, 2)

    return Maps(last.exp().unsqueeze(-1), leaving.transpose(-1, -2) @ values, dense=False), read


def selective_maps(inputs: Sequence[Tensor]) -> tuple[Maps, Read]:
    """Maps of states (E, N) of Gu and Dao, Mamba (arXiv 2312.00752).

        S_t = exp(dt_t A) ∘ S_{t-1} + (dt_t x_t) B_tᵀ        o_t = S_t C_t

    inputs: x and dt (C, L, E), A (E, N), B and C (C, L, N).
    """
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
