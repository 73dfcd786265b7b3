"""What a trainer calls its model with, as `Sharding.shard` takes it: one argument tells documents apart, no mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import cp_rewrite as cp

DERIVED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What padding-free collators add for other kernels. It says what `position_ids` say."""


def global_batch(values: Mapping[str, Any], sharding: cp.Sharding, *, causal: bool) -> dict[str, Any]:
    """The arguments without an attention mask, and the argument that tells documents apart on the host.

    Where position ids do that and are missing, they are made: a row is a document, and so is the padding at its end.

        attention_mask  1 1 1 0 0
        position_ids    0 1 2 0 1

    Raises:
        ValueError: a mask that is no padding at the end of rows, or that the documents contradict; a cache of keys.
    """
    if values.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values came into a step of a trainer: generate() is not sharded, call it outside of steps, as "
            "in a callback; prefixes of PEFT are not supported"
        )
    packing, batch = sharding.packing, {name: value for name, value in values.items() if value is not None}
    packed_by = (packing.arg, packing.padded_arg) if isinstance(packing, cp.CuSeqlens) else (packing.arg,)
    kept = {*sharding.tokens, *packed_by}
    for name in DERIVED:
        if name not in kept:
            batch.pop(name, None)
    mask = None if "attention_mask" in kept else batch.pop("attention_mask", None)
    if mask is not None:
        mask = _padding(mask, causal)
    if isinstance(packing, cp.PositionIds):
        batch[packing.arg] = _positions(batch, packing.arg, mask)
    elif mask is not None and not mask.all():
        raise ValueError(f"attention_mask marks padding: let {packing.arg!r}, which tells documents apart, do that")
    # Trainers have put it on the device. Documents are read on the host; this waits, as the Trainer does in every step.
    batch |= {name: value.cpu() for name in packed_by if name and isinstance(value := batch.get(name), Tensor)}
    return batch


def _padding(mask: Any, causal: bool) -> Tensor:
    """(B, T) bool on the host, true for tokens that are no padding."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise ValueError(f"attention_mask must be (B, T), got {tuple(getattr(mask, 'shape', ()))}: leave it out")
    mask = mask.cpu().bool()
    if not (mask == (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True))).all():
        raise ValueError("attention_mask marks padding before tokens: pad rows at their end, padding_side='right'")
    if not causal and not mask.all():
        raise ValueError("attention_mask marks padding, and a model that is not causal attends to it: pack the rows")
    return mask


def _positions(batch: Mapping[str, Any], arg: str, mask: Tensor | None) -> Tensor:
    """(B, T) position ids on the host: the batch's own, or made from the mask."""
    given = batch.get(arg)
    if given is not None and mask is None:
        return given.cpu()
    rows, total = batch["input_ids"].shape if mask is None else mask.shape
    index = torch.arange(total).expand(rows, total)
    if mask is None:
        return index
    if given is not None and not ((given.cpu() == index) | ~mask).all():
        raise ValueError(
            f"{arg!r} start again inside of rows, and transformers ignores that beside an attention_mask: leave the "
            "mask out, as padding-free collators do"
        )
    lengths = mask.sum(1, keepdim=True)
    return torch.where(mask, index, index - lengths)
