"""Custom ops of rewritten graphs: schemas, fakes and autograd in torch only; kernels are imported when they run."""

from . import attention, exchange, max_logits, ring_attention, scatter_heads, snapshot
from .narrow import exchange_tokens, gathered_attention
from .neighbours import convolve_rows, neighbour_rows
from .pushed import attention as pushed_attention
from .states import pieces, whole
from .sums import over_ranks, rows_of_ranks, token_rows
from .tiles import tiled

__all__ = [
    "attention",
    "convolve_rows",
    "exchange",
    "exchange_tokens",
    "gathered_attention",
    "max_logits",
    "neighbour_rows",
    "over_ranks",
    "pieces",
    "pushed_attention",
    "ring_attention",
    "rows_of_ranks",
    "scatter_heads",
    "snapshot",
    "tiled",
    "token_rows",
    "whole",
]
