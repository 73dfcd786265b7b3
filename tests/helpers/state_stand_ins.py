"""Stand-ins for functions of fla and mamba_ssm, whose kernels are for GPUs: the same arguments, token by token.

As theirs, Dynamo can't read them.
"""

from __future__ import annotations

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportConstantRedefinition=false
from collections.abc import Callable
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sequences(x: Tensor, offsets: Tensor | None, ids: Tensor | None = None) -> list[tuple[int, range]]:
    """(row of the batch, its tokens) of each sequence of x (B, T, …). ids: (B, T), alike in a sequence."""
    if offsets is not None:
        return [(0, range(a, b)) for a, b in pairwise(offsets.tolist()) if a < b]
    if ids is None:
        return [(row, range(x.shape[1])) for row in range(len(x))]
    found: list[tuple[int, range]] = []
    for row, own in enumerate(ids.tolist()):
        cuts = [0, *(t for t in range(1, len(own)) if own[t] != own[t - 1]), len(own)]
        found += [(row, range(a, b)) for a, b in pairwise(cuts)]
    return found


def walked(
    step: Callable[..., tuple[Tensor, Tensor]], rows: list[Tensor], first: Tensor, where: list[tuple[int, range]]
) -> tuple[Tensor, Tensor]:
    """(B, T, …) results and (S, …) states at the ends, from (S, …) first states of S sequences. rows: (B, T, …)."""
    found: dict[tuple[int, int], Tensor] = {}
    ends: list[Tensor] = []
    batch, count = rows[0].shape[:2]
    for state, (row, tokens) in zip(first, where, strict=True):
        for t in range(tokens.start, min(tokens.stop, count)):
            state, found[row, t] = step(state, *(x[row, t] for x in rows))
        ends.append(state)
    zero = torch.zeros_like(next(iter(found.values())))
    out = [torch.stack([found.get((row, t), zero) for t in range(count)]) for row in range(batch)]
    return torch.stack(out), torch.stack(ends)


def delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, first: Tensor | None, last: bool,
    norm: bool, offsets: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    g = g.unsqueeze(-1) if g.ndim == 3 else g

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        state = state * g.exp().unsqueeze(-1)
        wrong = v - torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", beta[:, None] * k, wrong)
        return state, torch.einsum("hk,hkv->hv", q, state)

    where = sequences(q, offsets)
    first = v.new_zeros(len(where), v.shape[2], k.shape[3], v.shape[3]) if first is None else first
    out, ends = walked(step, [q, k, v, g, beta], first, where)
    return out, ends if last else None


def in_kernel(
    g: Tensor, beta: Tensor, gate: bool, rate: Tensor | None, bias: Tensor | None, sigmoid: bool, both: bool
) -> tuple[Tensor, Tensor]:
    """(g, beta) as fla's kernels make them of what comes before gates and sigmoids."""
    if gate:
        assert rate is not None
        heads = rate.view(-1, *[1] * (g.ndim - 3)).exp()
        g = -heads * F.softplus(g if bias is None else g + bias.view(g.shape[2:]))
    beta = beta.sigmoid() * (1 + both) if sigmoid else beta
    return g, beta


@torch.compiler.disable
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs,
) -> Any:  # fmt: skip
    gate, rate, bias = (kwargs.get(name) for name in ("use_gate_in_kernel", "A_log", "dt_bias"))
    g, beta = in_kernel(g, beta, bool(gate), rate, bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return delta(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


@torch.compiler.disable
def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs,
) -> Any:  # fmt: skip
    rate, bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    g, beta = in_kernel(g, beta, use_gate_in_kernel, rate, bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return delta(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


@torch.compiler.disable
def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
) -> Any:  # fmt: skip
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))

    def step(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        state = (dt * A).exp()[:, None, None] * state + torch.einsum("hp,hn->hpn", dt[:, None] * x, B)
        return state, torch.einsum("hpn,hn->hp", state, C)

    where = sequences(x, None, seq_idx)
    first = x.new_zeros(len(where), *x.shape[2:], B.shape[3]) if initial_states is None else initial_states
    out, ends = walked(step, [x, dt, B, C], first, where)
    if D is not None:
        out = out + x * (D if D.ndim == 2 else D[:, None])
    out = out if z is None else out * F.silu(z)
    return (out, ends) if return_final_states else out


@torch.compiler.disable
def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
) -> Any:
    dt = delta if delta_bias is None else delta + delta_bias[:, None]
    dt = F.softplus(dt) if delta_softplus else dt

    def step(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        state = (dt[:, None] * A).exp() * state + (dt * x)[:, None] * B
        return state, state @ C

    where = sequences(u.mT, None)
    first = u.new_zeros(len(where), *A.shape)
    out, ends = walked(step, [x.mT for x in (u, dt, B, C)], first, where)
    out = out.mT if D is None else out.mT + u * D[:, None]
    out = out if z is None else out * F.silu(z)
    return (out, ends) if return_last_state else out


_PLACES: dict[str, Callable[..., Any]] = {
    "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.kda": chunk_kda,
    "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
    "mamba_ssm.ops.selective_scan_interface": selective_scan_fn,
}


def modules() -> dict[str, ModuleType]:
    """Modules that hold them, by the names that the libraries' have."""
    found: dict[str, ModuleType] = {}
    for name, function in _PLACES.items():
        module = found[name] = ModuleType(name)
        function.__module__ = name
        setattr(module, function.__name__, function)
    return found


REFERENCES: dict[str, Callable[..., Any]] = {
    "ignores_offsets": lambda query, key, value, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None: delta(
        query, key, value, g, beta, None, None, False, use_qk_l2norm_in_kernel, None
    ),
    "takes_offsets": lambda query, key, value, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None: delta(
        query, key, value, g, beta, None, None, False, use_qk_l2norm_in_kernel, cu_seqlens
    ),
    "reads_others": lambda query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **others: delta(
        query, key, value, g, beta, None, None, False, use_qk_l2norm_in_kernel, others.get("cu_seqlens")
    ),
    "ignores_others": lambda query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **others: delta(
        query, key, value, g, beta, None, None, False, use_qk_l2norm_in_kernel, None
    ),
    "norms_by_default": lambda query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=None: delta(
        query, key, value, g, beta, None, None, False, use_qk_l2norm_in_kernel, cu_seqlens
    ),
}
"""References in torch of custom code, of a known name."""


def custom_module(name: str) -> ModuleType:
    """A module of custom code that has one of them."""
    function: Any = REFERENCES[name]
    copy: Any = FunctionType(function.__code__, globals(), "chunk_gated_delta_rule", function.__defaults__)
    module: Any = ModuleType("transformers_modules.states")
    module.chunk_gated_delta_rule = copy
    return module
