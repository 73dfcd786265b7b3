"""All locality rules: which ops treat tokens alone, what each needs for that, and what it gives.

A rule is the ways that an op may go; the first that holds is taken. Hidden states of shape (batch, tokens, features)
have the dims (B,) (T,) ·, where · is an ordinary dim. One line of the table reads as:

    rule("select", rows(shapes.without_dim, SUMS, mixes=over("takes one entry of")), OverRanks(picked.select))
          |        |    |                   |     |                                  |
          |        |    |                   |     |                                  else the entry comes from the rank
          |        |    |                   |     |                                  that has it
          |        |    |                   |     it mixes the entries of the dim that its argument `dim` names: where
          |        |    |                   |     that has tokens the way does not hold, "takes one entry of the token
          |        |    |                   |     dim"
          |        |    |                   it also takes per-rank parts of sums, see `Takes`
          |        |    it gives its first tensor's dims without that one: (B,) (T,) · -> (B,) (T,)
          |        alone, on a rank's own tokens
          the names of ATen ops

`rows` is for ops that work on the rows of one tensor alone, `Alone` for ops whose operands must be looked at together:
there a comment says `# what they need -> what they give`. Where no way holds, operands are converted
(`passes/locality/ways.py`) and the ways are asked again; else the op is refused in the words of its first way. An op
that is not here is refused by name, unless torch tags it as pointwise. To add one, add a line; `python -m tests.rules
NAME` tries it.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from cp_rewrite.passes.locality.call import aten_name, kind_by_name
from cp_rewrite.passes.locality.rules import moves
from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import OpOverload

from . import experts, indexing, ordered, picked, reductions, scans, shapes, sorted_rows, states, wholes
from .elementwise import cast, log_sigmoid, pointwise
from .reductions import convolution_dims, normalized_dims, pooled_dims
from .rule import Alone, MovesRows, OverRanks, Rule, Takes, last_dim, over, refused, rows, rule, same_dims, unchanged
from .wholes import counted

_NORM, _KERNEL = "{op} of something else than token rows", "{op} with a kernel made from tokens"
_PICKS = "picks entries by their values, as many as there happen to be: multiply by a mask instead"
SUMS, SIZES, UNCUT, POSITIONS, GROUPS = Takes.SUMS, Takes.SIZES, Takes.UNCUT, Takes.POSITIONS, Takes.GROUPS

# Entries move, and an axis of the batch moves with its dim.
VIEWS = (
    rule("clone alias", rows(unchanged, SUMS), MovesRows(moves.unchanged)),
    rule("detach", rows(unchanged, SUMS), MovesRows(moves.detached)),
    rule("lift_fresh lift contiguous _conj", rows(unchanged, SUMS)),
    rule("view _unsafe_view reshape _reshape_copy flatten unflatten", rows(shapes.regrouped, SUMS | SIZES)),
    rule("permute transpose t", rows(shapes.permuted, SUMS)),
    rule("unsqueeze", rows(shapes.unsqueezed, SUMS)),
    rule("squeeze", rows(shapes.squeezed, SUMS)),
    rule("view_as_real view_as_complex", rows(shapes.as_complex, SUMS)),
    # an entry of the token dim -> whole
    rule("select", rows(shapes.without_dim, SUMS, mixes=over("takes one entry of")), OverRanks(picked.select)),
    rule("unbind", rows(shapes.without_dim, SUMS | SIZES, mixes=over("splits"))),
    rule("split split_with_sizes chunk unsafe_split", rows(unchanged, SUMS | SIZES, mixes=over("splits"))),
    rule("repeat", rows(shapes.repeated, SUMS | SIZES)),
    # padded dims are ordinary -> the same dims
    rule("constant_pad_nd", Alone(shapes.pad, SUMS | SIZES), MovesRows(moves.padded)),
    rule("reflection_pad1d replication_pad1d", Alone(shapes.pad, SUMS | SIZES)),
    # the same shape and strides -> the same dims
    rule("as_strided", Alone(shapes.as_strided, SUMS | SIZES)),
    # all tensors have their tokens in one dim, and are joined along another -> the same dims
    rule("cat", Alone(shapes.cat, SUMS), MovesRows(moves.joined)),
    rule("stack", Alone(shapes.cat, SUMS)),
    # the token dim had one entry or none: · · -> (T,) ·, rows that are all equal
    rule("expand", Alone(shapes.expand, SUMS | SIZES | UNCUT)),
    # a slice of an ordinary dim -> the same dims; the first T rows of a table -> (T,) ·; of some tokens -> whole
    rule("slice", Alone(shapes.slice_, SUMS | SIZES | UNCUT), MovesRows(moves.sliced), OverRanks(picked.slice_)),
)

# A tensor is made of one number, or counts 0, 1, 2, … -> its dim of T entries is the token dim.
_FILLED = SUMS | SIZES | UNCUT | POSITIONS
FILLED = (
    rule(
        "zeros ones full empty empty_strided scalar_tensor new_zeros new_ones new_full new_empty new_empty_strided "
        "empty_like fill zero",
        Alone(shapes.filled, _FILLED),
        OverRanks(counted),
    ),
    rule("zeros_like ones_like full_like", Alone(shapes.filled, _FILLED), MovesRows(moves.filled), OverRanks(counted)),
    rule("arange", Alone(shapes.arange, SIZES | UNCUT)),
)

# Each entry is made of those at its place: all operands have their tokens in one dim, and so has the result. Every op
# that torch tags as pointwise has this rule.
# With a number made from the token count: that of the whole row in its place.
POINTWISE = rule(
    "masked_fill copy where _prelu_kernel complex polar floor_divide hardswish",
    Alone(pointwise, SUMS | UNCUT),
    OverRanks(counted),
)
MUL = rule("mul", Alone(pointwise, SUMS | UNCUT), MovesRows(moves.filled), OverRanks(counted))
LOG_SIGMOID = rule("log_sigmoid_forward", Alone(log_sigmoid))
CAST = rule("_to_copy", Alone(cast, SUMS | UNCUT | GROUPS), MovesRows(moves.unchanged))

# Entries of some dims are mixed: these dims must be ordinary -> the same dims.
MIXED_DIMS = (
    rule("glu", rows(same_dims, mixes=over("runs over"))),
    # over tokens -> the same dims
    rule(
        "_softmax _log_softmax _safe_softmax softmax log_softmax",
        rows(same_dims, mixes=over("runs over")),
        OverRanks(wholes.softmax),
    ),
    # over tokens -> the same dims: each rank runs over its own, and what it reached at ends of pieces is exchanged
    rule("cumprod cummax cummin logcumsumexp", rows(same_dims, mixes=over("runs over")), OverRanks(scans.scanned)),
    # over tokens: each rank gets the tokens of all, and has of their order its own places -> the same dims
    rule("argsort", rows(same_dims, mixes=over("runs over")), OverRanks(ordered.sort)),
    # over tokens: the largest of all ranks', and their places in the whole row -> whole
    rule("topk", rows(same_dims, mixes=over("runs over")), OverRanks(ordered.topk)),
    rule("flip", rows(same_dims, mixes=over("runs over")), MovesRows(moves.flipped)),
    rule("_fft_r2c _fft_c2r _fft_c2c", rows(same_dims, mixes=over("runs over"))),
    rule("roll", rows(same_dims, mixes=over("rolls")), MovesRows(moves.rolled)),
    rule("tril triu", rows(reductions.triangle)),
    rule("linear", rows(same_dims, mixes=last_dim("sums over"), others="{op} with a weight made from tokens")),
    rule("native_layer_norm _fused_rms_norm rms_norm", rows(same_dims, mixes=normalized_dims, others=_NORM)),
    rule("convolution", rows(same_dims, mixes=convolution_dims, others=_KERNEL), MovesRows(moves.convolution)),
    rule("avg_pool2d max_pool2d_with_indices adaptive_max_pool2d", rows(same_dims, mixes=pooled_dims)),
    rule("_adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool3d", rows(same_dims, mixes=pooled_dims)),
    # tokens in dim 0 -> the same dims
    rule("native_group_norm instance_norm", Alone(reductions.leading_norm, SIZES)),
    # running statistics, and no tokens in dim 1, the channels -> the same dims
    rule("_native_batch_norm_legit_no_training _batch_norm_no_update", Alone(reductions.batch_norm)),
    # the same; in training: statistics of the tokens of all ranks
    rule(
        "native_batch_norm _native_batch_norm_legit _batch_norm_with_update",
        Alone(reductions.batch_norm),
        OverRanks(wholes.batch_norm),
    ),
)

# Dims are reduced. Over features -> the other dims. A plain sum over all tokens -> a per-rank part of the whole sum.
SUMMED = (
    rule("sum nansum count_nonzero", Alone(reductions.reduce, SUMS)),
    rule("mean amax amin logsumexp max min aminmax prod", Alone(reductions.reduce, SUMS), OverRanks(wholes.reduced)),
    rule(
        "var std var_mean std_mean norm linalg_vector_norm", Alone(reductions.reduce, SUMS), OverRanks(wholes.reduced)
    ),
    # over tokens: the place in the whole row
    rule("argmax argmin", Alone(reductions.reduce), OverRanks(ordered.largest_place)),
    rule("any all", Alone(reductions.reduce, SUMS), OverRanks(wholes.reduced)),
    # over tokens: the one at a place of their order -> whole
    rule("median nanmedian kthvalue", Alone(reductions.reduce, SUMS), OverRanks(ordered.kth)),
    rule("mode", Alone(reductions.reduce, SUMS)),
    # (T,) · times · · -> (T,) ·; · (T,) times (T,) · -> a per-rank part
    rule("mm addmm bmm baddbmm mv addmv dot addbmm", Alone(reductions.product)),
    # tokens in one dim; reduction="none" -> a loss per token, "sum" -> a per-rank part
    rule("nll_loss_forward nll_loss2d_forward", Alone(reductions.nll_loss), OverRanks(reductions.mean_nll)),
    rule(
        "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
        Alone(reductions.elementwise_loss, SUMS),
        OverRanks(reductions.mean_loss),
        OverRanks(reductions.summed_loss),
    ),
    # per-rank parts, of a sum and of a count -> the global mean, whose gradient is a per-rank part
    rule("cp_rewrite::token_mean", Alone(reductions.token_mean, SUMS)),
)

# Values are indices: they may be made from tokens, but pick no tokens.
INDEXED = (
    # a table that is the same on all ranks, or its first T rows -> the indices' dims and one more
    rule("embedding", Alone(indexing.embedding), OverRanks(picked.embedding)),
    # a list that is the same on all ranks -> the dims of what is looked up in it
    rule("isin bucketize searchsorted", Alone(indexing.looked_up)),
    # tensor and indices have the same tokens, in another dim than the indexed one -> the same dims
    rule("scatter", Alone(indexing.gather)),
    # the same; or token rows at places that all ranks know -> whole
    rule("gather", Alone(indexing.gather), OverRanks(picked.gather)),
    # the same; or token rows are added up in a tensor without tokens -> a per-rank part; reduced in one -> whole
    rule("scatter_add", Alone(indexing.gather), OverRanks(wholes.added)),
    rule("scatter_reduce", Alone(indexing.gather), OverRanks(wholes.added), OverRanks(wholes.reduced_by_segment)),
    # tokens in another dim than the indexed one -> the same dims; or sorted rows are added to their tokens; or token
    # rows are added up in a tensor without tokens -> a per-rank part
    rule("index_add", Alone(indexing.written), OverRanks(wholes.added)),
    rule("index_copy index_fill index_reduce", Alone(indexing.written)),
    # an indexed dim without tokens, or of the first T rows of a table -> in its place the indices' dim
    rule(
        "index_select", Alone(indexing.index_select), OverRanks(picked.select_of_table), OverRanks(picked.index_select)
    ),
    # indexed dims without tokens, or all rows of a shard in turn, or the first T rows of a table -> in their place the
    # indices' dims
    rule(
        "index _unsafe_index",
        Alone(indexing.index, POSITIONS),
        OverRanks(picked.index_of_table),
        OverRanks(picked.index),
    ),
    # x[mask] = number, where x and mask have the same tokens -> the same dims
    rule("index_put _unsafe_index_put _index_put_impl", Alone(indexing.index_put, POSITIONS)),
)

# Rows are sorted by a key, worked on in groups, and put back in place by index_put: see `experts`.
SORTED = (
    rule("sort", Alone(sorted_rows.sort), OverRanks(ordered.sort)),
    # of sorted keys -> sizes of their groups; of others -> per-rank counts
    rule("histc", Alone(sorted_rows.group_sizes), OverRanks(wholes.histc)),
    rule("cumsum", Alone(sorted_rows.cumsum, GROUPS), OverRanks(scans.scanned)),
    rule("_grouped_mm transformers::grouped_mm_fallback", Alone(sorted_rows.grouped_product, GROUPS)),
    # rows go to their experts, on whatever rank these are, and come back -> the same dims
    rule(experts.OP, OverRanks(experts.without_fill), Alone(experts.experts)),
)

# A state passes through all tokens of a sequence. Each rank runs over its own; what they do to the state goes to ranks
# that have later tokens. Tokens in dim 1 -> the same dims
RECURRENT = rule(" ".join(states.OPS), Alone(states.alone), OverRanks(states.recurrent))

# Never the same on a shard.
MIXING = (
    rule("nonzero nonzero_static masked_select _unique2 unique_dim unique_consecutive", refused(_PICKS)),
    rule(
        "_local_scalar_dense is_nonzero equal item",
        refused("reads a number off a tensor, which is another one on a shard"),
    ),
    # with minlength -> per-rank counts
    rule("bincount", refused("counts over all tokens"), OverRanks(wholes.bincount)),
    rule("masked_scatter put", refused("writes token rows by place")),
    rule("diff unfold diagonal trace tril_indices", refused("relates tokens to other tokens")),
)

RULES = (
    *VIEWS,
    *FILLED,
    POINTWISE,
    LOG_SIGMOID,
    MUL,
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
    name = aten_name(func)
    # Of some ops that write into their first operand torch tags the other form only.
    plain = getattr(getattr(torch.ops.aten, name, None), func._overloadname, func)
    if name in _BY_NAME or torch.Tag.pointwise in (*func.tags, *plain.tags):
        return _BY_NAME.get(name, POINTWISE)
    kind = kind_by_name(name)
    if kind == "attention":
        return rule(name, refused("is attention, by its name", Reason.UNREAD_ATTENTION))
    return rule(name, refused(f"is {kind} over tokens, by its name: it can't be sharded here")) if kind else None
