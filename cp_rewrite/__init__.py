"""A torch.compile pass that makes a single-device model context-parallel over packed documents."""

from .backend import backend, context_parallel
from .documents import Documents
from .gradients import sum_gradients
from .masks import PackedMask
from .refusal import Reason, Refusal, RewriteRefused
from .report import explain
from .sharding import CuSeqlens, DocumentIds, PositionIds, Sharding

__all__ = [
    "CuSeqlens",
    "DocumentIds",
    "Documents",
    "PackedMask",
    "PositionIds",
    "Reason",
    "Refusal",
    "RewriteRefused",
    "Sharding",
    "backend",
    "context_parallel",
    "explain",
    "sum_gradients",
]
