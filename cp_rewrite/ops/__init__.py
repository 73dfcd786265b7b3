"""Custom ops of rewritten graphs: schemas, fakes and autograd in torch only; kernels are imported when they run."""

from . import attention, exchange, local_rows, max_logits, ring_attention, rows, scatter_heads, tiles
from . import pushed as pushed_attention
from .states import ops

__all__ = [
    "attention",
    "exchange",
    "local_rows",
    "max_logits",
    "ops",
    "pushed_attention",
    "ring_attention",
    "rows",
    "scatter_heads",
    "tiles",
]
