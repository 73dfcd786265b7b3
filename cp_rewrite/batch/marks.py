"""Facts about tensors that their values don't tell: the dims of their tokens, the batch they are of, if they are parts
of sums, if they were written since.

`mark_…` and `number_tokens` store them as attributes of the tensor; `marks_of` are taken of a batch as it is now, for
`check_unchanged`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cp_rewrite.agree import turns
from cp_rewrite.batch.as_row import to_local

TokenAxes = tuple[tuple[str | int, ...] | None, ...]
"""For each dim the factors of its size, major first: "T" tokens, "B" rows of the batch, a number, -1 for one that is
not known; None: the dim counts neither tokens nor rows."""


def mark_token_dim(value: Tensor, dim: int) -> None:
    """Note which dim of a tensor counts this rank's tokens, and that its rows are in this rank's order."""
    to_local(value)._cp_rewrite_token_dim = dim  # type: ignore[attr-defined]


def token_dim_of(value: Tensor) -> int | None:
    """The dim that `mark_token_dim` noted; None: of none."""
    return getattr(to_local(value), "_cp_rewrite_token_dim", None)


def mark_token_axes(value: Tensor, axes: TokenAxes) -> None:
    """Note where a tensor's tokens are, where it has none of the dims that `mark_token_dim` notes."""
    to_local(value)._cp_rewrite_token_axes = axes  # type: ignore[attr-defined]


def token_axes_of(value: Tensor) -> TokenAxes | None:
    """The axes that `mark_token_axes` noted; None: of none."""
    return getattr(to_local(value), "_cp_rewrite_token_axes", None)


def mark_part(value: Tensor, part: bool = True) -> None:
    """Note whether a tensor is this rank's part of a sum over the group, or what all ranks have."""
    to_local(value)._cp_rewrite_part = part  # type: ignore[attr-defined]


def is_part(value: Tensor) -> bool:
    """True if `mark_part` noted that it is."""
    return known_part(value) is True


def known_part(value: Tensor) -> bool | None:
    """The answer that `mark_part` noted; None: it noted nothing. Ops lose it."""
    return getattr(to_local(value), "_cp_rewrite_part", None)


def number_tokens(value: Tensor, number: int) -> None:
    """Mark a tensor of a rank's part with its batch. Ops lose the mark: it shows on what is handed over as it is."""
    to_local(value)._cp_rewrite_batch = number  # type: ignore[attr-defined]


def version_of(value: Tensor) -> int:
    """How often a tensor was written to; -1: torch does not count."""
    return -1 if value.is_inference() else value._version


def batch_number(value: Tensor) -> int | None:
    """The batch that a tensor was cut from; None: unknown."""
    return getattr(to_local(value), "_cp_rewrite_batch", None)


Marks = Mapping[str, tuple[int, int, str]]
"""Argument -> how often its tensor was written, where it lies, and a hash of a sample of it: torch counts no writes
through numpy or another process, as into a buffer that `torch.from_numpy` wraps."""


def marks_of(batch: Mapping[str, Any]) -> Marks:
    """Marks of the tensors of a batch as they are now."""
    tensors = {name: x for name, x in batch.items() if type(x) is Tensor}
    return {name: (version_of(x), x.data_ptr(), turns.fingerprint(x)) for name, x in tensors.items()}


def check_unchanged(batch: Mapping[str, Any], marks: Marks) -> None:
    """Raise a RuntimeError where tensors are not as they were when the marks were taken: a batch that was planned ahead
    of time is, where it is cut, the one that was planned.

        thread    takes batch 1: version 0, plan 1     takes batch 2: the same tensors, version 1
        main                                                                           cuts 1: version 1, raises
    """
    if changed := [name for name, mark in marks_of(batch).items() if name in marks and marks[name] != mark]:
        raise RuntimeError(
            f"{', '.join(changed)}: written to after this batch was taken from the loader and planned, so its plan is "
            "of other documents. batches() takes batches ahead: the loader must not fill the same tensors again, nor "
            "the loop write to a batch. Let the loader give new tensors ({name: x.clone() for name, x in "
            "batch.items()}), or write `with sharding.shard(batch)` in a loop of your own"
        )
