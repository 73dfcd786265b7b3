"""Every name that `import cp_rewrite as cp` gives, loaded with the first one that is asked for."""

from cp_rewrite.batch.as_row import to_local
from cp_rewrite.batch.gradients import sum_gradients, token_mean
from cp_rewrite.batch.trace import Trace, trace
from cp_rewrite.diagnose.check import CheckReport, check
from cp_rewrite.diagnose.check_op import OpReport, check_op
from cp_rewrite.diagnose.explain import explain
from cp_rewrite.experts.layers import Experts
from cp_rewrite.integrations.parallelize import clip_grad_norm_, parallelize
from cp_rewrite.ops.max_logits import max_logits
from cp_rewrite.planning.cost.states import StateLayers
from cp_rewrite.planning.plan import Plan, plan

from .capacity import Capacity
from .documents import Documents
from .entry import backend, context_parallel
from .masks import MaskMismatch, PackedMask
from .packing import (
    CuSeqlens,
    DocumentIds,
    EndOfDocument,
    PaddingMask,
    PositionIds,
    Spans,
    StartOfDocument,
    Tree,
    WholeRows,
)
from .refusal import Reason, Refusal, RewriteRefused
from .sharding import Sharding

__all__ = [
    "Capacity",
    "CheckReport",
    "CuSeqlens",
    "DocumentIds",
    "Documents",
    "EndOfDocument",
    "Experts",
    "MaskMismatch",
    "OpReport",
    "PackedMask",
    "PaddingMask",
    "Plan",
    "PositionIds",
    "Reason",
    "Refusal",
    "RewriteRefused",
    "Sharding",
    "Spans",
    "StartOfDocument",
    "StateLayers",
    "Trace",
    "Tree",
    "WholeRows",
    "backend",
    "check",
    "check_op",
    "clip_grad_norm_",
    "context_parallel",
    "explain",
    "max_logits",
    "parallelize",
    "plan",
    "sum_gradients",
    "to_local",
    "token_mean",
    "trace",
]
