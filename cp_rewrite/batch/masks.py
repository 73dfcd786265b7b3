"""The masks among a batch's arguments: compared with its documents, and replaced by what stands in for them.

    batch["mask"]   (B, 1, T, T)        compared with the documents, on each batch
    local["mask"]   (B, 1, T_l, T_l)    one value, expanded: NaN, or False, so that whoever reads it after all shows

No rank reads what stands in: the plan says what the mask says.

    MaskArgument, stand_in, block_stand_in    the meaning of a mask, and what stands in for it on a rank
    differing, first_difference               a tensor, compared in pairs of tokens with what a PackedMask says of them
    first_difference_of_blocks                a BlockMask, compared so
    replace_masks                             both, for all masks of a batch
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cp_rewrite.documents import Documents
from cp_rewrite.masks import MaskMismatch, PackedMask
from cp_rewrite.packing import packing_args
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding, device_of
from cp_rewrite.torch_internals import LARGE_BLOCK

from .as_row import as_row, to_local, traced_tokens

_LOWEST = (torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64))
DROPPED = (-torch.inf, *_LOWEST, -1e9, -1e10)
"""Numbers that an additive mask may hold where a key is not seen: a model may ask for them by value."""


Kind = Literal["shows", "hides", "adds"]


@dataclass(frozen=True)
class MaskArgument:
    """The meaning that was found of a batch's mask.

    Args:
        name: the argument's.
        mask: what it says of each batch, with that batch's documents.
        kind: `shows` holds 1, or True, where a key is seen, `hides` where it is not; `adds` holds 0 where a key is
            seen, and one of `DROPPED` where it is not.
        is_list: not the mask, but a list of blocks in which flex_attention looks at it.
    """

    name: str
    mask: PackedMask
    kind: Kind = "shows"
    is_list: bool = False


def stand_in(
    argument: MaskArgument, shape: Sequence[int], tokens: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(…, T_l, T_l): what a rank's model is called with in the place of a mask of `tokens` tokens."""
    fill = float("nan") if dtype.is_floating_point else 0
    made = torch.full((1,), fill, dtype=dtype, device=device).expand(*shape)
    return _marked(as_row(made, (len(shape) - 2, len(shape) - 1), tokens), argument)


def block_stand_in(
    argument: MaskArgument, shape: Sequence[int], device: torch.device
) -> tuple[BlockMask, list[Tensor]]:
    """The same of (B, T_l, T_l) as a BlockMask, of one block that is as large as any row; and its tensors."""
    # Flex attention traces its mask function once more, and takes no tensor that looks longer than it is.
    table = stand_in(argument, shape, shape[-1], torch.bool, device)
    listed = replace(argument, is_list=True)
    count, place = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    lists = [_marked(x.to(device), listed) for x in (count, place)]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[b, q, k]

    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=LARGE_BLOCK, mask_mod=mask_mod), [table, *lists]


def mask_argument(value: object) -> MaskArgument | None:
    """The mask that a tensor stands in for; None: it is no stand-in."""
    return getattr(to_local(value), "_cp_rewrite_mask", None)


def _marked(value: Tensor, argument: MaskArgument) -> Tensor:
    to_local(value)._cp_rewrite_mask = argument  # type: ignore[attr-defined]
    return value


_ROWS = 1024
"""Queries of which all pairs are compared at a time."""
Ints = NDArray[np.int64]
Place = tuple[int, int, int]
"""(row of the batch, query, key)"""


def compact(value: Tensor) -> Tensor:
    """A mask without the copies that `expand` made along its first dims."""
    for dim in range(value.ndim - 2):
        if value.stride(dim) == 0:
            value = value.narrow(dim, 0, 1)
    return value


def is_added(value: Tensor) -> bool | None:
    """True if a tensor, of any shape, is an additive mask, or one of flags (True or 1: seen); None: it is neither."""
    if value.dtype == torch.bool:
        return False
    if value.dtype.is_complex:
        return None
    if value.dtype.is_floating_point:
        others = value.numel() - int((value == 0).sum())
        for number in dict.fromkeys(torch.tensor(DROPPED, dtype=torch.float64).to(value.dtype).tolist()):
            others -= int((value == number).sum()) if others else 0
        if not others:
            return True
    return False if bool(((value == 0) | (value == 1)).all()) else None


def differing(seen: Any, documents: Documents, mask: PackedMask, q: Ints, k: Ints, known: Any = True) -> Ints:
    """Indices (N, ndim) of `seen`, to whose shape `q` and `k` broadcast, where it says another thing than `mask` of a
    pair that is `known`.

    Queries of no document are left out: no document depends on what they see.
    """
    real = mask.documents(documents).document_ids()[q] >= 0
    return np.argwhere((seen != mask.sees(documents, q, k)) & real & known)


def first_difference(seen: Tensor, rows: Sequence[Documents], mask: PackedMask) -> tuple[Place, bool] | None:
    """(the first pair of which `seen`, (B or 1, H, T, T) bool, says another thing than `mask`, a plain one; what it
    says); None: there is none. Queries of no document are left out."""
    for row, documents in enumerate(rows):
        tables = seen[row if len(seen) > 1 else 0]
        for start, expected in _expected(documents, mask):
            part = tables[:, start : start + len(expected)].cpu().numpy()
            found = np.argwhere(part != expected)
            if len(found):
                head, q, k = found[0].tolist()
                return (row, start + q, k), bool(part[head, q, k])
    return None


def _expected(documents: Documents, mask: PackedMask) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """(first query, (N, T) bool: the keys that it and the next ones see), for all tokens of documents.

    As `PackedMask.sees` says it, a diagonal at a time: what a query of a document sees of it goes by their distance.
    """
    whole = mask.documents(documents)
    for begin, end in zip(whole.starts.tolist(), whole.ends.tolist(), strict=True):
        for start in range(begin, end, _ROWS):
            stop = min(start + _ROWS, end)
            keep = np.zeros((stop - start, documents.total), dtype=np.bool_)
            distances = np.arange(stop - 1 - begin, start - end, -1)  # of the last query and the first key, and down
            keep[::-1, begin:end] = sliding_window_view(mask.reaches(distances), end - begin)
            yield start, keep


def mismatch(name: str, mask: PackedMask, place: Place, seen: bool) -> MaskMismatch:
    """The error of a mask that says another thing than the packing. `seen`: it lets the query see the key."""
    row, q, k = place
    return MaskMismatch(
        f"batch[{name!r}] {'lets' if seen else 'does not let'} query {q} see key {k} in row {row}; '{mask}', of the "
        f"documents that the packing tells, says otherwise. Mend the mask or the packing; where the mask means another "
        f"thing, say it: masks={{{name!r}: cp.PackedMask(…)}}; None, if it is no mask"
    )


Bools = NDArray[np.bool_]
_GRID = 1024
"""Tokens at the front of each row of which all pairs are compared the first time."""
_AT_ONCE = 1 << 20
"""Pairs that the function is run on at a time."""


def first_difference_of_blocks(
    given: BlockMask, rows: Sequence[Documents], mask: PackedMask, pairs: str
) -> tuple[Place, bool] | None:
    """(the first pair that is found to be seen otherwise than `mask` says, whether it is seen) of a BlockMask of a
    global batch; None: none is.

    Its lists say in which blocks of queries and keys its function decides, and which are seen whole. They are compared
    in full on each batch, by whole blocks. The function is run on pairs: on each batch those in which two packings,
    windows or directions differ, with a sample of others; the first time, and always with `verify="every_step"`, on
    many or all.

    each query with     itself, both its neighbours, its document's first and last token, the tokens before and behind
                        these, the window's ends and the tokens beyond, and as many at random

    Args:
        pairs: `sampled`, `many` or `all`.
    """
    counts = [given.kv_num_blocks, given.full_kv_num_blocks]
    places = [given.kv_indices, given.full_kv_indices]
    lists = [(c, p) for c, p in zip(counts, places, strict=True) if c is not None and p is not None]
    listed = [listed_blocks(c, p, p.shape[-1]).cpu().numpy() for c, p in lists]
    for row, documents in enumerate(rows):
        for head in range(listed[0].shape[1]):
            tables = [table[row if len(table) > 1 else 0, head] for table in listed]
            decided, whole = tables if len(tables) > 1 else (tables[0], np.zeros_like(tables[0]))
            size = tuple(int(n) for n in given.BLOCK_SIZE)
            found = _odd_block(decided, whole, documents, mask, (size[0], size[1]))
            if found is not None:
                return (row, found[0], found[1]), found[2]
            for q, k in _pairs(documents, mask, pairs):
                block = q // size[0], k // size[1]
                seen = whole[block] | (decided[block] & _run(given, row, head, q, k))
                wrong = differing(seen, documents, mask, q, k)
                if len(wrong):
                    i = int(wrong[0, 0])
                    return (row, int(q[i]), int(k[i])), bool(seen[i])
    return None


def listed_blocks(counts: Tensor, places: Tensor, blocks: int) -> Tensor:
    """(B, H, Q, blocks) bool: is a block of keys among the first `counts` (B, H, Q) of `places` (B, H, Q, K)?"""
    given = torch.arange(places.shape[-1], device=places.device) < counts[..., None]
    table = torch.zeros(*places.shape[:-1], blocks + 1, dtype=torch.bool, device=places.device)
    return table.scatter_(-1, torch.where(given, places, blocks).long(), True)[..., :-1]


def _odd_block(
    decided: Bools, whole: Bools, documents: Documents, mask: PackedMask, size: tuple[int, int]
) -> tuple[int, int, bool] | None:
    """(query, key, whether it is seen) of a block that is left out though a pair in it is seen, or that is seen whole
    though not all its pairs are; None: there is none."""
    ids = mask.documents(documents).document_ids()
    missing = ~decided & ~whole
    for i, j in np.argwhere(missing | whole).tolist():
        q0, k0 = i * size[0], j * size[1]
        q1, k1 = min(q0 + size[0], documents.total), min(k0 + size[1], documents.total)
        if q0 >= q1 or k0 >= k1 or _is_apart(ids, (q0, q1), (k0, k1), mask, whole=bool(whole[i, j])):
            continue
        wrong = differing(bool(whole[i, j]), documents, mask, np.arange(q0, q1)[:, None], np.arange(k0, k1))
        if len(wrong):
            return q0 + int(wrong[0, 0]), k0 + int(wrong[0, 1]), bool(whole[i, j])
    return None


def _is_apart(ids: Ints, q: tuple[int, int], k: tuple[int, int], mask: PackedMask, whole: bool) -> bool:
    """True if it shows at a glance that a block is rightly left out, or rightly seen `whole`."""
    low, high = q[0] - (k[1] - 1), q[1] - 1 - k[0]
    left, right = np.inf if mask.left is None else mask.left, np.inf if mask.right is None else mask.right
    if whole:
        return (
            bool(ids[q[0]] >= 0 and ids[min(q[0], k[0])] == ids[max(q[1], k[1]) - 1]) and -low <= right and high <= left
        )
    ends = ids[[q[0], q[1] - 1]], ids[[k[0], k[1] - 1]]
    no_padding = all((end >= 0).all() for end in ends)
    return high < -right or low > left or bool(no_padding and (ends[0][0] > ends[1][1] or ends[0][1] < ends[1][0]))


def _pairs(documents: Documents, mask: PackedMask, pairs: str) -> list[tuple[Ints, Ints]]:
    """Queries that are tokens of documents, and keys."""
    total = documents.total
    real = np.flatnonzero(mask.documents(documents).document_ids() >= 0)
    if pairs == "all":
        step = max(1, _AT_ONCE // total)
        groups = [real[i : i + step] for i in range(0, len(real), step)]
        return [(np.repeat(q, total), np.tile(np.arange(total), len(q))) for q in groups]
    found = [_telling(documents, mask, real)]
    if pairs == "many":
        front, keys = real[real < _GRID], np.arange(min(_GRID, total))
        found.append((np.repeat(front, len(keys)), np.tile(keys, len(front))))
    return found


def _telling(documents: Documents, mask: PackedMask, q: Ints) -> tuple[Ints, Ints]:
    """Pairs in which packings, windows and directions differ, of each of the queries `q`."""
    known = documents if len(documents.starts) else mask.documents(documents)
    ids = known.document_ids()[q]
    starts, ends = known.starts[ids], known.ends[ids]
    keys = [q, q - 1, q + 1, starts, starts - 1, ends - 1, ends]
    for side in (mask.left, mask.right):
        keys += [] if side is None else [q - side, q - side - 1, q + side, q + side + 1]
    random = np.random.default_rng(documents.total)
    keys += [random.integers(0, documents.total, len(q)) for _ in range(8)]
    k = np.concatenate(keys)
    queries = np.tile(q, len(keys))
    inside = (k >= 0) & (k < documents.total)
    return queries[inside], k[inside]


def _run(given: BlockMask, row: int, head: int, q: Ints, k: Ints) -> Bools:
    """Run the mask's own function on pairs: (N,) bool, true where a key is seen."""
    device = given.kv_num_blocks.device
    where = [torch.full((len(q),), n, device=device) for n in (row, head)]
    index = [torch.from_numpy(x).to(device) for x in (q, k)]
    return torch.vmap(given.mask_mod)(*where, *index).cpu().numpy()


_compared: set[Hashable] = set()
"""The block masks of which many pairs were compared, by annotation and argument."""


@dataclass
class _Masks:
    """Replaces the masks of one batch. `tensors`: what was put in their place so far."""

    sharding: Sharding
    plan: BatchPlan
    tensors: list[Tensor] = field(default_factory=list[Tensor])

    def replace(self, name: str, value: Any) -> Any:
        """Give what a rank's model gets in the place of a value: the value itself, where it is no mask.

        Raises:
            MaskMismatch: a mask says another thing than the packing. ValueError: it can't be read.
        """
        if isinstance(value, Mapping):
            parts = cast(Mapping[str, Any], value)
            made = {key: self.replace(str(key), part) for key, part in parts.items()}
            return made if any(made[key] is not part for key, part in parts.items()) else value
        if name in self.sharding.masks and self.sharding.masks[name] is None:
            return value
        if isinstance(value, BlockMask):
            return self._replace_blocks(name, value)
        return self._replace_tensor(name, value) if isinstance(value, Tensor) else value

    def _meaning(self, name: str) -> PackedMask:
        mask = self.sharding.masks.get(name) or self.sharding.assume_mask or PackedMask()
        if not mask.is_plain:
            raise ValueError(
                f"batch[{name!r}] is a mask, of which assume_mask says '{mask}': chunks, spans and trees are read of "
                f"masks that the model makes; masks={{{name!r}: None}}, if it is no mask of attention"
            )
        return mask

    def _replace_tensor(self, name: str, value: Tensor) -> Tensor:
        total, rows = self.plan.rows[0].total, len(self.plan.rows)
        named = name in self.sharding.masks
        fits = value.ndim in (2, 3, 4) and value.shape[-2:] == (total, total) and total > 1
        if not fits or (value.ndim > 2 and value.shape[0] not in (1, rows)):
            if named:
                raise ValueError(
                    f"masks names {name!r}, of shape {tuple(value.shape)}: it must be (T, T), (B, T, T) or "
                    f"(B, H, T, T), with {rows} rows of {total} tokens"
                )
            return value
        given = compact(value.detach())
        added = is_added(given)
        if added is None:
            if named:
                raise ValueError(
                    f"masks names {name!r}, which holds other numbers than a mask does: True and False, 1 and 0, or 0 "
                    "and -inf, finfo(dtype).min or -1e9, which are added to logits"
                )
            return value
        seen = given == 0 if added else given.bool()
        seen = seen[None] if seen.ndim == 2 else seen
        argument = self._read(name, seen if seen.ndim == 4 else seen[:, None], added)
        shape = (*value.shape[:-2], self.plan.local_size, self.plan.local_size)
        made = stand_in(argument, shape, traced_tokens(self.sharding, self.plan), value.dtype, self._device(value))
        self.tensors.append(made)
        return made

    def _read(self, name: str, table: Tensor, added: bool) -> MaskArgument:
        """The meaning of a mask whose `table`, (B or 1, H, T, T) bool, is true where it shows keys, or hides them."""
        mask, rows = self._meaning(name), self.plan.rows
        found = first_difference(table, rows, mask)
        if found is None:
            return MaskArgument(name, mask, "adds" if added else "shows")
        if not added and first_difference(~table, rows, mask) is None:
            return MaskArgument(name, mask, "hides")
        raise mismatch(name, mask, *found)

    def _replace_blocks(self, name: str, value: BlockMask) -> BlockMask:
        total, rows = self.plan.rows[0].total, len(self.plan.rows)
        if tuple(value.seq_lengths) != (total, total) or value.kv_num_blocks.shape[0] not in (1, rows):
            raise ValueError(
                f"batch[{name!r}] is a BlockMask of shape {tuple(value.shape)}: it must be one of {rows} rows of "
                f"{total} tokens"
            )
        argument = MaskArgument(name, self._meaning(name))
        key = self.sharding.graph_key, name
        every = self.sharding.verify == "every_step"
        found = first_difference_of_blocks(
            value, self.plan.rows, argument.mask, "all" if every else "sampled" if key in _compared else "many"
        )
        if found is not None:
            raise mismatch(name, argument.mask, *found)
        _compared.add(key)
        shape = (rows, self.plan.local_size, self.plan.local_size)
        made, tensors = block_stand_in(argument, shape, self._device(value.kv_num_blocks))
        self.tensors += tensors
        return made

    def _device(self, value: Tensor) -> torch.device:
        """The device on which the model gets it: what is on the CPU goes to the mesh's device."""
        return device_of(self.sharding) if value.device.type == "cpu" else value.device


def replace_masks(sharding: Sharding, plan: BatchPlan, batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """(the arguments of a batch that are masks of whole rows, or hold some -> what a rank's model gets instead, the
    tensors that this is made of).

    Every mask is compared with the documents of the batch: tensors in all pairs, BlockMasks as `blocks` says.

    Raises:
        MaskMismatch: a mask says another thing than the packing. ValueError: one that `masks` names can't be read.
    """
    cut = {*sharding.tokens, *packing_args(sharding.packing)}
    masks = _Masks(sharding, plan)
    made = {name: masks.replace(name, value) for name, value in batch.items() if name not in cut}
    return {name: value for name, value in made.items() if value is not batch[name]}, masks.tensors
