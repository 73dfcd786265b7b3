"""A batch that was planned ahead of time is, where it is cut, the one that was planned: nobody filled its tensors anew.

thread    takes batch 1: version 0, plan 1     takes batch 2: the same tensors, version 1
main                                                                                         cuts 1: version 1, raises
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cp_rewrite.batch import agree
from cp_rewrite.batch.active.marks import version_of

Marks = Mapping[str, tuple[int, int, str]]
"""Argument -> how often its tensor was written, where it lies, and a hash of a sample of it: torch counts no writes
through numpy or another process, as into a buffer that `torch.from_numpy` wraps."""


def marks_of(batch: Mapping[str, Any]) -> Marks:
    """Of the tensors of a batch as they are now."""
    tensors = {name: x for name, x in batch.items() if type(x) is Tensor}
    return {name: (version_of(x), x.data_ptr(), agree.fingerprint(x)) for name, x in tensors.items()}


def check_unchanged(batch: Mapping[str, Any], marks: Marks) -> None:
    """Raise a RuntimeError where tensors are not as they were when the marks were taken."""
    if changed := [name for name, mark in marks_of(batch).items() if name in marks and marks[name] != mark]:
        raise RuntimeError(
            f"{', '.join(changed)}: written to after this batch was taken from the loader and planned, so its plan is "
            "of other documents. batches() takes batches ahead: the loader must not fill the same tensors again, nor "
            "the loop write to a batch. Let the loader give new tensors ({name: x.clone() for name, x in "
            "batch.items()}), or write `with sharding.shard(batch)` in a loop of your own"
        )
