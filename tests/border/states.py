"""Programs around the functions that pass a state through tokens, as people call fla and mamba_ssm: right ones, and
those beside, with other offsets, states that are given, kept or read, and functions that only look alike."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.border.model import VOCAB, WIDTH, Batch
from tests.border.outcome import Case
from tests.helpers import state_stand_ins
from tests.helpers.recurrent_model import packed

HEADS, DIM, STATE = 2, 8, 4
TOKENS = {"input_ids": 1, "labels": 1}
Mix = Callable[["Layers", Tensor, Batch], Tensor]
_ops: Any = torch.ops.cp_rewrite


class Layers(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Embedding, a mixing of tokens by `mix`, a head, and a loss."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = mix
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rows = nn.Linear(WIDTH, 4 * WIDTH + 2 * HEADS)
        self.rate = nn.Parameter(torch.rand(HEADS))
        self.bias = nn.Parameter(torch.rand(HEADS))
        self.rates = nn.Parameter(torch.rand(WIDTH, STATE))
        self.skips = nn.Parameter(torch.rand(HEADS, DIM))
        self.state = nn.Parameter(torch.rand(1, HEADS, DIM, DIM))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.kept: Any = None

    def forward(self, **b: Any) -> Any:
        h = self.embed(b["input_ids"])
        h = h + self.mix(self, h, b)
        return F.cross_entropy(self.head(h).flatten(0, 1), b["labels"].flatten(), reduction="sum")

    def delta(self, h: Tensor) -> dict[str, Tensor]:
        """Arguments of a gated delta rule."""
        *rows, g, beta = self.rows(h).split([WIDTH] * 4 + [HEADS] * 2, -1)
        q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in rows[:3])
        return {"q": q, "k": k, "v": v, "g": F.logsigmoid(g), "beta": beta.sigmoid()}

    def space(self, h: Tensor) -> dict[str, Tensor]:
        """Arguments of SSD."""
        x, b, c, _, dt, _ = self.rows(h).split([WIDTH] * 4 + [HEADS] * 2, -1)
        b, c = (t[..., :STATE].unsqueeze(2) for t in (b, c))
        return {"x": x.unflatten(-1, (HEADS, DIM)), "dt": F.softplus(dt), "A": -self.rate.exp(), "B": b, "C": c}

    def scan(self, h: Tensor) -> dict[str, Tensor]:
        """Arguments of a selective scan."""
        x, dt, b, c, _ = self.rows(h).split([WIDTH] * 4 + [2 * HEADS], -1)
        b, c = (t[..., :STATE].mT for t in (b, c))
        return {"u": x.mT, "delta": F.softplus(dt).mT, "A": -self.rates.exp(), "B": b, "C": c}


def fla(name: str = "gated_delta_rule") -> Any:
    module: Any = sys.modules[f"fla.ops.{name}"]
    return module.chunk_kda if name == "kda" else module.chunk_gated_delta_rule


def mamba2(**given: Any) -> Any:
    module: Any = sys.modules["mamba_ssm.ops.triton.ssd_combined"]
    return module.mamba_chunk_scan_combined(**{"chunk_size": 4, **given})


def mamba(**given: Any) -> Any:
    module: Any = sys.modules["mamba_ssm.ops.selective_scan_interface"]
    return module.selective_scan_fn(**given)


def rule(m: Layers, h: Tensor, offsets: Tensor | None = None, **more: Any) -> Tensor:
    return fla()(**{**m.delta(h), "cu_seqlens": offsets, "use_qk_l2norm_in_kernel": True, **more})[0].flatten(2)


def in_gate(m: Layers, h: Tensor, b: Batch) -> Tensor:
    return rule(m, h, None, use_gate_in_kernel=True, A_log=m.rate, dt_bias=m.bias)


def all_in_kernel(m: Layers, h: Tensor, b: Batch) -> Tensor:
    """As fla's own layer calls it."""
    given = m.delta(h) | {"g": h[..., :HEADS], "beta": h[..., HEADS : 2 * HEADS]}
    return fla()(
        **given, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=True, cu_seqlens=b["cu_seqlens"],
        use_gate_in_kernel=True, A_log=m.rate, dt_bias=m.bias,
    )[0].flatten(2)  # fmt: skip


def kimi(m: Layers, h: Tensor, b: Batch, **more: Any) -> Tensor:
    given = m.delta(h)
    decay = F.logsigmoid(given["q"] + 1)
    return fla("kda")(**{**given, "g": decay, **more})[0].flatten(2)


def kimi_in_gate(m: Layers, h: Tensor, b: Batch) -> Tensor:
    more = {"use_gate_in_kernel": True, "A_log": m.rate, "dt_bias": m.skips.flatten()}
    return kimi(m, h, b, use_beta_sigmoid_in_kernel=True, **more)


def checkpointed(m: Layers, h: Tensor, b: Batch) -> Tensor:
    return checkpoint(rule, m, h, b["cu_seqlens"], use_reentrant=False)  # type: ignore[return-value]


def final_state(m: Layers, h: Tensor, b: Batch) -> Tensor:
    return rule(m, h) + fla()(**m.delta(h), output_final_state=True)[1].mean()


def state_in_next_layer(m: Layers, h: Tensor, b: Batch) -> Tensor:
    out, state = fla()(**m.delta(h), output_final_state=True)
    return fla()(**m.delta(h + out.flatten(2)), initial_state=state)[0].flatten(2)


def carried_over(m: Layers, h: Tensor, b: Batch) -> Tensor:
    """As a cache, from step to step."""
    out, m.kept = fla()(**m.delta(h), initial_state=m.kept, output_final_state=True)
    m.kept = m.kept.detach()
    return out.flatten(2)


def kept_offsets(m: Layers, h: Tensor, b: Batch) -> Tensor:
    """Offsets of the first step stay in use."""
    m.kept = b["cu_seqlens"] if m.kept is None else m.kept
    return rule(m, h, m.kept)


def loop(m: Layers, h: Tensor, b: Batch) -> Tensor:
    state, found = h[:, 0] * 0, list[Tensor]()
    for t in range(h.shape[1]):
        state = state * m.rate.sigmoid().mean() + h[:, t]
        found.append(state)
    return torch.stack(found, 1)


def two_ways(m: Layers, h: Tensor, b: Batch) -> Tensor:
    return rule(m, h) + rule(m, h.flip(1)).flip(1)


def within_documents(m: Layers, h: Tensor, b: Batch) -> Tensor:
    """Offsets that are counted anew from the ends that came in."""
    return rule(m, h, F.pad(b["cu_seqlens"].diff().cumsum(0), (1, 0)))


def sorted_tokens(m: Layers, h: Tensor, b: Batch) -> Tensor:
    order = h[0, :, 0].argsort()
    return rule(m, h[:, order])[:, order.argsort()]


def of_rows(m: Layers, h: Tensor, b: Batch) -> Tensor:
    """Halves of the row as a batch of two."""
    half = h.shape[1] // 2
    return F.pad(rule(m, h[:, : 2 * half].reshape(2, half, -1)).reshape(1, 2 * half, -1), (0, 0, 0, h.shape[1] % 2))


def ssd_whole(m: Layers, h: Tensor, b: Batch) -> Tensor:
    more = {"dt_bias": m.bias, "dt_softplus": True, "dt_limit": (0.01, 2.0), "D": m.bias}
    return mamba2(**m.space(h), **more).flatten(2)


def ids_of(b: Batch, shift: int = 0) -> Tensor:
    """(1, T) documents of tokens, by offsets that are moved."""
    at = torch.arange(b["input_ids"].shape[1])
    return torch.bucketize(at, b["cu_seqlens"][1:-1] + shift, right=True)[None].int()


def custom(m: Layers, h: Tensor, b: Batch) -> Tensor:
    module: Any = sys.modules["transformers_modules.states"]
    given = m.delta(h)
    given["query"], given["key"], given["value"] = (given.pop(name) for name in "qkv")
    return module.chunk_gated_delta_rule(**given, cu_seqlens=b["cu_seqlens"])[0].flatten(2)


def of_tokens(m: Layers, h: Tensor, b: Batch) -> Tensor:
    """A rate of the row's mean."""
    return mamba2(**m.space(h) | {"A": -h.mean((0, 1))[:HEADS].exp()}).flatten(2)


PROGRAMS: dict[str, Mix] = {
    # fla by its names
    "plain": lambda m, h, b: rule(m, h),
    "offsets": lambda m, h, b: rule(m, h, b["cu_seqlens"]),
    "partial": lambda m, h, b: functools.partial(fla(), scale=0.3)(**m.delta(h))[0].flatten(2),
    "by_place": lambda m, h, b: fla()(*m.delta(h).values(), 0.3)[0].flatten(2),
    "alias": lambda m, h, b: {"run": fla()}["run"](**m.delta(h))[0].flatten(2),
    "twice": lambda m, h, b: rule(m, rule(m, h), b["cu_seqlens"]),
    "beside": lambda m, h, b: rule(m, h) * rule(m, h.tanh(), b["cu_seqlens"]),
    "checkpoint": checkpointed,
    "in_gate": in_gate,
    "all_in_kernel": all_in_kernel,
    "raw_beta": lambda m, h, b: rule(m, h, None, use_beta_sigmoid_in_kernel=True),
    "kimi": kimi,
    "kimi_offsets": lambda m, h, b: kimi(m, h, b, cu_seqlens=b["cu_seqlens"]),
    "kimi_in_gate": kimi_in_gate,
    "kimi_bounded": lambda m, h, b: kimi(m, h, b, safe_gate=True, lower_bound=-5.0),
    "unknown": lambda m, h, b: rule(m, h, None, chunk_indices=b["cu_seqlens"]),
    "other_chunks": lambda m, h, b: rule(m, h, None, chunk_size=16),
    "shared_keys": lambda m, h, b: rule(m, h, None, k=m.delta(h)["q"][:, :, :1], q=m.delta(h)["q"][:, :, :1]),
    "two_rows": of_rows,
    # beside: which tokens
    "two_ways": two_ways,
    "shifted_keys": lambda m, h, b: rule(m, h, None, k=m.delta(F.pad(h, (0, 0, 1, -1)))["k"]),
    "every_other": lambda m, h, b: rule(m, h[:, ::2]).sum(1, keepdim=True) + h,
    "all_but_last": lambda m, h, b: F.pad(rule(m, h[:, :-1]), (0, 0, 0, 1)),
    "after_prefix": lambda m, h, b: rule(m, torch.cat([m.skips.flatten().expand(1, 3, -1), h], 1))[:, 3:],
    "sorted": sorted_tokens,
    "moved_out": lambda m, h, b: F.pad(rule(m, h), (0, 0, 2, -2)),
    "heads_first": lambda m, h, b: (
        fla()(*(x.transpose(1, 2) for x in m.delta(h).values()))[0].transpose(1, 2).flatten(2)
    ),
    "detached": lambda m, h, b: rule(m, h, None, v=m.delta(h)["v"].detach()),
    "loop": loop,
    # beside: which offsets
    "flipped_offsets": lambda m, h, b: rule(m, h, b["cu_seqlens"][-1] - b["cu_seqlens"].flip(0)),
    "later_offsets": lambda m, h, b: rule(m, h, (b["cu_seqlens"] + 1).clamp(max=h.shape[1])),
    "long_offsets": lambda m, h, b: rule(m, h, b["cu_seqlens"].long()),
    "same_offsets": lambda m, h, b: rule(m, h, b["cu_seqlens"][:]),
    "copied_offsets": lambda m, h, b: rule(m, h, b["cu_seqlens"].clone()),
    "whole_row": lambda m, h, b: rule(m, h, b["cu_seqlens"][[0, -1]]),
    "fewer_offsets": lambda m, h, b: rule(m, h, b["cu_seqlens"][:-1]),
    "counted_offsets": within_documents,
    "other_offsets": lambda m, h, b: rule(m, h, b["other"]),
    "kept_offsets": kept_offsets,
    # states
    "final_state": final_state,
    "unread_state": lambda m, h, b: fla()(**m.delta(h), output_final_state=True)[0].flatten(2),
    "first_state": lambda m, h, b: rule(m, h, None, initial_state=m.state),
    "zero_state": lambda m, h, b: rule(m, h, None, initial_state=m.state * 0),
    "next_layer": state_in_next_layer,
    "carried_over": carried_over,
    # mamba_ssm by its names
    "ssd": lambda m, h, b: mamba2(**m.space(h)).flatten(2),
    "ssd_whole": ssd_whole,
    "ssd_skips": lambda m, h, b: mamba2(**m.space(h), D=m.skips).flatten(2),
    "ssd_gate": lambda m, h, b: mamba2(**m.space(h), z=m.delta(h)["v"]).flatten(2),
    "ssd_chunks": lambda m, h, b: mamba2(**m.space(h), chunk_size=7).flatten(2),
    "ssd_ids": lambda m, h, b: mamba2(**m.space(h), seq_idx=ids_of(b)).flatten(2),
    "ssd_other_ids": lambda m, h, b: mamba2(**m.space(h), seq_idx=ids_of(b, 1)).flatten(2),
    "ssd_offsets": lambda m, h, b: mamba2(**m.space(h), cu_seqlens=b["cu_seqlens"]).flatten(2),
    "ssd_first_state": lambda m, h, b: mamba2(**m.space(h), initial_states=m.state[..., :STATE]).flatten(2),
    "ssd_final_state": lambda m, h, b: mamba2(**m.space(h), return_final_states=True)[0].flatten(2),
    "ssd_of_tokens": of_tokens,
    "scan": lambda m, h, b: mamba(**m.scan(h)).mT,
    "scan_whole": lambda m, h, b: mamba(**m.scan(h), D=m.skips.flatten(), z=h.mT, delta_softplus=True).mT,
    "scan_last_state": lambda m, h, b: mamba(**m.scan(h), return_last_state=True)[0].mT,
    # ops by name
    "op_other_offsets": lambda m, h, b: _ops.ssd(*m.space(h).values(), b["other"]).flatten(2),
    "op_two_ways": lambda m, h, b: _ops.ssd(*m.space(h.flip(1)).values(), None).flip(1).flatten(2),
    # functions that only look alike
    **dict.fromkeys(state_stand_ins.REFERENCES, custom),
}  # fmt: skip


def batches(*sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """`other`: offsets of another batch, of as many documents."""
    return [packed(lengths) | {"other": packed(sorted(lengths, reverse=True))["cu_seqlens"]} for lengths in sizes]


WAYS: dict[str, dict[str, Any]] = {
    "odd": {"sizes": [(5, 1, 9), (1, 1, 12)], "how": {"layout": "balanced"}},
    "double": {"sizes": [(5, 1, 60), (1, 1, 1)], "how": {"layout": "head_tail"}, "dtype": torch.float64},
    "resets": {"sizes": [(5, 1, 9)], "how": {"layout": "dual_chunk", "reset_states": True}},
    "tiles": {"sizes": [(5, 1, 9), (3, 70, 1)], "how": {"layout": "head_tail", "tile": 4}},
    "capacity": {"sizes": [(5, 1, 9)], "how": {"capacity": cp.Capacity(64, 8, 64)}},
}


def names() -> list[tuple[str, ...]]:
    """The last three with programs whose one process begins states anew at documents."""
    own = [("offsets", way) for way in ("resets", "tiles", "capacity")]
    return [(program, way) for program in PROGRAMS for way in ("odd", "double")] + own


def make(program: str, way: str) -> Case:
    sys.modules |= state_stand_ins.modules()
    if PROGRAMS[program] is custom:
        sys.modules["transformers_modules.states"] = state_stand_ins.custom_module(program)
    chosen = WAYS[way]
    dtype, sizes = chosen.get("dtype", torch.float32), batches(*chosen["sizes"])
    packing = cp.CuSeqlens("cu_seqlens")
    return Case(lambda: Layers(PROGRAMS[program]).to(dtype), sizes, TOKENS, packing, how=chosen["how"])
