"""Decide what a symbolic mask means: a PackedMask, or the reasons why it is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.fx as fx

from cp_rewrite.masks import PackedMask
from cp_rewrite.passes.graph.canonicalize import Canonical
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import CuSeqlens, DocumentIds, Sharding

from .aten import Evaluator
from .read_documents import Reader
from .terms import Pair, Trouble, relations
from .values import TOKENS, ZERO, Expr, Index, SymTensor, Value, is_bool
from .worlds import Cell, Span, World, distances, turning_points

# At or below the lowest fp16 number a key's softmax weight is exactly zero, in every dtype, unless logits differ by as
# much: the additive masks in use are -inf, finfo(dtype).min, -1e9 and their sums.
DROPPED_AT = torch.finfo(torch.float16).min


def prove(
    canonical: Canonical,
    mask: fx.Node,
    query_shape: Sequence[Any],
    sharding: Sharding,
    name_of: Callable[[fx.Node], str],
    local_tokens: frozenset[Expr],
    indices: Sequence[fx.Node] = (),
    zeros: Sequence[fx.Node] = (),
) -> PackedMask | list[Refusal]:
    """What the mask of an attention node means, for the row that the annotation describes.

    Args:
        canonical, mask: the mask's computation, and the node that refusals without a node of their own name.
        query_shape: (B, H, T, D) of the queries, ints or SymInts.
        name_of: the argument's name of a leaf node.
        local_tokens: the expressions that count this shard's tokens.
        indices: placeholders that stand for b, h, q and k, when the mask is a function of them.
        zeros: nodes that count as 0: logits that the mask is added to.
    """
    ids = sharding.packing.arg if isinstance(sharding.packing, DocumentIds) else None
    evaluator = Evaluator(local_tokens, name_of, dict.fromkeys(zeros, ZERO), ids)
    sizes = [evaluator.size(s) for s in query_shape[:3]]
    index = index_of(evaluator, sizes)
    evaluator.given.update(zip(indices, index, strict=False))
    value, pair = read_mask(evaluator.run(canonical), index, [*sizes, sizes[2]])
    if isinstance(value, Refusal):
        return [Refusal(value.reason, value.detail, mask)]
    token_size = frozenset({TOKENS, *(evaluator.size(s) for s in local_tokens)})
    reader = Reader(sharding, evaluator.leaves, pair, token_size)
    static = next((int(s) for s in local_tokens if s.is_Integer), None)
    return decide(reader, value, static, mask)


def index_of(evaluator: Evaluator, sizes: Sequence[Expr]) -> Index:
    """The index symbols b, h, q, k; 0 for a dim of one."""
    batch, heads, tokens = sizes
    named = zip(("b", "h", "q", "k"), (batch, heads, tokens, tokens), strict=True)
    return tuple(ZERO if size == 1 else evaluator.symbol(name, size) for name, size in named)


def read_mask(tensor: SymTensor, index: Index, sizes: Sequence[Expr]) -> tuple[Any, Pair]:
    """The mask's element at (b, h, q, k), or a Refusal when its shape does not broadcast to `sizes`, (B, H, T, T)."""
    others = {s: name for s, name in ((index[0], "batch row"), (index[1], "head")) if s != 0}
    pair = Pair(index[2], index[3], index[0], others)
    shape = sizes[4 - len(tensor.shape) :]
    if len(tensor.shape) > 4 or any(s not in (1, whole) for s, whole in zip(tensor.shape, shape, strict=True)):
        detail = f"the mask has shape {tuple(map(str, tensor.shape))}, attention needs {tuple(map(str, shape))}"
        return Refusal(Reason.MASK_WRONG_DIM, detail), pair
    return tensor.broadcast_at(index), pair


def decide(reader: Reader, value: Value, static_tokens: int | None, mask: fx.Node) -> PackedMask | list[Refusal]:
    """Evaluate the mask in every world and at every distance where it can change."""

    def refuse(reason: Reason, detail: str, node: fx.Node | None = None) -> list[Refusal]:
        return [Refusal(reason, detail, node or mask)]

    points = {0}
    for relation in relations(value):
        points |= turning_points(reader.linear(relation.lhs))
    spans = distances(points)
    same = {span: _kept(reader, value, Cell(World.SAME, span)) for span in spans}
    other = {span: _kept(reader, value, Cell(World.DIFFERENT, span)) for span in spans if span != (0, 0)}
    unread = _unread(reader, value)
    undecided = [v for v in (*same.values(), *other.values()) if not isinstance(v, bool)]
    if undecided and unread:
        return list(dict.fromkeys(Refusal(t.reason, t.detail, t.node or mask) for t in unread))
    if undecided and value.has(TOKENS):
        return refuse(Reason.MASK_NOT_PACKED, "the mask depends on the number of tokens, which a shard changes")
    if undecided:
        return refuse(Reason.MASK_NOT_PACKED, undecided[0])
    packed = not any(other.values())
    if not packed and any(same[span] != kept for span, kept in other.items()):
        seen = next(span for span, kept in other.items() if kept)
        return refuse(Reason.MASK_NOT_PACKED, f"the mask keeps {Cell(World.DIFFERENT, seen)}")
    window = _window([span for span, kept in same.items() if kept])
    if window is None:
        kept = ", ".join(f"{low:g} to {high:g}" for (low, high), keep in same.items() if keep) or "nowhere"
        return refuse(
            Reason.MASK_NOT_PACKED,
            f"query - key may be {kept}: no window around the query itself",
        )
    left, right = window
    if static_tokens is not None and any(w is not None and abs(w - static_tokens) <= 1 for w in window):
        return refuse(
            Reason.MASK_NOT_PACKED,
            f"the window {window} may be the length of a shard ({static_tokens} tokens) or a constant: the graph was "
            "captured with fixed sizes; mark the token dim dynamic (torch.compile(dynamic=True)) to tell them apart",
        )
    merged = isinstance(reader.sharding.packing, CuSeqlens) and any(o.with_padding for o in reader.ordinals.values())
    later = [span for span in spans if span[1] < 0]
    if packed and merged and any(_kept(reader, value, Cell(World.PADDING, span)) is not False for span in later):
        return refuse(
            Reason.MASK_NOT_PACKED,
            "padding after a document counts as its tokens, and queries see keys after them",
        )
    return PackedMask(causal=right == 0, window=(left, right), packed=packed)


def _kept(reader: Reader, value: Value, cell: Cell) -> bool | str:
    """Whether the mask keeps every key of the cell (True), drops every one (False), or what else it does."""
    if is_bool(value):
        truths = reader.truths(value, cell)
        return next(iter(truths)) if len(truths) == 1 else f"the mask is not the same for all {cell}"
    numbers = reader.numbers(value, cell)
    if numbers is None:
        return f"the mask adds a bias that varies among {cell}"
    if numbers == frozenset({0.0}):
        return True
    if all(v <= DROPPED_AT for v in numbers):
        return False
    odd = next((v for v in numbers if v != 0.0 and not v <= DROPPED_AT), None)
    if odd is not None:
        return f"the mask adds {odd:g} to the logits of {cell}: neither 0 nor -inf nor finfo.min"
    return f"the mask is not the same for all {cell}"


def _unread(reader: Reader, value: Value) -> list[Trouble]:
    """Troubles of the terms in the mask, the ones that name a tensor or an op first."""
    found = reader.blame(value)
    named = [t for t in found if t.reason is not Reason.MASK_NOT_PACKED]
    return named or found


def _window(spans: list[Span]) -> tuple[int | None, int | None] | None:
    """(left, right) of a run of distances that holds 0; None for any other set."""
    if not any(low <= 0 <= high for low, high in spans):
        return None
    if any(after[0] != before[1] + 1 for before, after in pairwise(spans)):
        return None
    low, high = spans[0][0], spans[-1][1]
    return (None if math.isinf(high) else int(high)), (None if math.isinf(low) else int(-low))
