"""Which ATen ops treat tokens alone: torch's own tags where they say it, this table elsewhere.

An op that is in neither is refused by name. To add one, add a line here and a case to tests/test_locality.py.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch._ops import OpOverload

from . import arithmetic as ops
from . import experts as ordered
from . import index, loss, views
from .call import GROUPED_PRODUCTS, FoundRule, Rule, op_name

FROM_SIZES: dict[str, Rule] = {
    **dict.fromkeys(("zeros", "ones", "full", "empty", "empty_strided", "scalar_tensor"), views.filled),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"), views.filled),
    "arange": views.arange,
    "expand": views.expand,
    "slice": views.slice_,
}
"""Ops that make token rows from sizes alone, so that their rule runs on any input."""

_VIEWS: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_copy", "flatten", "unflatten"), views.view),
    **dict.fromkeys(("permute", "transpose", "t"), views.permute),
    **dict.fromkeys(("clone", "detach", "alias", "lift_fresh", "lift", "contiguous"), views.same),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "unsafe_split"), views.split),
    **dict.fromkeys(("cat", "stack"), views.cat),
    **dict.fromkeys(("constant_pad_nd", "reflection_pad1d", "replication_pad1d"), views.pad),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like", "fill", "zero"), views.filled_like),
    **dict.fromkeys(("view_as_real", "view_as_complex"), views.complex_view),
    "unsqueeze": views.unsqueeze,
    "squeeze": views.squeeze,
    "select": views.select,
    "repeat": views.repeat,
    "as_strided": views.as_strided,
}

_ARITHMETIC: dict[str, Rule] = {
    **dict.fromkeys(
        ("_to_copy", "masked_fill", "copy", "where", "_prelu_kernel", "complex", "polar", "floor_divide"), ops.pointwise
    ),
    **dict.fromkeys(("sum", "nansum", "count_nonzero", "mean", "amax", "amin", "prod", "logsumexp"), ops.reduce),
    **dict.fromkeys(("max", "min", "argmax", "argmin", "any", "all", "aminmax", "median", "mode"), ops.reduce),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "kthvalue"), ops.reduce),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"), ops.along_dim),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "glu"), ops.along_dim),
    **dict.fromkeys(("sort", "argsort", "topk", "flip", "roll", "_fft_r2c", "_fft_c2r", "_fft_c2c"), ops.along_dim),
    **dict.fromkeys(("tril", "triu"), ops.triangle),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "addbmm"), ops.product),
    "linear": ops.linear,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), ops.trailing_norm),
    **dict.fromkeys(("native_group_norm", "instance_norm"), ops.leading_norm),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), ops.batch_norm),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "_batch_norm_no_update"), ops.batch_norm),
    "convolution": ops.convolution,
    **dict.fromkeys(("avg_pool2d", "max_pool2d_with_indices", "adaptive_max_pool2d"), ops.pool),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "avg_pool3d"), ops.pool),
}

_INDEXING: dict[str, Rule] = {
    "embedding": index.embedding,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), index.gather),
    "index_select": index.index_select,
    **dict.fromkeys(("index", "_unsafe_index"), index.index),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), index.index_put),
}

_SORTED: dict[str, Rule] = {
    "histc": ordered.group_sizes,
    **dict.fromkeys(GROUPED_PRODUCTS, ordered.grouped_product),
}

_LOSSES: dict[str, Rule] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), loss.nll_loss),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"), loss.elementwise_loss),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), loss.elementwise_loss),
    "cp_rewrite::token_mean": loss.token_mean,
}

_SELECTS = ops.refuse("picks entries by their values, as many as there happen to be: multiply by a mask instead")
_COUNTS = ops.refuse("counts or compares over all tokens")

_MIXING: dict[str, Rule] = {
    **dict.fromkeys(("nonzero", "nonzero_static", "masked_select", "_unique2", "unique_dim"), _SELECTS),
    **dict.fromkeys(("unique_consecutive", "_local_scalar_dense", "is_nonzero", "equal", "item"), _SELECTS),
    **dict.fromkeys(("bincount", "searchsorted"), _COUNTS),
    **dict.fromkeys(
        ("index_add", "index_copy", "index_fill", "masked_scatter", "put"), ops.refuse("writes token rows by place")
    ),
    **dict.fromkeys(
        ("diff", "unfold", "diagonal", "trace", "tril_indices"), ops.refuse("relates tokens to other tokens")
    ),
}

TABLE: dict[str, Rule] = {**FROM_SIZES, **_VIEWS, **_ARITHMETIC, **_INDEXING, **_SORTED, **_LOSSES, **_MIXING}


_VIEWS_OF_SUMS = (views.view, views.permute, views.unsqueeze, views.squeeze, views.select, views.split, views.repeat)
_SUMS: frozenset[Rule] = frozenset(
    {*_VIEWS_OF_SUMS, views.same, views.expand, views.slice_, views.cat, views.pad, views.as_strided, views.filled}
    | {views.filled_like, views.complex_view, ops.pointwise, ops.reduce, loss.elementwise_loss, loss.token_mean}
)
_SIZES: frozenset[Rule] = frozenset(
    {views.view, views.expand, views.slice_, views.split, views.repeat, views.as_strided, views.filled, views.arange}
    | {views.filled_like, views.pad, ops.leading_norm}
)
_POSITIONS: frozenset[Rule] = frozenset({views.filled, views.filled_like, index.index, index.index_put})


@lru_cache(maxsize=4096)
def find_rule(func: OpOverload) -> FoundRule:
    """The rule of an op, and what it takes."""
    name = op_name(func)
    rule = TABLE.get(name, ops.pointwise if torch.Tag.pointwise in func.tags else None)
    if rule is None:
        return FoundRule(None)
    from_sizes = name in FROM_SIZES or rule is ops.pointwise
    return FoundRule(rule, from_sizes, rule in _SUMS, rule in _SIZES, rule in _POSITIONS)
