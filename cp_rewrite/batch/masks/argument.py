"""What stands in for a mask on a rank. No rank reads it: the plan says what it says.

batch["mask"]   (B, 1, T, T)        compared with the documents, on each batch
local["mask"]   (B, 1, T_l, T_l)    one value, expanded: NaN, or False, so that whoever reads it after all shows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cp_rewrite.masks import PackedMask
from cp_rewrite.torch_internals import LARGE_BLOCK

_LOWEST = (torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64))
DROPPED = (-torch.inf, *_LOWEST, -1e9, -1e10)
"""What an additive mask may hold where a key is not seen. It must be one of these, because a model may ask for it."""


Kind = Literal["shows", "hides", "adds"]


@dataclass(frozen=True)
class MaskArgument:
    """What a mask of a batch was found to say.

    Args:
        name: the argument's.
        mask: what it says of each batch, with that batch's documents.
        kind: `shows` holds 1, or True, where a key is seen, `hides` where it is not; `adds` holds 0 where a key is
            seen, and one of `DROPPED` where it is not.
        is_list: not the mask, but a list of blocks in which flex_attention looks at it.
    """

    name: str
    mask: PackedMask
    kind: Kind = "shows"
    is_list: bool = False


def stand_in(argument: MaskArgument, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(…, T_l, T_l): what a rank's model is called with in the place of a mask."""
    fill = float("nan") if dtype.is_floating_point else 0
    made = torch.full((1,), fill, dtype=dtype, device=device).expand(*shape)
    for dim in (len(shape) - 2, len(shape) - 1):
        torch._dynamo.maybe_mark_dynamic(made, dim)
    return _marked(made, argument)


def block_stand_in(
    argument: MaskArgument, shape: Sequence[int], device: torch.device
) -> tuple[BlockMask, list[Tensor]]:
    """The same of (B, T_l, T_l) as a BlockMask, of one block that is as large as any row; and its tensors."""
    table = stand_in(argument, shape, torch.bool, device)
    listed = replace(argument, is_list=True)
    count, place = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    lists = [_marked(x.to(device), listed) for x in (count, place)]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[b, q, k]

    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=LARGE_BLOCK, mask_mod=mask_mod), [table, *lists]


def mask_argument(value: object) -> MaskArgument | None:
    """The mask that a tensor stands in for; None: it is no stand-in."""
    return getattr(value, "_cp_rewrite_mask", None)


def _marked(value: Tensor, argument: MaskArgument) -> Tensor:
    value._cp_rewrite_mask = argument  # type: ignore[attr-defined]
    return value
