"""The arguments that tell documents apart, as `shard` was given them: a call must bring the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.packing import EndOfDocument, PaddingMask, PositionIds, StartOfDocument, packing_args
from cp_rewrite.sharding import Sharding

from .take_tokens import beside


def packing_names(sharding: Sharding) -> tuple[str, ...]:
    """The arguments of which the plan of a batch is made."""
    return (*packing_args(sharding.packing), *([] if sharding.spans is None else [sharding.spans.arg]))


class PackingValues:
    """Those of one batch, as a rank's model gets them, in memory of their own."""

    def __init__(self, sharding: Sharding, values: Mapping[str, Any], has_token_BT: Tensor) -> None:
        given = [name for name in packing_names(sharding) if isinstance(values.get(name), Tensor)]
        self._values: dict[str, Tensor] = {name: values[name].clone() for name in given}
        self._sharding, self._has_token = sharding, has_token_BT

    def check(self, name: str, value: Tensor, of: str | None = None) -> None:
        """Raise unless a call's argument says what argument `of` of the batch, by default `name`, said of documents.
        On a GPU, which the host does not wait for, an assertion there.

        Raises:
            ValueError: it names the argument.
        """
        of = of or name
        given = self._values.get(of)
        if given is None:  # documents were read from `lengths`, and the batch lacks it
            return
        wrong = (
            f"{name} of this call are not those of the batch: its documents were read from batch[{of!r}]. Call the "
            f"model with local[{of!r}] as it is, and change documents before `shard`"
        )
        if value.shape != given.shape:
            raise ValueError(f"{wrong} (their shape is {tuple(given.shape)}, that of the call's {tuple(value.shape)})")
        given = given.to(value.device, non_blocking=True)
        same = self._read(of, value) == self._read(of, given)
        dim = self._sharding.tokens.get(of)
        if dim is not None:
            has_token = self._has_token.to(value.device, non_blocking=True)
            same = same | ~beside(has_token, same, min(dim, same.ndim - 1))
        if value.is_cuda:
            torch._assert_async(same.all(), wrong)
        elif not same.all():
            raise ValueError(wrong)

    def _read(self, name: str, value: Tensor) -> Tensor:
        """What of an argument tells documents apart."""
        packing = self._sharding.packing
        if name not in packing_args(packing):
            return value
        if isinstance(packing, EndOfDocument | StartOfDocument):
            return value == packing.token_id
        if isinstance(packing, PositionIds):
            for _ in range(self._sharding.tokens[name] - 1):  # planes, of which the first is text's
                value = value[0]
        return value != 0 if isinstance(packing, PaddingMask) else value
