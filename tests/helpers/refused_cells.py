"""Cells of the conformance table that no exchange or kernel runs, and that name their reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import cp_rewrite as cp
from cp_rewrite import Reason, Refusal
from cp_rewrite.kernels.select import ORDER, AttentionSpec, DeviceFacts, reasons

TOKENS = 24


@dataclass(frozen=True)
class Refused:
    """attention: of x (1, 4, T, 8) and the packed mask (1, 1, T, T). options: of `Sharding`."""

    what: str
    attention: Callable[[Tensor, Tensor], Any]
    reason: Reason
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.what


def plain(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def dropout(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.1)


def cached_keys(x: Tensor, mask: Tensor) -> Tensor:
    keys = torch.cat([torch.zeros_like(x), x], 2)
    return F.scaled_dot_product_attention(x, keys, keys, is_causal=True)


def two_dims(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[0, 0], x[0, 0], x[0, 0], attn_mask=mask[0, 0])


def biased(x: Tensor, mask: Tensor) -> Tensor:
    position = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)
    bias = (position[None, :] - position[:, None]) * 0.1
    return F.scaled_dot_product_attention(x, x, x, attn_mask=bias.masked_fill(~mask, -torch.inf))


def biased_score(x: Tensor, mask: Tensor) -> Any:
    return flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score + (k - q) * 0.1)


def scores_used(x: Tensor, mask: Tensor) -> Any:
    return flex_attention(x, x, x, return_lse=True)


REFUSED = (
    Refused("dropout 0.1", dropout, Reason.DROPOUT),
    Refused("q length ≠ k length (KV cache)", cached_keys, Reason.QK_LENGTH),
    Refused("q, k, v of two dims", two_dims, Reason.SHAPE),
    Refused("ALiBi bias in the mask", biased, Reason.MASK_NOT_PACKED),
    Refused("ALiBi bias as a flex score_mod", biased_score, Reason.KERNEL),
    Refused("flex_attention's logsumexp used", scores_used, Reason.KERNEL),
    Refused("p2p with keep_kv=True", plain, Reason.EXCHANGE, {"exchange": "p2p", "keep_kv": True}),
    *(
        Refused(f"{exchange} over one dim of ranks", plain, Reason.EXCHANGE, {"exchange": exchange})
        for exchange in ("a2a+p2p", "a2a+needed", "a2a+all_gather")
    ),
    *(
        Refused(f"kernel {name} where there is no GPU", plain, Reason.KERNEL, {"kernel": name, "speeds": "cpu"})
        for name in ("fa4", "fa3", "aten_flash")
    ),
)


def refusals_of(case: Refused) -> tuple[Refusal, ...]:
    """Refusals of a dry run over four ranks."""
    sharding = cp.Sharding(4, {"x": 1, "doc_ids": 1}, cp.DocumentIds("doc_ids"), **case.options)

    def model(x: Tensor, doc_ids: Tensor) -> Any:
        mask = (doc_ids[:, :, None] == doc_ids[:, None, :]).tril()[:, None]
        return case.attention(x.unflatten(2, (4, 8)).transpose(1, 2), mask)

    torch._dynamo.reset()
    batch = {"x": torch.randn(1, TOKENS, 32), "doc_ids": torch.arange(TOKENS)[None] // 9}
    return cp.explain(model, sharding)(**batch).refusals


HOPPER = DeviceFacts((9, 0), frozenset({"flash_attn.cute", "flash_attn_interface"}), frozenset({"fa3_backward"}))


def kernel_cells() -> Iterator[tuple[str, AttentionSpec]]:
    """(what, spec) of attention that some kernel may not run."""
    shapes = [(8, 8, 64, 64), (8, 2, 96, 96), (8, 2, 128, 128), (8, 8, 192, 128), (8, 2, 192, 128), (8, 8, 128, 64)]
    for heads, heads_kv, dim, dim_v in [*shapes, (8, 2, 256, 256), (8, 2, 36, 36)]:
        for softcap, deterministic in ((0.0, False), (30.0, False), (0.0, True)):
            extras = [name for name, on in (("soft cap", softcap), ("deterministic", deterministic)) if on]
            spec = AttentionSpec(
                torch.bfloat16, dim, dim_v, heads, heads_kv, softcap=softcap, deterministic=deterministic
            )
            yield f"{heads}/{heads_kv} | {dim}/{dim_v} | bfloat16 | {', '.join(extras) or '–'}", spec
    yield "8/8 | 64/64 | float32 | –", AttentionSpec(torch.float32, 64, 64, 8, 8)


def refusal_lines() -> Iterator[str]:
    """Both tables as Markdown."""
    yield "| refused | `Reason` | says |"
    yield "| --- | --- | --- |"
    for case in REFUSED:
        said = next(refusal.detail for refusal in refusals_of(case) if refusal.reason == case.reason)
        detail = re.sub(r"\bs\d+\b", "T", said.removeprefix("no kernel\n"))
        yield f"| {case} | `{case.reason.name}` | {detail} |"
    yield ""
    yield "Kernels on a Hopper GPU, forward and backward, where all of them are installed:"
    yield ""
    yield f"| heads | head dims | dtype | extras | {' | '.join(ORDER)} |"
    yield "| " + " | ".join(["---"] * (4 + len(ORDER))) + " |"
    for what, spec in kernel_cells():
        yield f"| {what} | " + " | ".join("; ".join(reasons(name, spec, HOPPER)) or "runs" for name in ORDER) + " |"
