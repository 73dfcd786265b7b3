"""Compare masks on the first call: what the model's own mask says of pairs of tokens, and what it was proven to be.

The model's mask is run on real tensors. Masks are T x T, so it is run on a sample: up to `SAMPLE` tokens at the front
of each row of the *global* batch and, of a single row, as many from its middle on. A mask that comes in as a tensor is
there for the shard only. Then those pairs are compared whose answer a shard can know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cp_rewrite.agree.turns import talks
from cp_rewrite.batch.active import ActivePlan
from cp_rewrite.batch.masks import differing, listed_blocks
from cp_rewrite.documents import Documents
from cp_rewrite.masks import DROPPED_AT, MaskMismatch, PackedMask
from cp_rewrite.packing import CuSeqlens, packing_args
from cp_rewrite.passes.graph.canonicalize import Canonical, Ref
from cp_rewrite.passes.values.state import RecordedMask, RecordedTensor
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import expression

log = logging.getLogger(__name__)
SAMPLE = 2048
Bools = NDArray[np.bool_]
Codes = NDArray[np.int8]
Leaves = Callable[[RecordedTensor], dict[Ref, Tensor]]
_DROPPED, _KEPT, _BIASED = 0, 1, 2
"""A mask adds to a pair's logit: -inf or the like, nothing, or some other number."""
_SAYS = ("does not let query {q} see key {k}", "lets query {q} see key {k}", "adds a bias to query {q} and key {k}")


def check_masks(masks: Sequence[RecordedMask], plan: ActivePlan, args: Sequence[Any]) -> None:
    """Compare each mask; a collective of the context-parallel group, where its ranks are processes.

    Args:
        masks: as recorded before the rewrite.
        plan: of the batch in flight, with its global batch.
        args: the graph's inputs on this rank.
    Raises:
        MaskMismatch: on every rank, with the line, the first pair of tokens that differs, and who says what.
    """
    text = "\n".join(text for mask in masks for text in _differences(mask, plan, args))
    wrong = next((text for text in _gathered(plan.sharding, text) if text), None)
    if wrong is not None:
        raise MaskMismatch(wrong)


def _gathered(sharding: Sharding, text: str) -> list[str]:
    """Every rank's text, so that all ranks raise alike."""
    if not talks(sharding):
        return [text]
    texts: list[Any] = [None] * sharding.world_size
    dist.all_gather_object(texts, text, group=sharding.group)
    return texts


def _differences(recorded: RecordedMask, plan: ActivePlan, args: Sequence[Any]) -> list[str]:
    missing = {name for name in recorded.tensor.names.values() if not isinstance(plan.handed.batch.get(name), Tensor)}
    if recorded.assumed and missing:
        return _compare_local(recorded, plan, args)
    if missing and recorded.blocks:
        return [f"{recorded.where}: the block mask can't be compared: {', '.join(sorted(missing))} not in the batch"]
    if missing:
        log.warning("%s: mask not compared: %s not in the batch", recorded.where, ", ".join(sorted(missing)))
        return []
    for start, stop in windows(plan.plan.rows):
        found = _compare_global(recorded, plan, start, stop, args)
        if found:
            return found
    return []


def windows(rows: Sequence[Documents]) -> list[tuple[int, int]]:
    """(start, stop) of the tokens to look at: from the front, and, of a single row, from a document in its middle."""
    found = [(0, min(SAMPLE, rows[0].total))]
    later = rows[0].starts[(rows[0].starts >= SAMPLE) & (rows[0].lengths > 0)]
    if len(rows) == 1 and len(later):
        start = int(later[len(later) // 2])
        found.append((start, min(start + SAMPLE, rows[0].total)))
    return found


def _compare_global(recorded: RecordedMask, plan: ActivePlan, start: int, stop: int, args: Sequence[Any]) -> list[str]:
    """Run the mask on tokens [start, stop) of all rows, as if they were the whole batch."""

    def leaves(tensor: RecordedTensor) -> dict[Ref, Tensor]:
        given = {ref: args[place] for ref, place in tensor.places.items() if ref not in tensor.names}
        return given | {ref: _sample(plan, name, start, stop) for ref, name in tensor.names.items()}

    rows = [documents.clipped(start, stop) for documents in plan.plan.rows]
    actual = _run(recorded, leaves, stop - start, len(rows), plan.device)
    index = np.arange(stop - start)
    mask, pairs = recorded.mask, zip(actual, rows, strict=True)
    places = [differing(codes, row, mask, index[:, None], index) for codes, row in pairs]
    return _report(recorded, actual, places, start)


def _sample(plan: ActivePlan, name: str, start: int, stop: int) -> Tensor:
    """An argument of the global batch as it would be for tokens [start, stop) alone."""
    value: Tensor = plan.handed.batch[name]
    dim, packing = plan.sharding.tokens.get(name), plan.sharding.packing
    if dim is not None:
        value = value.narrow(dim, start, stop - start)
    elif name in plan.handed.masks:
        value = value[..., start:stop, start:stop]
    elif isinstance(packing, CuSeqlens) and name in packing_args(packing):
        value = (value.clamp(start, stop) - start).to(value.dtype)
    return value.to(plan.device)


def _compare_local(recorded: RecordedMask, plan: ActivePlan, args: Sequence[Any]) -> list[str]:
    """Compare a mask made from, or for, this rank's tokens.

    Whoever made it saw a row of pieces, not the global row. Tokens of one piece must see each other as the assumed
    mask says, and those of two documents must not. Of two pieces of one document a shard can't know.

        rank's tokens    a0 a1 | a6 a7 | b2      pieces: two of document a, one of b
        a0 and a1        as the mask says
        a0 and b2        not at all
        a0 and a6        not compared
    """
    tensor = recorded.tensor
    if any(ref not in tensor.places for ref in tensor.canonical.leaves.values() if ref not in tensor.values):
        return []
    indices = plan.plan.local_indices(plan.sharding.rank)
    values = {ref: args[place] for ref, place in tensor.places.items()}
    actual = _run(recorded, lambda _: values, indices.shape[1], len(indices), plan.device)
    places = [
        differing(codes, row, recorded.mask, index[:, None], index, _known(recorded.mask, row, index))
        for codes, row, index in zip(actual, plan.plan.rows, indices, strict=True)
    ]
    return _report(recorded, actual, places, 0)


def _known(mask: PackedMask, documents: Documents, index: NDArray[np.int64]) -> Bools:
    """(N, N): whether a shard can know what the mask says of a pair of a rank's tokens.

    `index`: where these tokens stand in the global row; -1 for padding.
    """
    ids = documents.document_ids()[np.maximum(index, 0)]
    real = (index >= 0) & (ids >= 0)
    same = (ids[:, None] == ids) if mask.packed else np.ones((len(ids), len(ids)), dtype=np.bool_)
    piece, run = _runs(index), _runs(index - documents.starts[ids])
    delta = index[:, None] - index[None, :]
    # Positions may count on from one document's piece to another's: who reads positions takes them for one.
    known = (piece[:, None] == piece) | (~same & (run[:, None] != run))
    if mask.chunk_of == "row":  # a shard counts its own tokens
        known &= ~same
    if not mask.looks_ahead:
        known |= same & (delta < 0)
    if mask.hangs_on_others:  # one shard may join spans of two pieces, or lack what is above a node
        known &= piece[:, None] == piece
    return known & real[:, None] & real


def _runs(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each run of values that count up by one: 0 1 2 6 7 -> 1 1 1 2 2."""
    return np.cumsum(np.diff(values, prepend=values[:1]) != 1)


def _report(recorded: RecordedMask, actual: Codes, places: Sequence[NDArray[np.int64]], start: int) -> list[str]:
    """places: by row, (N, 3): head, query and key of pairs that differ."""
    row = next((row for row, found in enumerate(places) if len(found)), None)
    if row is None:
        return []
    head, q, k = places[row][0].tolist()
    word = "assumed" if recorded.assumed else "proven"
    says = _SAYS[int(actual[row, head, q, k])].format(q=start + q, k=start + k)
    return [
        f"{recorded.where}: the mask is {word} to be '{recorded.mask}', but the model's own mask {says} "
        f"in row {row} ({sum(map(len, places))} pairs differ)"
    ]


def _run(recorded: RecordedMask, leaves: Leaves, tokens: int, rows: int, device: torch.device) -> Codes:
    """(B, H, T, T): whether the mask's own computation, run on `leaves`, drops, keeps or biases a pair.

    flex_attention has lists of blocks too: the mask function decides in the first lists' blocks, pairs in the second
    lists' blocks are kept, and all others are dropped.
    """
    counts = dict.fromkeys(_symbols(recorded.tokens), tokens) | dict.fromkeys(_symbols(recorded.rows), rows)

    def run(tensor: RecordedTensor, indices: Mapping[Ref, Tensor]) -> Tensor:
        values = leaves(tensor)
        named = {
            expression(s): n for r, v in values.items() for s, n in zip(r.shape, v.shape, strict=True) if _is_symbol(s)
        }
        values = {ref: value.to(device) for ref, value in {**tensor.values, **values, **indices}.items()}
        return evaluate(tensor.canonical, values, counts | named, device)

    out = run(recorded.tensor, _grids(recorded.indices, (rows, 1, tokens, tokens), device))
    keep = out.to(torch.int8)
    if out.dtype != torch.bool:
        keep = torch.where(out == 0, _KEPT, torch.where(out <= DROPPED_AT, _DROPPED, _BIASED))
    lists = [run(tensor, {}) for tensor in recorded.blocks]
    for counted, place in zip(lists[::2], lists[1::2], strict=True):
        listed = _listed(counted, place, tokens, recorded.block_size)
        keep = keep * listed if counted is lists[0] else torch.where(listed, _KEPT, keep)
    if keep.ndim == 3 and len(keep) > 1:  # heads, merged with rows perhaps
        keep = keep.unflatten(0, (rows, -1))
    heads = keep.shape[1] if keep.ndim == 4 else 1
    return keep.expand(rows, heads, tokens, tokens).cpu().numpy()


def _grids(indices: Sequence[Ref | None], grid: tuple[int, ...], device: torch.device) -> dict[Ref, Tensor]:
    """Values of b, h, q and k for every element of a mask, each along its own dim: k of shape (1, 1, 1, T)."""
    shapes = [[size if other == dim else 1 for other in range(4)] for dim, size in enumerate(grid)]
    return {
        ref: torch.arange(grid[dim], device=device).view(shapes[dim])
        for dim, ref in enumerate(indices)
        if ref is not None
    }


def _listed(counts: Tensor, places: Tensor, tokens: int, size: tuple[int, int]) -> Tensor:
    """(B, H, T, T): whether a pair is in one of the first `counts` (B, H, Q) blocks of `places` (B, H, Q, K)."""
    table = listed_blocks(counts, places, -(-tokens // size[1]))
    query, key = (torch.arange(tokens, device=places.device) // n for n in size)
    return table[:, :, query][..., key]


def _symbols(sizes: Sequence[Any]) -> set[Any]:
    return {found for size in sizes if not (found := expression(size)).is_number}


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and expression(size).is_Symbol


@torch.no_grad()
def evaluate(
    canonical: Canonical, values: Mapping[Ref, Tensor], sizes: Mapping[Any, int], device: torch.device
) -> Tensor:
    """Run a canonical slice on real tensors, its symbolic sizes replaced by `sizes`."""
    env = dict(values)

    def number(size: Any) -> Any:
        value: Any = expression(size).subs(sizes)
        kind = float if isinstance(size, torch.SymFloat) else bool if isinstance(size, torch.SymBool) else int
        return kind(value)

    def tensor(ref: Ref) -> Tensor:
        if ref not in env:
            constant = canonical.constants.get(ref)
            shape = [number(s) if isinstance(s, torch.SymInt) else s for s in ref.shape]
            # A leaf without a known number holds weights: masks read its shape only.
            env[ref] = torch.full(shape, 0 if constant is None else constant, dtype=ref.dtype, device=device)
        return env[ref]

    for call in canonical.calls:
        args, kwargs = tree_map_only(Ref, tensor, (call.args, call.kwargs))
        args, kwargs = tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), number, (args, kwargs))
        out: Any = call.func(*args, **kwargs)
        for ref, result in zip(call.outputs, out if isinstance(out, tuple | list) else [out], strict=True):
            if ref is not None:
                env[ref] = result
    return tensor(canonical.output)
