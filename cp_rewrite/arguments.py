"""Checks of what callers pass: one error, which names the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np  # late: `python -m cp_rewrite --version` answers without it
    from numpy.typing import ArrayLike, NDArray

IGNORE_INDEX = -100
"""Label of a token that is no target (torch's cross_entropy default)."""
LABELS = frozenset({"labels", "shift_labels"})
"""Arguments of whole numbers that hold IGNORE_INDEX in rows without a token."""


class HashableDict(dict[str, Any]):
    """A hashable, ordered mapping: an annotation is part of a compile cache's key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items(), key=lambda item: item[0])))


def flag(name: str, value: Any) -> bool:
    """`value`, if it is True or False; a TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int.

    Raises:
        TypeError: it is no whole number. ValueError: it is below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return int(value)


def whole_numbers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """`values`, (N,) or (1, N), as (N,) int64.

    Raises:
        TypeError: something else than whole numbers. ValueError: another shape.
    """
    import numpy as np  # late, as above

    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iub":
        raise TypeError(f"{name} must be whole numbers, got {array.dtype} {str(values)[:80]}")
    if not array.ndim or array.size != array.shape[-1]:
        raise ValueError(f"{name} must be a list of numbers, got shape {array.shape}")
    return array.astype(np.int64).reshape(-1)


def checked_dims(field_name: str, dims: Any) -> HashableDict:
    """A mapping of argument names to dims counted from the front."""
    if not isinstance(dims, Mapping) or not dims:
        raise TypeError(
            f"{field_name} must map argument names to their token dim, as in {{'input_ids': 1}}, got {dims!r}"
        )
    bad = [name for name in dims if not isinstance(name, str)]
    if bad:
        raise TypeError(f"{field_name} must map names of arguments, got {bad[0]!r} for one")
    front = "a dim counted from the front,"
    return HashableDict({name: whole_number(f"{field_name}[{name!r}], {front}", dims[name], 0) for name in dims})


def named_values(name: str, values: Any) -> Mapping[str, Any]:
    """`values`, if it maps names to values; a TypeError otherwise."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must map names of arguments to values, got {type(values).__name__}")
    return values  # pyright: ignore[reportUnknownVariableType]


def checked_ops(ops: Any) -> tuple[str, ...]:
    """Names of ops, `namespace::name`."""
    if isinstance(ops, str) or not isinstance(ops, Sequence):
        raise TypeError(f"local_ops must be a tuple of names of ops, as in ('my::op',), got {ops!r}")
    bad = [op for op in ops if not isinstance(op, str) or "::" not in op]
    if bad:
        raise ValueError(f"local_ops must hold names such as 'my::op', got {bad[0]!r}")
    return tuple(ops)
