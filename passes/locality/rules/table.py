"""All locality rules: which ops treat tokens alone, what each needs for that, and what it gives.

A rule says where the tokens of an op's results are when those of its operands are known. Hidden states of shape
(batch, tokens, features) have the dims (B,) (T,) ·, where · is an ordinary dim. One line of the table reads as:

    rows("select", shapes.without_dim, SUMS, mixes=over("takes one entry of"))
          |        |                   |     |
          |        |                   |     it mixes the entries of the dim that its argument `dim` names, and is
          |        |                   |     refused where that has tokens: "select takes one entry of the token dim"
          |        |                   it also gets per-rank parts of sums, see `Takes`; without the flag it is refused
          |        |                   for them
          |        it gives its first tensor's dims without that one: (B,) (T,) · -> (B,) (T,)
          the names of ATen ops

`rows` is for ops that work on the rows of one tensor, `Rule` for ops whose operands must be looked at together: there a
comment says `# what they need -> what they give`. An op that is not here is refused by name, unless torch tags it as
pointwise. To add one, add a line; `python -m tests.rules NAME` tries it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from cp_rewrite.passes.locality.advice import kind_by_name
from cp_rewrite.passes.locality.node.call import op_name
from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import OpOverload

from . import experts, indexing, losses, reductions, shapes
from .elementwise import cast, log_sigmoid, pointwise
from .over_ranks import recurrences, scans, wholes, without_fill
from .over_ranks.counted import counted
from .picked import entries as picked
from .picked import first, looked_up, segments
from .reductions import convolution_dims, normalized_dims, pooled_dims
from .rule import Rule, Takes, last_dim, over, refused, rows, same_dims, unchanged

_NORM = "{op} of something else than token rows"
_PICKS = "picks entries by their values, as many as there happen to be: multiply by a mask instead"
SUMS, SIZES, UNCUT, POSITIONS, GROUPS = Takes.SUMS, Takes.SIZES, Takes.UNCUT, Takes.POSITIONS, Takes.GROUPS

# Entries move, and an axis of the batch moves with its dim.
VIEWS = (
    rows("clone detach alias lift_fresh lift contiguous _conj", unchanged, SUMS),
    rows("view _unsafe_view reshape _reshape_copy flatten unflatten", shapes.regrouped, SUMS | SIZES),
    rows("permute transpose t", shapes.permuted, SUMS),
    rows("unsqueeze", shapes.unsqueezed, SUMS),
    rows("squeeze", shapes.squeezed, SUMS),
    rows("view_as_real view_as_complex", shapes.as_complex, SUMS),
    # an entry of the token dim -> whole
    rows("select", shapes.without_dim, SUMS, mixes=over("takes one entry of"), whole=picked.select),
    rows("unbind", shapes.without_dim, SUMS | SIZES, mixes=over("splits")),
    rows("split split_with_sizes chunk unsafe_split", unchanged, SUMS | SIZES, mixes=over("splits")),
    rows("repeat", shapes.repeated, SUMS | SIZES),
    # padded dims are ordinary -> the same dims
    Rule("constant_pad_nd reflection_pad1d replication_pad1d", shapes.pad, SUMS | SIZES),
    # the same shape and strides -> the same dims
    Rule("as_strided", shapes.as_strided, SUMS | SIZES),
    # all tensors have their tokens in one dim, and are joined along another -> the same dims
    Rule("cat stack", shapes.cat, SUMS),
    # the token dim had one entry or none: · · -> (T,) ·, rows that are all equal
    Rule("expand", shapes.expand, SUMS | SIZES | UNCUT),
    # a slice of an ordinary dim -> the same dims; the first T rows of a table -> (T,) ·; of some tokens -> whole
    Rule("slice", shapes.slice_, SUMS | SIZES | UNCUT, picked.slice_),
)

# A tensor is made of one number, or counts 0, 1, 2, … -> its dim of T entries is the token dim.
FILLED = (
    Rule("zeros ones full empty empty_strided scalar_tensor", shapes.filled, SUMS | SIZES | UNCUT | POSITIONS),
    Rule("new_zeros new_ones new_full new_empty new_empty_strided", shapes.filled, SUMS | SIZES | UNCUT | POSITIONS),
    Rule("zeros_like ones_like full_like empty_like fill zero", shapes.filled_like, SUMS | SIZES | POSITIONS),
    Rule("arange", shapes.arange, SIZES | UNCUT),
)

# Each entry is made of those at its place: all operands have their tokens in one dim, and so has the result. Every op
# that torch tags as pointwise has this rule.
POINTWISE = Rule("masked_fill copy where _prelu_kernel complex polar floor_divide hardswish", pointwise, SUMS | UNCUT)
LOG_SIGMOID = Rule("log_sigmoid_forward", log_sigmoid)
# With a number made from the token count: that of the whole row in its place.
COUNTED = Rule(
    "mul div add sub rsub eq ne lt le gt ge remainder clamp clamp_min clamp_max", pointwise, SUMS | UNCUT, counted
)
CAST = Rule("_to_copy", cast, SUMS | UNCUT | GROUPS)

# Entries of some dims are mixed: these dims must be ordinary -> the same dims.
MIXED_DIMS = (
    rows("_softmax _log_softmax _safe_softmax softmax log_softmax glu", same_dims, mixes=over("runs over")),
    # over tokens -> the same dims: each rank runs over its own, and what it reached at ends of pieces is exchanged
    rows("cumprod cummax cummin logcumsumexp", same_dims, mixes=over("runs over"), whole=scans.scanned),
    rows("argsort topk flip", same_dims, mixes=over("runs over")),
    rows("_fft_r2c _fft_c2r _fft_c2c", same_dims, mixes=over("runs over")),
    rows("roll", same_dims, mixes=over("rolls")),
    rows("tril triu", reductions.triangle),
    rows("linear", same_dims, mixes=last_dim("sums over"), others="{op} with a weight made from tokens"),
    rows("native_layer_norm _fused_rms_norm rms_norm", same_dims, mixes=normalized_dims, others=_NORM),
    rows("convolution", same_dims, mixes=convolution_dims, others="{op} with a kernel made from tokens"),
    rows("avg_pool2d max_pool2d_with_indices adaptive_max_pool2d", same_dims, mixes=pooled_dims),
    rows("_adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool3d", same_dims, mixes=pooled_dims),
    # tokens in dim 0 -> the same dims
    Rule("native_group_norm instance_norm", reductions.leading_norm, SIZES),
    # running statistics, and no tokens in dim 1, the channels -> the same dims
    Rule("native_batch_norm _native_batch_norm_legit _batch_norm_with_update", reductions.batch_norm),
    Rule("_native_batch_norm_legit_no_training _batch_norm_no_update", reductions.batch_norm),
)

# Dims are reduced. Over features -> the other dims. A plain sum over all tokens -> a per-rank part of the whole sum.
SUMMED = (
    Rule("sum nansum count_nonzero", reductions.reduce, SUMS, without_fill.summed),
    Rule("mean amax amin logsumexp max min", reductions.reduce, SUMS, whole=wholes.reduced),
    Rule("var std var_mean std_mean norm linalg_vector_norm", reductions.reduce, SUMS, whole=wholes.reduced),
    # over tokens: the place in the whole row
    Rule("argmax argmin", reductions.reduce, whole=first.largest_place),
    Rule("any all", reductions.reduce, SUMS, whole=wholes.reduced),
    Rule("prod aminmax median mode kthvalue", reductions.reduce, SUMS),
    # (T,) · times · · -> (T,) ·; · (T,) times (T,) · -> a per-rank part
    Rule("mm addmm bmm baddbmm mv addmv dot addbmm", reductions.product),
    # tokens in one dim; reduction="none" -> a loss per token, "sum" -> a per-rank part
    Rule("nll_loss_forward nll_loss2d_forward", losses.nll_loss, whole=wholes.nll_loss),
    Rule("mse_loss smooth_l1_loss huber_loss soft_margin_loss", losses.elementwise_loss, SUMS, without_fill.loss),
    Rule(
        "binary_cross_entropy binary_cross_entropy_with_logits",
        losses.elementwise_loss,
        SUMS,
        without_fill.loss,
    ),
    # per-rank parts, of a sum and of a count -> the global mean, whose gradient is a per-rank part
    Rule("cp_rewrite::token_mean", losses.token_mean, SUMS),
)

# Values are indices: they may be made from tokens, but pick no tokens.
INDEXED = (
    # a table that is the same on all ranks, or its first T rows -> the indices' dims and one more
    Rule("embedding", indexing.embedding, whole=looked_up.embedding),
    # a list that is the same on all ranks -> the dims of what is looked up in it
    Rule("isin bucketize searchsorted", indexing.looked_up),
    # tensor and indices have the same tokens, in another dim than the indexed one -> the same dims
    Rule("scatter", indexing.gather),
    # the same; or token rows at places that all ranks know -> whole
    Rule("gather", indexing.gather, whole=picked.gather),
    # the same; or token rows are added up in a tensor without tokens -> a per-rank part
    Rule("scatter_add scatter_reduce", indexing.gather, whole=segments.added),
    # sorted rows are added to their tokens; or token rows are added up in a tensor without tokens -> a per-rank part
    Rule("index_add", indexing.index_add, whole=segments.added),
    # an indexed dim without tokens, or of the first T rows of a table -> in its place the indices' dim
    Rule("index_select", indexing.index_select, whole=looked_up.index_select),
    # indexed dims without tokens, or all rows of a shard in turn, or the first T rows of a table -> in their place the
    # indices' dims
    Rule("index _unsafe_index", indexing.index, POSITIONS, looked_up.index),
    # x[mask] = number, where x and mask have the same tokens -> the same dims
    Rule("index_put _unsafe_index_put _index_put_impl", indexing.index_put, POSITIONS),
)

# Rows are sorted by a key, worked on in groups, and put back in place by index_put: see `experts`.
SORTED = (
    Rule("sort", experts.sort),
    # of sorted keys -> sizes of their groups; of others -> per-rank counts
    Rule("histc", experts.group_sizes, whole=wholes.histc),
    Rule("cumsum", experts.cumsum, GROUPS, scans.scanned),
    Rule("_grouped_mm transformers::grouped_mm_fallback", experts.grouped_product, GROUPS),
)

# A state passes through all tokens of a sequence. Each rank runs over its own; what they do to the state goes to ranks
# that have later tokens. Tokens in dim 1 -> the same dims
RECURRENT = Rule(" ".join(recurrences.OPS), recurrences.alone, whole=recurrences.recurrent)

# Never the same on a shard.
MIXING = (
    refused("nonzero nonzero_static masked_select _unique2 unique_dim unique_consecutive", _PICKS),
    refused(
        "_local_scalar_dense is_nonzero equal item", "reads a number off a tensor, which is another one on a shard"
    ),
    # with minlength -> per-rank counts
    replace(refused("bincount", "counts over all tokens"), whole=wholes.bincount),
    refused("index_copy index_fill masked_scatter put", "writes token rows by place"),
    refused("diff unfold diagonal trace tril_indices", "relates tokens to other tokens"),
)

RULES = (
    *VIEWS,
    *FILLED,
    POINTWISE,
    LOG_SIGMOID,
    COUNTED,
    CAST,
    *MIXED_DIMS,
    *SUMMED,
    *INDEXED,
    *SORTED,
    RECURRENT,
    *MIXING,
)
_BY_NAME = {name: rule for rule in RULES for name in rule.ops.split()}


@lru_cache(maxsize=4096)
def find_rule(func: OpOverload) -> Rule | None:
    """The rule of an op; None where it has none."""
    name = op_name(func)
    # Of some ops that write into their first operand torch tags the other form only.
    plain = getattr(getattr(torch.ops.aten, name, None), func._overloadname, func)
    if name in _BY_NAME or torch.Tag.pointwise in (*func.tags, *plain.tags):
        return _BY_NAME.get(name, POINTWISE)
    kind = kind_by_name(name)
    if kind == "attention":
        return refused(name, "is attention, by its name", Reason.UNREAD_ATTENTION)
    return refused(name, f"is {kind} over tokens, by its name: it can't be sharded here") if kind else None
