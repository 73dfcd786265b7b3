"""A global batch, cut: its documents are read, its plan is made, and this rank's tokens are handed over."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cp_rewrite.agree import heartbeat, turns
from cp_rewrite.agree.turns import talks
from cp_rewrite.arguments import IGNORE_INDEX, flag, named_values
from cp_rewrite.batch.active import ActivePlan, activate, check_no_batch, site_now, to_device
from cp_rewrite.batch.handed import Handed, PackingValues
from cp_rewrite.batch.marks import mark_token_dim, number_tokens, version_of
from cp_rewrite.documents import MAX_TOKENS
from cp_rewrite.masks import MaskMismatch
from cp_rewrite.ops.states.functions import state_ops
from cp_rewrite.packing import packing_args
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.cost.devices import SiteKind
from cp_rewrite.planning.routes.route import Arrays
from cp_rewrite.sharding import Sharding, device_of
from cp_rewrite.torch_internals import trace_transformers

from . import steps
from .active import Place
from .as_row import as_row, traced_tokens
from .buffers import buffers_of, fixed_values
from .encoders import wrap_encoders
from .labels import COUNT, SHIFTED, check_fill, is_label, shifted, warn_if_shifted
from .marks import check_unchanged
from .masks import replace_masks
from .notes import noted, warn_if_nothing_ran
from .own_rows import Given, check_seams, join_rows
from .padding import check_labels, padding_tokens
from .read_documents import documents_of, shape_of
from .tokens import cut_tokens
from .trace import begin_batch, note_batch


class LocalBatch(dict[str, Any]):
    """This rank's part of a batch, by argument, for `model(**local)`. `plan` is the BatchPlan that it was cut by."""

    def __init__(self, values: Mapping[str, Any], plan: BatchPlan, rank: int) -> None:
        super().__init__(values)
        self.plan, self._rank = plan, rank

    @property
    def has_token(self) -> Tensor:
        """(B, T_l) bool on the CPU: false in rows that fill the rank up. What is summed over tokens outside of the
        compiled model must leave these out: by it, by labels or by a mask of the batch's own."""
        return torch.from_numpy(self.plan.local_indices(self._rank) >= 0)


@contextmanager
def shard(
    sharding: Sharding,
    batch: Mapping[str, Any],
    *,
    lengths: Sequence[int] | Sequence[Sequence[int]] | None = None,
    shift_labels: bool = False,
    label_arg: str = "labels",
    drop: Sequence[str] = (),
    fill: Mapping[str, float] | None = None,
    given: Given | None = None,
    site: SiteKind | None = None,
    planned: BatchPlan | None = None,
    arrays: Mapping[Place, Arrays] | None = None,
) -> Generator[LocalBatch]:
    """Cut a global batch and make its plan active for the calls inside.

    Token tensors are cut along their token dim, in the layout's order. Where a rank has fewer tokens than another, its
    part is filled up at the end with 0 and False (labels: -100); `local.has_token` tells these rows apart. The compiled
    model reads copies of its last token there instead, on which nothing fails that works on tokens. These parts, what
    tells documents apart and the count of targets go to the mesh's device, if they are on the CPU.
    Everything else is handed over as it is. With a capacity, all tensors are handed over in buffers that every batch
    shares.

    Args:
        sharding: the annotation.
        batch: argument name -> value, the same on every rank of the group; with `rows="own"` this rank's rows, {} for
            none. `num_items_in_batch` is then its own, too, and is summed over ranks.
        lengths: documents' lengths, (N,) or one list per row, when the packing argument is on a GPU: reading it there
            would stall the GPU. Rows may be longer than their lengths' sum; the rest is padding.
        shift_labels: shift labels by one token over the global row before the cut, as a causal language model's loss
            does, and hand over `shift_labels` and, unless the batch has it, `num_items_in_batch` (targets in the whole
            batch; with accumulated gradients pass that of all batches). A model whose loss reads the labels as they
            are, as the graph shows, gets their count instead.
        label_arg: name of the labels.
        drop: names of what the model does not take: it is read and cut as all else, and not handed over.
        fill: argument -> what it holds in rows without a token, where that is not 0: targets of a loss outside of the
            model with their ignore_index, which are not called labels.
        given, site, planned, arrays: the group's batch, what it is planned for, its plan and tables of it, where
            they were made before.
    Raises:
        KeyError, TypeError, ValueError: a missing argument, no tensor, token dims of different lengths, tokens that
            were cut before, lengths that do not fit, labels that can't hold -100, targets at tokens of no document,
            documents that can't be cut into whole chunks.
        MaskMismatch: a mask says another thing than the packing.
        RuntimeError: inside another batch's block; a batch that `batches` planned was written to since; and on every
            rank, when ranks were given different batches or
            layouts, or one of them could not cut its batch.
    """
    start = time.perf_counter()
    if get_worker_info() is not None:  # a fork, which must not touch the group
        raise RuntimeError("shard() was called in a DataLoader's worker: call it in the process that trains")
    if sharding.check_batches and talks(sharding):
        heartbeat.watch(sharding)
    site = site_now(sharding) if given is None else site
    given = given or given_to_all(sharding, batch, lengths)
    batch = given.batch
    try:
        check_no_batch()
        flag("shift_labels", shift_labels)
        _check_drop(drop, batch, shift_labels)
        fill = dict.fromkeys(drop, 0) | dict(_checked_fill(fill or {}, sharding))
        plan = planned or plan_of(sharding, given, site, lengths)
        active, values = _cut_batch(sharding, given, plan, label_arg, shift_labels, fill, arrays or {})
        check_unchanged(batch, given.marks)
        if active.handed.masks:
            turns.on_masks(sharding)
    except Exception as error:
        by_mask = isinstance(error, MaskMismatch) and not sharding.check_batches
        turns.on_failure(sharding, "masks" if by_mask else "batch", error)
        raise
    notes = steps.due(sharding)
    steps.compare(notes, turns.on_batch(sharding, plan, batch, steps.text_of(notes)))
    trace_transformers()
    wrap_encoders()
    heartbeat.enter_batch(sharding)
    local = LocalBatch({name: value for name, value in values.items() if name not in drop}, plan, sharding.rank)
    begin_batch()
    seconds = time.perf_counter() - start
    with activate(active), state_ops(), heartbeat.in_batch(sharding), noted(sharding, batch, active.handed.masks):
        yield local
    note_batch(plan, active.sites, seconds)
    warn_if_nothing_ran(sharding, active.ran)


def _check_drop(drop: Sequence[str], batch: Mapping[str, Any], shift_labels: bool) -> None:
    if isinstance(drop, str):
        raise TypeError(f"drop must hold names of arguments, as in ({drop!r},), got {drop!r}")
    made = (SHIFTED, COUNT) if shift_labels else ()
    unknown = [name for name in drop if name not in batch and name not in made]
    if unknown:
        raise KeyError(f"drop names {unknown}, which the batch does not have; it has {sorted(batch)}")


def _checked_fill(fill: Any, sharding: Sharding) -> Mapping[str, float]:
    given: Mapping[str, Any] = named_values("fill", fill)
    unknown = [name for name in given if name not in sharding.tokens]
    if unknown:
        raise KeyError(f"fill names {unknown}, which tokens does not; it names {sorted(sharding.tokens)}")
    wrong = next((name for name, value in given.items() if not isinstance(value, int | float)), None)
    if wrong is not None:
        raise TypeError(f"fill[{wrong!r}] must be a number, got {given[wrong]!r}")
    return given


def _cut_batch(
    sharding: Sharding,
    whole: Given,
    plan: BatchPlan,
    label_arg: str,
    shift_labels: bool,
    fill: Mapping[str, float],
    arrays: Mapping[Place, Arrays],
) -> tuple[ActivePlan, dict[str, Any]]:
    """(the plan to make active, the values that this rank's model is called with)."""
    batch = whole.batch
    tokens = dict(sharding.tokens) | ({SHIFTED: sharding.tokens.get(label_arg, 0)} if shift_labels else {})
    given = {name: value for name, value in batch.items() if value is not None}
    values = dict(batch) | ((shifted(batch, sharding.tokens, label_arg, whole.seams) | given) if shift_labels else {})
    labels = [name for name in tokens if is_label(name, values[name], label_arg)]
    if shift_labels:
        others = {name: values[name] for name in sharding.tokens if name not in labels}
        warn_if_shifted(batch[label_arg], label_arg, others, tokens[label_arg])
    indices = plan.local_indices(sharding.rank)
    _check_labels(plan, {name: values[name] for name in labels}, tokens, label_arg if shift_labels else "")
    spares = _spares(sharding, plan, {name: values[name] for name in tokens if name not in labels}, tokens)
    for name, dim in tokens.items():
        values[name] = cut_tokens(values[name], dim, indices, fill.get(name, IGNORE_INDEX if name in labels else 0))
    counted = (COUNT,) if shift_labels else ()
    values |= _moved(sharding, values, (*tokens, *packing_args(sharding.packing), *counted))
    masks, stand_ins = replace_masks(sharding, plan, batch)
    values |= masks
    # Masks may be compared on the global batch, flex_attention's always are: it is kept while the block runs.
    counts = label_arg if shift_labels and COUNT not in given else None
    handed = Handed(sharding, plan, dict(batch), tokens, frozenset(masks), labels, fill, counts)
    active = ActivePlan(handed, values[next(iter(tokens))].device, spares=spares)
    active.arrays.update(arrays)
    if sharding.capacity is not None:
        values = fixed_values(sharding, sharding.capacity, values, masks)
        buffers = buffers_of(sharding)
        buffers.batch = handed.number
        active.spares = {name: buffers.fill(("spare", name), x, x.device) for name, x in spares.items()}
        active.refill()
        for readers in tuple(buffers.padding_readers):
            handed.check_padding(readers)
    handed.packed = PackingValues(sharding, values, torch.from_numpy(indices >= 0))
    unseen = [n for n, x in batch.items() if isinstance(x, Tensor) and x.device.type != "cpu" and n not in tokens]
    compared = [x for name, x in values.items() if isinstance(x, Tensor) and name not in unseen]
    handed.compared = {id(x): (x, version_of(x)) for x in compared}
    for tensor in (*stand_ins, *(values[name] for name in tokens)):
        number_tokens(tensor, handed.number)
    for name, dim in tokens.items():
        mark_token_dim(values[name], dim)
        values[name] = as_row(values[name], (dim,), traced_tokens(sharding, plan))
    return active, values


def _check_labels(plan: BatchPlan, labels: Mapping[str, Tensor], tokens: Mapping[str, int], shifted_from: str) -> None:
    """Raise where labels can't say of fill and of padding that they are no targets."""
    padding = padding_tokens(plan)
    for name, values in labels.items():
        if plan.fill:  # some rank has such rows, and all raise
            check_fill(name, values)
        if padding is not None:
            check_labels(name, values, tokens[name], padding, shifted_from if name == SHIFTED else "")


def _spares(
    sharding: Sharding, plan: BatchPlan, batch: Mapping[str, Tensor], tokens: Mapping[str, int]
) -> dict[str, Tensor]:
    """Argument -> the row of which this rank's fill is a copy where it has no row to copy itself. Nothing where
    it has, in this batch and in others that replay its step."""
    if sharding.capacity is None and not (plan.fill and (plan.copied_rows(sharding.rank) == plan.local_size).any()):
        return {}
    last = plan.filled_indices(sharding.rank)[:, -1:]
    spares = {name: cut_tokens(value.detach(), tokens[name], last, 0) for name, value in batch.items()}
    return spares | _moved(sharding, spares, tuple(spares))


def _moved(sharding: Sharding, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """The named values that are tensors on the CPU, moved to the mesh's device; none where that is the CPU."""
    device = device_of(sharding)
    tensors = {name: values[name] for name in names if isinstance(values.get(name), Tensor)}
    return {name: to_device(x, device) for name, x in tensors.items() if x.device.type == "cpu" != device.type}


def given_to_all(sharding: Sharding, batch: Mapping[str, Any], lengths: Any = None) -> Given:
    """The batch of the whole group: what each rank was given, or the rows of all, joined."""
    if sharding.rows == "same":
        return Given(batch)
    wrong = None
    if lengths is not None:
        wrong = ValueError("lengths are for packing arguments on a GPU, and rows='own' travel from host to host")
    joined = join_rows(sharding, batch, error=wrong)
    if joined is None:
        raise ValueError("no rank of the group has rows")
    return joined


def plan_of(
    sharding: Sharding,
    given: Given,
    site: SiteKind | None,
    lengths: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> BatchPlan:
    """The plan of a global batch: its shapes are checked, its documents read on the host, and laid out.

    Args and errors as of `shard`; site: what it is planned for.
    """
    rows, total = shape_of(sharding, given.batch)
    if total > MAX_TOKENS:
        raise ValueError(f"a row may hold up to {MAX_TOKENS} tokens, the batch's have {total}: use shorter rows")
    documents = documents_of(sharding, given.batch, rows, total, lengths, given.seams)
    plan = plan_batch(
        documents,
        sharding.world_size,
        sharding.layout,
        sharding.balanced_mask,
        sharding.layout_options(site),
        given.seams,
    )
    check_seams(sharding, plan)
    return plan
