"""Custom ops of rewritten graphs: schemas, fakes and autograd in torch only; kernels are imported when they run."""

from . import attention, exchange, max_logits, ring_attention, scatter_heads
from .pushed import attention as pushed_attention
from .sums import over_ranks, token_rows

__all__ = [
    "attention",
    "exchange",
    "max_logits",
    "over_ranks",
    "pushed_attention",
    "ring_attention",
    "scatter_heads",
    "token_rows",
]
