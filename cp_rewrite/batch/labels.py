"""Labels: shifted by one token, filled, and counted as the model's loss counts them.

labels          4  7  2 -100 9      5 of which 4 are targets; a masked language model's loss reads these
shift_labels    7  2 -100 9 -100    3 targets; a causal language model's reads these
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.arguments import IGNORE_INDEX, LABELS
from cp_rewrite.batch.handed import Handed

COUNT, SHIFTED = "num_items_in_batch", "shift_labels"


def count_targets(labels: Tensor) -> Tensor:
    """() int64"""
    return (labels != IGNORE_INDEX).sum()


def with_true_count(
    handed: Handed, places: Mapping[str, int], moved: Collection[str], args: Sequence[Any]
) -> Sequence[Any]:
    """A graph's arguments, with the count that `shard` made for shifted labels mended where the graph reads others.

    Args:
        handed: the arguments of the batch in flight.
        places: name -> place of the arguments that the graph's results depend on.
        moved: names of those whose tokens the graph shifts itself.
    Raises:
        ValueError: the graph reads labels both shifted and not, and has one count for both; or the count may not be
            replaced, because a CUDA graph reads it at its address.
    """
    name = handed.counted
    if name is None or COUNT not in places or name not in places:
        return args
    count = count_targets(handed.batch[name])
    if SHIFTED in places or name in moved or handed.sharding.capacity is not None:
        if count == shifted(handed.batch, handed.sharding.tokens, name, handed.plan.seams)[COUNT]:
            return args
        also = f" and {SHIFTED!r}" if SHIFTED in places else ", which it shifts" if name in moved else ""
        raise ValueError(
            f"the model's loss reads {name!r}{also}, but shift_labels=True counted the shifted labels' targets: give "
            f"the batch {COUNT!r} as its loss divides by it, such as (batch[{name!r}] != -100).sum()"
        )
    given = args[places[COUNT]]
    mended = list(args)
    mended[places[COUNT]] = count.to(given.device, given.dtype)
    return mended


def check_shifts(handed: Handed, moved: Collection[str]) -> None:
    """Raise where a graph shifts labels itself, and so makes the first token of a row a target of the row before.

    Args:
        handed: the arguments of the batch in flight. moved: names of the arguments whose tokens the graph shifts.
    """
    for name in sorted({*moved} & {*handed.labels}) if handed.plan.seams else ():
        labels, dim = handed.batch[name], handed.tokens[name]
        if count_targets(labels.index_select(dim, torch.tensor(handed.plan.seams, device=labels.device))):
            raise ValueError(
                f"the model shifts {name!r} over the joined row of all ranks: give the first token of each row the "
                f"label {IGNORE_INDEX}, or let shard(batch, shift_labels=True) shift them, row by row"
            )


def warn_if_unshifted(handed: Handed, read: Collection[str]) -> None:
    """Warn where labels are the tokens that a causal model gets at the same places, so that it learns to copy.

    Args:
        handed: the arguments of the batch in flight. read: names of those that the graph reads, and moves nowhere.
    """
    names = [name for name in handed.tokens if name in read and isinstance(handed.batch.get(name), Tensor)]
    for label, other in itertools.product([name for name in names if name in handed.labels], names):
        labels, x = handed.batch[label], handed.batch[other]
        alike = x.shape == labels.shape and not x.is_floating_point() and {x.device.type, labels.device.type} == {"cpu"}
        if other in handed.labels or not alike or SHIFTED in read:
            continue
        dim = handed.tokens[label]
        own, here = (y.narrow(dim, 0, min(y.shape[dim], _LOOKED_AT)) for y in (labels, x))
        targets = own != IGNORE_INDEX
        if targets.sum() >= _ENOUGH and (own == here)[targets].all():
            warnings.warn(
                f"{label!r} are {other!r} at each target, and the model compares them with what it computes of the "
                f"same token: it learns to copy. Give it the next tokens: {label!r} shifted by one in the batch or by "
                "the model (logits[:, :-1], labels[:, 1:]), or shard(batch, shift_labels=True) for models of "
                "transformers",
                stacklevel=2,
            )
            return


def is_label(name: str, value: Tensor, label_arg: str) -> bool:
    """True if -100 in this argument says that a token is no target: rows without a token hold it."""
    return name in LABELS | {label_arg} and not value.is_floating_point()


def check_fill(name: str, labels: Tensor) -> None:
    """Raise where the dtype of labels can't hold what rows without a token hold."""
    if not labels.dtype.is_signed:
        raise TypeError(
            f"batch[{name!r}] is {labels.dtype}, which can't hold {IGNORE_INDEX}, the label of tokens that are no "
            "target: make it int64"
        )


_LOOKED_AT, _ENOUGH = 4096, 8
"""Tokens at the front of a row that are looked at, and targets among them that say something."""


def warn_if_shifted(labels: Tensor, name: str, tokens: Mapping[str, Tensor], dim: int) -> None:
    """Warn where labels that are to be shifted hold the next token already.

    Args:
        labels: whole numbers, T tokens at `dim`. tokens: other arguments of that shape, by name.
    """
    size = min(labels.shape[dim], _LOOKED_AT) - 1
    if labels.device.type != "cpu" or size < _ENOUGH:
        return
    own, targets = labels.narrow(dim, 0, size), labels.narrow(dim, 0, size) != IGNORE_INDEX
    for other, x in tokens.items():
        if x.shape != labels.shape or x.is_floating_point() or x.device.type != "cpu":
            continue
        is_next = (own == x.narrow(dim, 1, size))[targets]
        if len(is_next) >= _ENOUGH and is_next.all() and not (own == x.narrow(dim, 0, size))[targets].all():
            warnings.warn(
                f"shift_labels=True shifts {name!r}, which hold the next token of {other!r} already: shifted twice, "
                "they train the model on the one after it. Leave shift_labels out, or give labels as tokens are",
                stacklevel=6,
            )
            return


def shifted(
    batch: Mapping[str, Any], tokens: Mapping[str, int], label_arg: str, seams: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Labels one token further to the front, within each of the rows that begin at `seams`, and how many of them are
    targets."""
    if label_arg not in tokens:
        raise ValueError(
            f"{label_arg!r} are to be shifted, by shift_labels=True or by a trainer, and Sharding's tokens do not name "
            f"them: add {label_arg!r}: 1 to these, or shard(…, label_arg=…) where they have another name. Models "
            "that shift labels themselves, or take targets, need no shift_labels=True"
        )
    if batch.get(SHIFTED) is not None:
        raise ValueError("the batch has 'shift_labels' already: leave out shift_labels=True, or that argument")
    check_fill(label_arg, batch[label_arg])
    labels, dim = batch[label_arg], tokens[label_arg]
    last = torch.full_like(labels.narrow(dim, 0, 1), IGNORE_INDEX)
    shifted = torch.cat([labels.narrow(dim, 1, labels.shape[dim] - 1), last], dim)
    if seams:
        shifted.index_fill_(dim, torch.tensor(seams, device=shifted.device) - 1, IGNORE_INDEX)
    return {SHIFTED: shifted, COUNT: count_targets(shifted)}
