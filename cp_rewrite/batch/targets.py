"""How many targets a batch has, as the model's loss counts them.

labels          4  7  2 -100 9      5 of which 4 are targets; a masked language model's loss reads these
shift_labels    7  2 -100 9 -100    3 targets; a causal language model's reads these
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from .active import ActivePlan
from .padding import IGNORE_INDEX

COUNT, SHIFTED = "num_items_in_batch", "shift_labels"


def count_targets(labels: Tensor) -> Tensor:
    """() int64"""
    return (labels != IGNORE_INDEX).sum()


def with_true_count(
    plan: ActivePlan, places: Mapping[str, int], moved: Collection[str], args: Sequence[Any]
) -> Sequence[Any]:
    """A graph's arguments, with the count that `shard` made for shifted labels mended where the graph reads others.

    Args:
        plan: of the batch in flight. places: name -> place of the arguments that the graph's results depend on. moved:
            names of those whose tokens the graph shifts itself.
    Raises:
        ValueError: the graph reads labels both shifted and not, and has one count for both; or the count may not be
            replaced, because a CUDA graph reads it at its address.
    """
    name = plan.counted
    if name is None or COUNT not in places or name not in places:
        return args
    labels, dim = plan.batch[name], plan.sharding.tokens[name]
    count = count_targets(labels)
    if SHIFTED in places or name in moved or plan.sharding.capacity is not None:
        if count == count_targets(labels.narrow(dim, 1, labels.shape[dim] - 1)):
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
