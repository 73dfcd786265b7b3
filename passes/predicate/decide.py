"""Decide what a mask means: a PackedMask, or the reasons why it is none.

A mask is read in three steps. Here is one of a model that has document ids of shape (B, T):

    mask = (ids[:, :, None] == ids[:, None, :]) & torch.ones(T, T).tril().bool()

1. `evaluate` turns every tensor into a function from an index to an expression. At batch row b, query q and key k this
   mask is

    Eq(ids(b, q) - ids(b, k), 0)  &  (k - q <= 0)

2. `recognise` finds the query's and the key's token in it: their document ids IQ and IK, their places in the row Q, K.

    IQ - IK == 0  &  K - Q <= 0

3. `decide` asks in every cell of a table whether the mask keeps the key. A cell (`worlds.Cell`) is a world, such as
   "keys of the query's document", and a range of distances d = query - key. Ranges end where a relation may change,
   here at 0.

                         d < 0     d = 0     d > 0
    the same document    drops     keeps     keeps
    other documents      drops               drops

   All keys of other documents are dropped, so documents are packed. Of its own document a query keeps the distances
   from 0 on: no key to its right and all to its left. That is `PackedMask(causal=True, window=None, packed=True)`.
   Where a mask reads a grouping of tokens (`groupings`), as chunks (q // 4), each world has a row for every way in
   which it may hold query and key: keys of the query's chunk, and of others.

A mask is refused where it keeps some pairs of a cell and drops others, where the kept distances are no window, and
where keys of other documents are kept at other distances. A term that steps 1 and 2 can't read is carried along with
its trouble, and is named where the answer hangs on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import sympy
import torch.fx as fx
from sympy.core.function import AppliedUndef

from cp_rewrite.batch.masks import MaskArgument
from cp_rewrite.masks import DROPPED_AT, PackedMask
from cp_rewrite.packing import CuSeqlens, DocumentIds, PaddingMask, Tree, packing_args
from cp_rewrite.passes.graph.canonicalize import Canonical
from cp_rewrite.passes.predicate.recognise import Reader
from cp_rewrite.passes.values.state import Table
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding

from .cells import turning_points
from .evaluate import Evaluator
from .groupings.grouping import Form, Grouping, Kept, Relation
from .groupings.table import cells, groupings_of
from .rules import reshape
from .symbolic import TOKENS, ZERO, Expr, Index, SymTensor, Value, is_bool
from .worlds import Cell, Pair, Span, Trouble, World, distances, relations

_PAIRS = (World.SAME, World.DIFFERENT)


def prove(
    canonical: Canonical,
    mask: fx.Node,
    query_shape: Sequence[Any],
    sharding: Sharding,
    name_of: Callable[[fx.Node], str],
    local_tokens: frozenset[Expr],
    indices: Sequence[fx.Node] = (),
    zeros: Sequence[fx.Node] = (),
    masks: Mapping[fx.Node, MaskArgument] | None = None,
    tables: Mapping[fx.Node, Table] | None = None,
) -> PackedMask | list[Refusal]:
    """The meaning of an attention node's mask, for the row that the annotation describes.

    Args:
        canonical: the mask's computation.
        mask: the node that refusals name where they know none of their own.
        query_shape: (B, H, T, …) of the queries, ints or SymInts.
        name_of: the name of a leaf's node, see `Leaf.name`.
        local_tokens: the expressions that count this shard's tokens.
        indices: placeholders that stand for b, h, q and k, where the mask is a function of them (flex_attention).
        zeros: nodes that count as 0: the logits that the mask is added to.
        masks: nodes that stand in for masks of the batch. tables: buffers whose numbers are known.
    """
    packing = sharding.packing
    ids = packing.arg if isinstance(packing, DocumentIds | Tree) else None
    marks = packing.arg if isinstance(packing, PaddingMask) else None
    given = dict.fromkeys(zeros, ZERO)
    evaluator = Evaluator(local_tokens, name_of, given, ids, marks, masks=masks or {}, tables=tables or {})
    sizes = [evaluator.size(s) for s in query_shape[:3]]
    index = index_of(evaluator, sizes)
    evaluator.given.update(zip(indices, index, strict=False))
    tensor, batch_and_heads = evaluator.run(canonical), sympy.expand(sizes[0] * sizes[1])
    if len(tensor.shape) == 3 and tensor.shape[0] == batch_and_heads != 1:  # merged, as in logits that bmm makes
        tensor = reshape(tensor, (*sizes, sizes[2]), evaluator.sizes)
    value, pair = read_mask(tensor, index, [*sizes, sizes[2]])
    if isinstance(value, Refusal):
        return [Refusal(value.reason, value.detail, mask)]
    token_size = frozenset({TOKENS, *(evaluator.size(s) for s in local_tokens)})
    reader = Reader(sharding, evaluator.leaves, pair, token_size)
    return decide(reader, value, mask)


def index_of(evaluator: Evaluator, sizes: Sequence[Expr]) -> Index:
    """The index (b, h, q, k) of a mask's element, with 0 in place of b or h where that dim has one entry."""
    batch, heads, tokens = sizes
    named = zip(("b", "h", "q", "k"), (batch, heads, tokens, tokens), strict=True)
    return tuple(ZERO if size == 1 else evaluator.symbol(name, size) for name, size in named)


def read_mask(tensor: SymTensor, index: Index, sizes: Sequence[Expr]) -> tuple[Any, Pair]:
    """(the mask's element at (b, h, q, k), what query and key are called in it).

    The element is a Refusal where the mask's shape does not broadcast to `sizes`, (B, H, T, T).
    """
    others = {s: name for s, name in ((index[0], "batch row"), (index[1], "head")) if s != 0}
    pair = Pair(index[2], index[3], index[0], others)
    shape = sizes[4 - len(tensor.shape) :]
    if len(tensor.shape) > 4 or any(s not in (1, whole) for s, whole in zip(tensor.shape, shape, strict=True)):
        detail = f"the mask has shape {tuple(map(str, tensor.shape))}, attention needs {tuple(map(str, shape))}"
        return Refusal(Reason.MASK_WRONG_DIM, detail), pair
    return tensor.broadcast_at(index), pair


def decide(reader: Reader, value: Value, mask: fx.Node) -> PackedMask | list[Refusal]:
    """Ask in every cell whether the mask keeps the key, and read a window off the answers.

    Args:
        value: the mask's element at (b, h, q, k).
        mask: the node that refusals name.
    """
    points = {0}.union(*[turning_points(reader.linear(relation.lhs)) for relation in relations(value)])
    groupings = groupings_of(reader)
    spans = distances(points.union(*(grouping.distances for grouping in groupings)))
    table = [cell for world in _PAIRS for cell in cells(world, spans, groupings)]
    kept = {cell: _kept(reader, value, cell) for cell in table}
    undecided = [answer for answer in kept.values() if not isinstance(answer, bool)]
    if undecided:
        return _why_undecided(reader, value, undecided[0], mask)
    packed = not any(answer for cell, answer in kept.items() if cell.world is World.DIFFERENT and not _impossible(cell))
    plain = {cell: answer for cell, answer in kept.items() if cell.same and all(each.plain for each in cell.relations)}
    window = _window(sorted({cell.span for cell, answer in plain.items() if answer}))
    fields = {name: value for grouping in groupings for name, value in grouping.fields(kept, plain).items()}
    form = Form(window, packed, fields)
    detail = _odd_cell(kept, form) or next(filter(None, (grouping.odd(form) for grouping in groupings)), "")
    if not detail and window is None:
        seen = ", ".join(f"{cell.span[0]:g} to {cell.span[1]:g}" for cell, yes in plain.items() if yes) or "nowhere"
        detail = f"query - key may be {seen}: no window around the query itself"
    elif not detail:
        detail = _padding_told(reader, value, form) or _odd_padding(reader, value, spans, kept, form, groupings)
    if detail or window is None:
        return [Refusal(Reason.MASK_NOT_PACKED, detail, mask)]
    try:
        return PackedMask(window[1] == 0, window, packed, **fields)
    except ValueError as error:
        return [Refusal(Reason.MASK_NOT_PACKED, str(error), mask)]


def _impossible(cell: Cell) -> bool:
    return any(relation.impossible(cell) for relation in cell.relations)


def _odd_cell(kept: Kept, form: Form) -> str:
    """Where the mask does otherwise than with the keys of the query's own document, or group, at the same distance."""
    for cell, answer in kept.items():
        expected = None if cell.world is World.DIFFERENT and form.packed else _expected_in(kept, cell, form)
        if expected is not None and expected != answer:
            return f"the mask keeps {cell}" if answer else f"the mask drops {cell}"
    return ""


def _expected_in(kept: Kept, cell: Cell, form: Form) -> bool | str | None:
    """True if a mask of this form keeps a cell; None: no batch has such pairs."""
    for relation in cell.relations:
        expected = relation.expected(cell, form)
        if expected is not Relation:
            return expected
    plain = Cell(World.SAME, cell.span, tuple(relation.alike(cell, form) for relation in cell.relations))
    return kept.get(plain, False)


def _why_undecided(reader: Reader, value: Value, first: str, mask: fx.Node) -> list[Refusal]:
    """Refusals of a mask that leaves cells undecided: the terms that can't be read; without any, the `first` cell."""
    unread = _unread(reader, value)
    if unread:
        return list(dict.fromkeys(Refusal(t.reason, t.detail, t.node or mask) for t in unread))
    counts = "the mask depends on the number of tokens, which a shard changes"
    return [Refusal(Reason.MASK_NOT_PACKED, counts if value.has(TOKENS) else first, mask)]


def _padding_told(reader: Reader, value: Value, form: Form) -> str:
    """The trouble with a mask of the whole row that reads what tells documents from padding: cells say nothing of
    queries that are padding, but of the whole row the next layer's queries see what these saw."""
    packing = reader.sharding.packing
    if form.packed or not isinstance(packing, CuSeqlens | DocumentIds | PaddingMask):
        return ""
    read = {reader.leaves[term.func].name for term in value.atoms(AppliedUndef) if term.func in reader.leaves}
    told = sorted(read & {*packing_args(packing)})
    return (
        f"the mask sees the whole row, and reads {told[0]!r}, by which queries of padding may see less" if told else ""
    )


def _odd_padding(
    reader: Reader, value: Value, spans: Sequence[Span], kept: Kept, form: Form, groupings: Sequence[Grouping]
) -> str:
    """The trouble with padding behind a query's document, where a numbering may give it that document's number:
    a packed mask lets no query see it, one of the whole row sees it as any other token there."""
    numbered = reader.skips_end or any(o.with_padding for o in reader.ordinals.values())
    if not (isinstance(reader.sharding.packing, CuSeqlens) and numbered):
        return ""
    right = cells(World.PADDING, [span for span in spans if span[1] < 0], groupings)
    for cell in (cell for cell in right if not _impossible(cell)):
        expected = False if form.packed else _expected_in(kept, cell, form)
        if expected is not None and _kept(reader, value, cell) != expected:
            if form.packed:
                return "padding after a document counts as its tokens, and queries see keys after them"
            return f"the mask drops {cell}, of keys of the whole row"
    return ""


def _kept(reader: Reader, value: Value, cell: Cell) -> bool | str:
    """True: the mask keeps every key of the cell. False: it drops every one. A text: what else it does."""
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
    """Troubles of the mask's terms: those that name a tensor or an op, or all where there are none of them."""
    found = reader.blame(value)
    named = [t for t in found if t.reason is not Reason.MASK_NOT_PACKED]
    return named or found


def _window(spans: list[Span]) -> tuple[int | None, int | None] | None:
    """(left, right) of the kept distances, where they are one run around 0; None for any other set.

    (0, 0), (1, inf)      ->  (None, 0)
    (-3, -1), (0, 0)      ->  (0, 3)
    (1, inf)              ->  None
    """
    if not any(low <= 0 <= high for low, high in spans):
        return None
    if any(after[0] != before[1] + 1 for before, after in pairwise(spans)):
        return None
    low, high = spans[0][0], spans[-1][1]
    return (None if math.isinf(high) else int(high)), (None if math.isinf(low) else int(-low))
