"""The active plan: the batch in flight, and the tensors that a rewritten graph reads as its extra inputs."""

from .current import activate, active_plan, check_no_batch, check_not_traced, in_batch, is_captured, last_plan
from .marks import (
    TokenAxes,
    batch_number,
    is_part,
    known_part,
    mark_part,
    mark_token_axes,
    mark_token_dim,
    number_tokens,
    token_axes_of,
    token_dim_of,
    version_of,
)
from .packing_values import PackingValues, packing_names
from .plan import ActivePlan, to_device
from .plan_input import HAS_TOKEN, IN_DOCUMENT, ROW_INDEX, ROW_TOKENS, TOKEN_INDEX, TOKEN_ROWS, PlanInput
from .take_tokens import beside, take_tokens

__all__ = [
    "HAS_TOKEN",
    "IN_DOCUMENT",
    "ROW_INDEX",
    "ROW_TOKENS",
    "TOKEN_INDEX",
    "TOKEN_ROWS",
    "ActivePlan",
    "PackingValues",
    "PlanInput",
    "TokenAxes",
    "activate",
    "active_plan",
    "batch_number",
    "beside",
    "check_no_batch",
    "check_not_traced",
    "in_batch",
    "is_captured",
    "is_part",
    "known_part",
    "last_plan",
    "mark_part",
    "mark_token_axes",
    "mark_token_dim",
    "number_tokens",
    "packing_names",
    "take_tokens",
    "to_device",
    "token_axes_of",
    "token_dim_of",
    "version_of",
]
