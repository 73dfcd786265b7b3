"""Maps of chunks: what a chunk of tokens makes of the state that enters it, and how states pass through chains of such
maps.

S_out = move · S_in + add. `move` is a matrix of each head, or numbers that broadcast with the state.

    Maps, run_chains, compose                   maps, and chains of them
    delta_maps, ssd_maps, selective_maps        the maps of each recurrence
    fold                                        states that enter the cut pieces of a rank
    INPUTS, inputs_of, state_shapes, …          the recurrences by name: their inputs, options and results
    chunk_maps, to_rows                         inputs in chunks, and results in rows again

Shapes: C chunks of L tokens, n chains; R local rows; H heads; of delta rules K and V head dims of keys and values; of
state spaces heads of dim P, G groups, N numbers of a state for each of P or of E channels. Of cut pieces N, S, V, F as
in `planning/states.py`, which draws the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.ops.exchanges.needed import all_to_all_rows


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
        maps: level-major, `levels` of each level: see `planning/intervals.py`.
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

    From Yang et al., Gated Delta Networks (arXiv 2412.06464), and Kimi Linear (arXiv 2510.26692), whose WY form of a
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


def fold(own: Maps, t: SimpleNamespace, way: str, group: str) -> Tensor:
    """(N, *state) what enters each cut piece, from in front (`way` "") or from behind ("_back"): summaries of other
    pieces, exchanged and folded in the order of their sequence.

    Args:
        own: (N) maps of this rank's cut pieces.
    """
    known = own
    send_rows, order, levels, place = (
        getattr(t, name + way) for name in ("send_summaries", "fold_order", "fold_levels", "fold_place")
    )
    if group:
        send, recv = getattr(t, "splits" + way).tolist()
        packed = torch.cat([own.move.flatten(1), own.add.flatten(1)], 1)
        received = all_to_all_rows(packed.index_select(0, send_rows[: sum(send)]), recv, send, group)
        move, add = received.split([own.move[0].numel(), own.add[0].numel()], 1)
        known = Maps(
            torch.cat([own.move, move.unflatten(1, own.move.shape[1:])]),
            torch.cat([own.add, add.unflatten(1, own.add.shape[1:])]),
            own.dense,
        )
    counts = levels.tolist()
    before, ends = run_chains(known.take(order), counts, known.zeros(counts[0]))
    found = torch.cat([known.zeros(1), before, ends])
    return found.index_select(0, place + 1)


@dataclass(frozen=True)
class Options:
    """Options of delta rules. scale: of queries. l2norm: queries and keys are divided by their norms."""

    scale: float = 1.0
    l2norm: bool = False


_KINDS: dict[str, Callable[[Sequence[Tensor], Options], tuple[Maps, Read]]] = {
    "gated_delta_rule": lambda inputs, how: delta_maps(inputs, how.scale, how.l2norm),
    "kimi_delta": lambda inputs, how: delta_maps(inputs, how.scale, how.l2norm),
    "ssd": lambda inputs, _: ssd_maps(inputs),
    "selective_scan": lambda inputs, _: selective_maps(inputs),
}
_DELTA, _SPACE = ("q", "k", "v", "g", "beta"), ("x", "dt", "A", "B", "C")
INPUTS = {"gated_delta_rule": _DELTA, "kimi_delta": _DELTA, "ssd": _SPACE, "selective_scan": _SPACE}
"""Inputs with gradients, in order. All have rows but A, a weight."""


def inputs_of(kind: str, known: SimpleNamespace) -> list[Tensor]:
    """The inputs that `INPUTS` names, among an op's arguments by name."""
    return [getattr(known, name) for name in INPUTS[kind]]


def options_of(known: SimpleNamespace) -> Options:
    """The options among an op's arguments by name."""
    return Options(getattr(known, "scale", 1.0), getattr(known, "l2norm", False))


def out_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of results, by that of the first input."""
    return wide(dtype) if kind == "ssd" else dtype


def fake_out(kind: str, *inputs: Any) -> Tensor:
    """The result of an op over rows, without its values."""
    first = inputs[0]
    shape = (inputs[2] if INPUTS[kind] is _DELTA else first).shape
    return first.new_empty(shape, dtype=out_dtype(kind, first.dtype))


def state_shapes(kind: str, inputs: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Shapes of one state, and of what moves it."""
    first, third, fourth = inputs[0], inputs[2], inputs[3]
    if kind == "selective_scan":
        return list(third.shape), list(third.shape)
    heads = third.shape[2] if INPUTS[kind] is _DELTA else first.shape[2]
    if kind == "ssd":
        return [heads, fourth.shape[3], first.shape[3]], [heads, 1, 1]
    return [heads, first.shape[3], third.shape[3]], [heads, first.shape[3], first.shape[3]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds states of inputs of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def chunk_maps(kind: str, inputs: Sequence[Tensor], rows: Tensor, size: int, how: Options) -> tuple[Maps, Read]:
    """Maps of the chunks of inputs (B, T, …). rows: (C L,) among B T, -1: none. size: L."""
    dtype = wide(inputs[0].dtype)
    chunked = [
        x.to(dtype) if name == "A" else _chunks(x.flatten(0, 1), rows, size).to(dtype)
        for name, x in zip(INPUTS[kind], inputs, strict=True)
    ]
    return _KINDS[kind](chunked, how)


def _chunks(x: Tensor, rows: Tensor, size: int) -> Tensor:
    """(C, L, …) of (R, …); 0 where there is no row, whatever other rows hold."""
    if not x.shape[0]:
        return x.new_zeros(rows.numel() // size, size, *x.shape[1:])
    there = (rows >= 0).view(-1, *[1] * (x.ndim - 1))
    found = torch.where(there, x.index_select(0, rows.clamp(min=0)), 0.0)
    return found.unflatten(0, (-1, size))


def to_rows(results: Tensor, rows: Tensor, size: int) -> Tensor:
    """(R, …) of the results of chunks (C, L, …): 0 in rows of no chunk. size: R."""
    found = results.flatten(0, 1)
    out = found.new_zeros(size + 1, *found.shape[1:])
    return out.index_copy(0, torch.where(rows < 0, size, rows).long(), found)[:size]
