"""Recurrences token by token in fp64, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite.ops.states.maps import INPUTS

KINDS = tuple(INPUTS)


def options_of(kind: str) -> tuple[float, bool] | tuple[()]:
    return (0.5, True) if kind in ("gated_delta_rule", "kimi_delta") else ()


def inputs_of(kind: str, rows: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Inputs (rows, tokens, …) of 2 heads, of different widths where they may differ."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    at = rows, tokens
    if kind == "ssd":
        found = [draw(*at, 4, 3), F.softplus(draw(*at, 4)), -draw(4).exp(), draw(*at, 2, 5), draw(*at, 2, 5)]
    elif kind == "selective_scan":
        found = [draw(*at, 6), F.softplus(draw(*at, 6)), -draw(6, 5).exp(), draw(*at, 5), draw(*at, 5)]
    else:
        heads = 1 if kind == "gated_delta_rule" else 2
        decay = -F.softplus(2 * draw(*at, 2, *([4] if kind == "kimi_delta" else [])) - 1)
        found = [draw(*at, heads, 4), draw(*at, heads, 4), draw(*at, 2, 3), decay, draw(*at, 2).sigmoid()]
    return [x.to(dtype) for x in found]


def oracle(kind: str, inputs: Sequence[Tensor], offsets: Sequence[int] | None) -> Tensor:
    """(B, T, …): what one process computes, token by token."""
    rows, tokens = inputs[0].shape[:2]
    bounds = [b * tokens for b in range(rows + 1)] if offsets is None else list(offsets)
    flat = [x.double() if _is_rate(kind, i) else x.double().flatten(0, 1) for i, x in enumerate(inputs)]
    step = _STEPS[kind]
    zero = 0 * step(None, *_token(kind, flat, 0))[1]
    found = [zero] * (rows * tokens)
    for start, stop in pairwise(bounds):
        state: Tensor | None = None
        for t in range(start, stop):
            state, found[t] = step(state, *_token(kind, flat, t))
    return torch.stack(found).unflatten(0, (rows, tokens))


def _is_rate(kind: str, number: int) -> bool:
    return number == 2 and kind in ("ssd", "selective_scan")


def _token(kind: str, flat: list[Tensor], t: int) -> list[Tensor]:
    return [x if _is_rate(kind, i) else x[t] for i, x in enumerate(flat)]


def _delta(state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[0] // x.shape[0], 0) for x in (q, k))
    state = k.new_zeros(*k.shape, v.shape[-1]) if state is None else state
    state = state * (g[:, None, None] if g.ndim == 1 else g.unsqueeze(-1)).exp()
    wrong = v - torch.einsum("hk,hkv->hv", k, state)
    state = state + torch.einsum("hk,hv->hkv", beta[:, None] * k, wrong)
    return state, torch.einsum("hk,hkv->hv", 0.5 * q, state)


def _ssd(state: Tensor | None, x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    b, c = (t.repeat_interleave(x.shape[0] // t.shape[0], 0) for t in (b, c))
    added = torch.einsum("hp,hn->hpn", dt[:, None] * x, b)
    state = (torch.zeros_like(added) if state is None else state) * (dt * rate).exp()[:, None, None] + added
    return state, torch.einsum("hpn,hn->hp", state, c)


def _scan(state: Tensor | None, x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    added = (dt * x)[:, None] * b
    state = (torch.zeros_like(added) if state is None else state) * (dt[:, None] * rate).exp() + added
    return state, state @ c


_STEPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gated_delta_rule": _delta,
    "kimi_delta": _delta,
    "ssd": _ssd,
    "selective_scan": _scan,
}
