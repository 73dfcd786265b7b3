"""The masks among a batch's arguments: compared with its documents, and replaced by what stands in for them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cp_rewrite.masks import PackedMask
from cp_rewrite.packing import packing_args
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding, device_of

from . import blocks, compare
from .argument import MaskArgument, block_stand_in, stand_in

_compared: set[Hashable] = set()
"""The block masks of which many pairs were compared, by annotation and argument."""


@dataclass
class _Masks:
    """Replaces the masks of one batch. `tensors`: what was put in their place so far."""

    sharding: Sharding
    plan: BatchPlan
    tensors: list[Tensor] = field(default_factory=list[Tensor])

    def replace(self, name: str, value: Any) -> Any:
        """What a rank's model gets in the place of a value: the value itself, where it is no mask.

        Raises:
            MaskMismatch: a mask says another thing than the packing. ValueError: it can't be read.
        """
        if isinstance(value, Mapping):
            parts = cast(Mapping[str, Any], value)
            made = {key: self.replace(str(key), part) for key, part in parts.items()}
            return made if any(made[key] is not part for key, part in parts.items()) else value
        if name in self.sharding.masks and self.sharding.masks[name] is None:
            return value
        if isinstance(value, BlockMask):
            return self._replace_blocks(name, value)
        return self._replace_tensor(name, value) if isinstance(value, Tensor) else value

    def _meaning(self, name: str) -> PackedMask:
        mask = self.sharding.masks.get(name) or self.sharding.assume_mask or PackedMask()
        if not mask.is_plain:
            raise ValueError(
                f"batch[{name!r}] is a mask, of which assume_mask says '{mask}': chunks, spans and trees are read of "
                f"masks that the model makes; masks={{{name!r}: None}}, if it is no mask of attention"
            )
        return mask

    def _replace_tensor(self, name: str, value: Tensor) -> Tensor:
        total, rows = self.plan.rows[0].total, len(self.plan.rows)
        named = name in self.sharding.masks
        fits = value.ndim in (2, 3, 4) and value.shape[-2:] == (total, total) and total > 1
        if not fits or (value.ndim > 2 and value.shape[0] not in (1, rows)):
            if named:
                raise ValueError(
                    f"masks names {name!r}, of shape {tuple(value.shape)}: it must be (T, T), (B, T, T) or "
                    f"(B, H, T, T), with {rows} rows of {total} tokens"
                )
            return value
        given = compare.compact(value.detach())
        added = compare.is_added(given)
        if added is None:
            if named:
                raise ValueError(
                    f"masks names {name!r}, which holds other numbers than a mask does: True and False, 1 and 0, or 0 "
                    "and -inf, finfo(dtype).min or -1e9, which are added to logits"
                )
            return value
        seen = given == 0 if added else given.bool()
        seen = seen[None] if seen.ndim == 2 else seen
        argument = self._read(name, seen if seen.ndim == 4 else seen[:, None], added)
        shape = (*value.shape[:-2], self.plan.local_size, self.plan.local_size)
        made = stand_in(argument, shape, value.dtype, self._device(value))
        self.tensors.append(made)
        return made

    def _read(self, name: str, table: Tensor, added: bool) -> MaskArgument:
        """What a mask means whose `table`, (B or 1, H, T, T) bool, is true where it shows keys, or hides them."""
        mask, rows = self._meaning(name), self.plan.rows
        found = compare.first_difference(table, rows, mask)
        if found is None:
            return MaskArgument(name, mask, "adds" if added else "shows")
        if not added and compare.first_difference(~table, rows, mask) is None:
            return MaskArgument(name, mask, "hides")
        raise compare.mismatch(name, mask, *found)

    def _replace_blocks(self, name: str, value: BlockMask) -> BlockMask:
        total, rows = self.plan.rows[0].total, len(self.plan.rows)
        if tuple(value.seq_lengths) != (total, total) or value.kv_num_blocks.shape[0] not in (1, rows):
            raise ValueError(
                f"batch[{name!r}] is a BlockMask of shape {tuple(value.shape)}: it must be one of {rows} rows of "
                f"{total} tokens"
            )
        argument = MaskArgument(name, self._meaning(name))
        key = self.sharding.graph_key, name
        every = self.sharding.verify == "every_step"
        found = blocks.first_difference(
            value, self.plan.rows, argument.mask, "all" if every else "sampled" if key in _compared else "many"
        )
        if found is not None:
            raise compare.mismatch(name, argument.mask, *found)
        _compared.add(key)
        shape = (rows, self.plan.local_size, self.plan.local_size)
        made, tensors = block_stand_in(argument, shape, self._device(value.kv_num_blocks))
        self.tensors += tensors
        return made

    def _device(self, value: Tensor) -> torch.device:
        """Where the model gets it: what is on the CPU goes to the mesh's device."""
        return device_of(self.sharding) if value.device.type == "cpu" else value.device


def replace_masks(sharding: Sharding, plan: BatchPlan, batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """(the arguments of a batch that are masks of whole rows, or hold some -> what a rank's model gets instead, the
    tensors that this is made of).

    Every mask is compared with the documents of the batch: tensors in all pairs, BlockMasks as `blocks` says.

    Raises:
        MaskMismatch: a mask says another thing than the packing. ValueError: one that `masks` names can't be read.
    """
    cut = {*sharding.tokens, *packing_args(sharding.packing)}
    masks = _Masks(sharding, plan)
    made = {name: masks.replace(name, value) for name, value in batch.items() if name not in cut}
    return {name: value for name, value in made.items() if value is not batch[name]}, masks.tensors
