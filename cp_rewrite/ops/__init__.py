"""Custom ops of rewritten graphs: schemas, fakes and autograd in torch only; kernels are imported when they run."""

from . import attention, exchange, heads, max_logits, ring, rows
from . import push_attention as pushed

__all__ = ["attention", "exchange", "heads", "max_logits", "pushed", "ring", "rows"]
