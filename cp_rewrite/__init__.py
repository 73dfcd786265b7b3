"""A torch.compile pass that makes a single-device model context-parallel over packed documents."""

from .documents import Documents
from .masks import PackedMask
from .refusal import Reason, Refusal, RewriteRefused
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
]
