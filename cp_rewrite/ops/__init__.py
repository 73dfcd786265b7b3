"""Custom ops of rewritten graphs: schemas, fakes and autograd in torch only; kernels are imported when they run."""

from . import (
    attention,
    exchange,
    local_rows,
    max_logits,
    neighbour_rows,
    over_ranks,
    ring_attention,
    scatter_heads,
    snapshot,
    tiles,
)
from .pushed import attention as pushed_attention
from .states import pieces, whole

__all__ = [
    "attention",
    "exchange",
    "local_rows",
    "max_logits",
    "neighbour_rows",
    "over_ranks",
    "pieces",
    "pushed_attention",
    "ring_attention",
    "scatter_heads",
    "snapshot",
    "tiles",
    "whole",
]
