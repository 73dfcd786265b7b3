"""A torch.compile pass that makes a single-device model context-parallel over packed documents."""

from .backend import backend, context_parallel
from .capacity import Capacity
from .check import CheckReport, check
from .documents import Documents
from .gradients import sum_gradients
from .loss import token_mean
from .masks import PackedMask
from .plan import Plan, plan
from .refusal import Reason, Refusal, RewriteRefused
from .report import explain
from .sharding import CuSeqlens, DocumentIds, PositionIds, Sharding
from .verify import MaskMismatch

__all__ = [
    "Capacity",
    "CheckReport",
    "CuSeqlens",
    "DocumentIds",
    "Documents",
    "MaskMismatch",
    "PackedMask",
    "Plan",
    "PositionIds",
    "Reason",
    "Refusal",
    "RewriteRefused",
    "Sharding",
    "backend",
    "check",
    "context_parallel",
    "explain",
    "plan",
    "sum_gradients",
    "token_mean",
]
