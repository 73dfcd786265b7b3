"""Every op that treats tokens alone, and what it must not do to tokens for that. An op that is not here is refused by
name, unless torch tags it as pointwise; to add one, add a line here and a case to tests/passes/test_locality.py.

A rule says where the tokens of an op's results are (`gives`), when those of its operands are known. Hidden states have
dims (B,) (T,) ·, where · is an ordinary dim. A line of the table reads as:

    rows("select", without_dim, SUMS, mixes=over("takes one entry of"))
          |        |            |     |
          |        |            |     it mixes entries of the dim that its argument `dim` names: refused where that is a
          |        |            |     token or batch dim, as "select takes one entry of the token dim (dim 1)"
          |        |            it also gets per-rank parts of sums over tokens, see `rule.Takes`; other ops are refused
          |        the result has the dims of its first tensor without that one: (B,) (T,) · -> (B,) (T,)
          the ATen op's names

`rows` is for ops that work on the rows of one tensor, `Rule` for those whose operands must be looked at together.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from cp_rewrite.passes.locality.call import op_name
from cp_rewrite.torch_internals import OpOverload

from . import experts, indexing, losses, reductions, shapes
from .elementwise import pointwise
from .rule import Rule, Takes, last_dim, over, refused, rows, same_dims, unchanged

SUMS, SIZES, UNCUT, POSITIONS, GROUPS = Takes.SUMS, Takes.SIZES, Takes.UNCUT, Takes.POSITIONS, Takes.GROUPS

# Entries move: an axis of the batch moves with its dim.
VIEWS = (
    rows("clone detach alias lift_fresh lift contiguous", unchanged, SUMS),
    rows("view _unsafe_view reshape _reshape_copy flatten unflatten", shapes.regrouped, SUMS | SIZES),
    rows("permute transpose t", shapes.permuted, SUMS),
    rows("unsqueeze", shapes.unsqueezed, SUMS),
    rows("squeeze", shapes.squeezed, SUMS),
    rows("view_as_real view_as_complex", shapes.as_complex, SUMS),
    rows("select", shapes.without_dim, SUMS, mixes=over("takes one entry of")),
    rows("unbind", shapes.without_dim, SUMS | SIZES, mixes=over("splits")),
    rows("split split_with_sizes chunk unsafe_split", unchanged, SUMS | SIZES, mixes=over("splits")),
    rows("repeat", shapes.repeated, SUMS | SIZES),
    Rule("constant_pad_nd reflection_pad1d replication_pad1d", shapes.pad, SUMS | SIZES),
    Rule("as_strided", shapes.as_strided, SUMS | SIZES),
    Rule("cat stack", shapes.cat, SUMS),
    Rule("expand", shapes.expand, SUMS | SIZES | UNCUT),
    Rule("slice", shapes.slice_, SUMS | SIZES | UNCUT),
)

# Sizes make tensors: a dim as long as the tokens is a token dim.
FILLED = (
    Rule("zeros ones full empty empty_strided scalar_tensor", shapes.filled, SUMS | SIZES | UNCUT | POSITIONS),
    Rule("new_zeros new_ones new_full new_empty new_empty_strided", shapes.filled, SUMS | SIZES | UNCUT | POSITIONS),
    Rule("zeros_like ones_like full_like empty_like fill zero", shapes.filled_like, SUMS | SIZES | POSITIONS),
    Rule("arange", shapes.arange, SIZES | UNCUT),
)

# Each entry from the entries at its place: tokens of all operands stand in one dim. So is every op with torch's tag.
POINTWISE = Rule("masked_fill copy where _prelu_kernel complex polar floor_divide", pointwise, SUMS | UNCUT)
CAST = Rule("_to_copy", pointwise, SUMS | UNCUT | GROUPS)

# Entries of some dims are mixed: those may not hold tokens.
MIXED_DIMS = (
    rows("_softmax _log_softmax _safe_softmax softmax log_softmax glu", same_dims, mixes=over("runs {op} over")),
    rows("cumprod cummax cummin logcumsumexp argsort topk flip", same_dims, mixes=over("runs {op} over")),
    rows("_fft_r2c _fft_c2r _fft_c2c", same_dims, mixes=over("runs {op} over")),
    rows("roll", same_dims, mixes=over("rolls")),
    rows("tril triu", reductions.triangle),
    rows("linear", same_dims, mixes=last_dim("sums over"), others="{op} with a weight made from tokens"),
    rows(
        "native_layer_norm _fused_rms_norm rms_norm",
        same_dims,
        mixes=reductions.normalized_dims,
        others="{op} of something else than token rows",
    ),
    rows("convolution", same_dims, mixes=reductions.convolution_dims, others="{op} with a kernel made from tokens"),
    rows("avg_pool2d max_pool2d_with_indices adaptive_max_pool2d", same_dims, mixes=reductions.pooled_dims),
    rows("_adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool3d", same_dims, mixes=reductions.pooled_dims),
    Rule("native_group_norm instance_norm", reductions.leading_norm, SIZES),
    Rule("native_batch_norm _native_batch_norm_legit _batch_norm_with_update", reductions.batch_norm),
    Rule("_native_batch_norm_legit_no_training _batch_norm_no_update", reductions.batch_norm),
)

# A sum over tokens is a per-rank part of the whole sum; another reduction over tokens is refused.
SUMMED = (
    Rule("sum nansum count_nonzero mean amax amin prod logsumexp", reductions.reduce, SUMS),
    Rule("max min argmax argmin any all aminmax median mode", reductions.reduce, SUMS),
    Rule("var std var_mean std_mean norm linalg_vector_norm kthvalue", reductions.reduce, SUMS),
    Rule("mm addmm bmm baddbmm mv addmv dot addbmm", reductions.product),
    Rule("nll_loss_forward nll_loss2d_forward", losses.nll_loss),
    Rule("mse_loss smooth_l1_loss huber_loss soft_margin_loss", losses.elementwise_loss, SUMS),
    Rule("binary_cross_entropy binary_cross_entropy_with_logits", losses.elementwise_loss, SUMS),
    Rule("cp_rewrite::token_mean", losses.token_mean, SUMS),
)

# Values are indices: they may come from tokens, but tokens may not be picked by them.
INDEXED = (
    Rule("embedding", indexing.embedding),
    Rule("gather scatter scatter_add scatter_reduce", indexing.gather),
    Rule("index_select", indexing.index_select),
    Rule("index _unsafe_index", indexing.index, POSITIONS),
    Rule("index_put _unsafe_index_put _index_put_impl", indexing.index_put, POSITIONS),
)

# Rows are sorted, worked on in groups and put back in place: a mixture of experts, see `experts`.
SORTED = (
    Rule("sort", experts.sort),
    Rule("histc", experts.group_sizes),
    Rule("cumsum", experts.cumsum, GROUPS),
    Rule("_grouped_mm transformers::grouped_mm_fallback", experts.grouped_product, GROUPS),
)

# Never the same on a shard.
_PICKS = "picks entries by their values, as many as there happen to be: multiply by a mask instead"
MIXING = (
    refused("nonzero nonzero_static masked_select _unique2 unique_dim unique_consecutive", _PICKS),
    refused("_local_scalar_dense is_nonzero equal item", _PICKS),
    refused("bincount searchsorted", "counts or compares over all tokens"),
    refused("index_add index_copy index_fill masked_scatter put", "writes token rows by place"),
    refused("diff unfold diagonal trace tril_indices", "relates tokens to other tokens"),
)

RULES = (*VIEWS, *FILLED, POINTWISE, CAST, *MIXED_DIMS, *SUMMED, *INDEXED, *SORTED, *MIXING)
_BY_NAME = {name: rule for rule in RULES for name in rule.ops.split()}


@lru_cache(maxsize=4096)
def find_rule(func: OpOverload) -> Rule | None:
    """The rule of an op; None where it has none."""
    return _BY_NAME.get(op_name(func), POINTWISE if torch.Tag.pointwise in func.tags else None)
