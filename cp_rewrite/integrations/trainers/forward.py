"""A model's forward that takes whole rows and returns what one process would, computed by a whole group. What a trainer
calls it with becomes a batch as `Sharding.shard` takes it: one argument tells documents apart, no mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

import cp_rewrite as cp
from cp_rewrite.backend import Backend
from cp_rewrite.batch.active.marks import batch_number, is_part
from cp_rewrite.batch.unshard import map_tensors
from cp_rewrite.integrations.fsdp.sharded_forward import compile_segments
from cp_rewrite.integrations.fsdp.twin import Twin
from cp_rewrite.integrations.outputs import scaled

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


@dataclass
class Switch:
    """What the forwards of one trainer do at the moment. Outside of its steps its models are what they were."""

    on: bool = False
    loss_only: bool = False

    @contextmanager
    def set(self, **values: bool) -> Generator[None]:
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


class GlobalForward:
    """Replaces `model.forward` while `switch.on`: global batch by keyword in, global outputs out, on every rank.

    The loss is that of the whole batch and per-token outputs stand in global order: what a trainer computes from them
    (other losses, metrics) is right as it is. A rank's gradients come from its own tokens, times the size of the group:
    averaged over all ranks, as DDP and FSDP do, they are those of one process.

    `twin`: what is traced in the model's place, where FSDP will shard its weights; `blocks`: the modules whose weights
    it gathers together, once it has.
    """

    def __init__(self, model: nn.Module, sharding: cp.Sharding, switch: Switch, twin: Twin | None = None) -> None:
        self.model, self.sharding, self.switch, self.twin = model, sharding, switch, twin
        self.blocks: tuple[nn.Module, ...] = ()
        self.plain: Callable[..., Any] = model.forward
        self.shifts = shifts_labels(model)
        self._variants: dict[tuple[bool, bool], tuple[cp.Sharding, Callable[..., Any]]] = {}

    def install(self) -> None:
        """Put this into the model's place for `forward`, under the same signature."""

        @functools.wraps(self.plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Positional arguments have no names to find tokens by: no trainer passes any.
            return self(kwargs) if self.switch.on and not args else self.plain(*args, **kwargs)

        forward._cp_rewrite_forward = self  # type: ignore[attr-defined]
        self.model.forward = forward

    def adopt(self, sharding: cp.Sharding, switch: Switch) -> None:
        """Serve another trainer of the same model."""
        if sharding != self.sharding:
            self._variants.clear()
        self.sharding, self.switch = sharding, switch

    def __call__(self, values: Mapping[str, Any]) -> Any:
        batch = global_batch(values, self.sharding, causal=self.shifts)
        labelled = "labels" in batch
        sharding, run = self._variant(labelled)
        if labelled and not self.shifts and "num_items_in_batch" not in batch:
            batch["num_items_in_batch"] = (batch["labels"] != -100).sum()
        with sharding.shard(batch, shift_labels=labelled and self.shifts) as local:
            outputs = run(**local)
            return self.joined(outputs, sharding, local.plan.local_size)

    def compiled(self, sharding: cp.Sharding, loss_only: bool) -> Callable[..., Any]:
        """What runs on this rank's tokens: the whole model, in which everything but attention is proven local.
        `loss_only`: nobody reads what it returns beside its loss."""
        return self.compile(self.plain if self.twin is None else self.twin.module.forward, sharding, loss_only)

    def compile(self, call: Callable[..., Any], sharding: cp.Sharding, loss_only: bool) -> Callable[..., Any]:
        if self.twin is not None:
            return compile_segments(call, self.twin, self.blocks, sharding, loss_alone=loss_only)
        return torch.compile(call, backend=Backend(sharding, loss_only), fullgraph=True)

    def joined(self, outputs: Any, sharding: cp.Sharding, size: int) -> Any:
        """Outputs of `size` local tokens, made global. What is neither the loss nor one value per token is left out."""
        if not isinstance(outputs, Mapping):
            raise TypeError(f"the model returned {type(outputs).__name__}: a ModelOutput or a dict is needed")
        fields: dict[str, Any] = {}
        for name, value in cast(Mapping[str, Any], outputs).items():
            if name == "loss":
                # Each rank's loss is its part: their sum, counted as one; or, of a mean, the whole.
                part = is_part(value) or batch_number(value) is None
                fields[name] = cp.token_mean(value, float(sharding.rank == 0), sharding) if part else value
            elif not (self.switch.loss_only and "loss" in outputs and _is_wide(value, sharding)):
                fields[name] = _in_order(value, sharding, size)
        fields = {name: value for name, value in fields.items() if value is not None}
        return type(outputs)(**map_tensors(lambda value: scaled(value, sharding.world_size), fields))

    def _variant(self, labelled: bool) -> tuple[cp.Sharding, Callable[..., Any]]:
        """The annotation of calls with or without labels, and what is compiled for it."""
        loss_only = labelled and self.switch.loss_only
        if (labelled, loss_only) not in self._variants:
            tokens = {name: dim for name, dim in self.sharding.tokens.items() if labelled or name != "labels"}
            sharding = replace(self.sharding, tokens=tokens)
            self._variants[labelled, loss_only] = sharding, self.compiled(sharding, loss_only)
        return self._variants[labelled, loss_only]


def forward_of(model: nn.Module) -> GlobalForward | None:
    """The GlobalForward that a model has, if any."""
    return getattr(model.forward, "_cp_rewrite_forward", None)


def shifts_labels(model: nn.Module) -> bool:
    """Does the model's loss compare a token's scores with the label of the next one, as `transformers` tells?"""
    return LOSS_MAPPING.get(cast(str, getattr(model, "loss_type", None))) is ForCausalLMLoss


def _is_wide(value: Any, sharding: cp.Sharding) -> bool:
    """More than one value per token, as of logits and hidden states: much to put together for nobody."""
    dim = next(iter(sharding.tokens.values()))
    return any(isinstance(leaf, Tensor) and leaf.ndim > dim + 1 for leaf in tree_leaves(value))


def _in_order(value: Any, sharding: cp.Sharding, size: int) -> Any:
    """Per-token tensors, alone or in tuples, in global order; None for anything else."""
    dim = next(iter(sharding.tokens.values()))
    if isinstance(value, Tensor):
        return sharding.unshard(value, dim) if value.ndim > dim and value.shape[dim] == size else None
    if isinstance(value, tuple):
        parts = tuple(_in_order(part, sharding, size) for part in cast(tuple[Any, ...], value))
        return None if any(part is None for part in parts) else parts
    return None
