"""The arguments of a batch as `shard` hands them over, and what a call of the model must bring of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.arguments import IGNORE_INDEX
from cp_rewrite.ops.local_rows import beside
from cp_rewrite.packing import EndOfDocument, PaddingMask, PositionIds, StartOfDocument, packing_args
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding

from .buffers import buffers_of
from .marks import batch_number, version_of
from .masks import MaskArgument, mask_argument
from .padding import PaddingReaders


def packing_names(sharding: Sharding) -> tuple[str, ...]:
    """The arguments of which the plan of a batch is made."""
    return (*packing_args(sharding.packing), *([] if sharding.spans is None else [sharding.spans.arg]))


class PackingValues:
    """The packing arguments of one batch, as a rank's model gets them, in memory of their own."""

    def __init__(self, sharding: Sharding, values: Mapping[str, Any], has_token_BT: Tensor) -> None:
        given = [name for name in packing_names(sharding) if isinstance(values.get(name), Tensor)]
        self._values: dict[str, Tensor] = {name: values[name].clone() for name in given}
        self._sharding, self._has_token = sharding, has_token_BT

    def check(self, name: str, value: Tensor, of: str) -> None:
        """Raise unless a call's argument says what argument `of` of the batch said of documents. On a GPU, which
        the host does not wait for, an assertion there.

        Raises:
            ValueError: it names the argument.
        """
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
        """The part of an argument that tells documents apart."""
        packing = self._sharding.packing
        if name not in packing_args(packing):
            return value
        if isinstance(packing, EndOfDocument | StartOfDocument):
            return value == packing.token_id
        if isinstance(packing, PositionIds):
            for _ in range(self._sharding.tokens[name] - 1):  # planes, of which the first is text's
                value = value[0]
        return value != 0 if isinstance(packing, PaddingMask) else value


@dataclass(eq=False)
class Handed:
    """One batch's arguments. Checks raise one error that names the argument, on the rank whose call is wrong.

    Args:
        batch: the global batch, for masks that are compared on it; empty once the batch's block has ended.
        tokens: the token dim of each argument that was cut, of those that `shard` made too.
        masks: the arguments that are masks of whole rows.
        labels: the arguments in which IGNORE_INDEX says that a token is no target.
        fill: by argument, what it holds in rows without a token, where the caller said so.
        counted: the argument whose targets were counted, once shifted, for `num_items_in_batch`; None: they were not.
        packed: the arguments that documents were read from.
        compared: by `id`, the tensors that `shard` handed over and that all ranks have compared, and their versions
            then.
        number: the batch's number in this process.
    """

    sharding: Sharding
    plan: BatchPlan
    batch: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    masks: Collection[str] = ()
    labels: Collection[str] = ()
    fill: Mapping[str, float] = field(default_factory=dict[str, float])
    counted: str | None = None
    packed: PackingValues | None = None
    compared: Mapping[int, tuple[Tensor, int]] = field(default_factory=dict[int, tuple[Tensor, int]])
    number: int = field(default_factory=itertools.count().__next__)

    def check_tokens(self, name: str, value: Tensor, dim: int, size: int) -> None:
        """Raise unless a call's argument, of `size` tokens at `dim`, can be this rank's part of this batch."""
        number = batch_number(value)
        if size == self.plan.local_size and number in (None, self.number):
            return
        found = "is of another batch" if size == self.plan.local_size else f"has {size} tokens at dim {dim}"
        raise ValueError(
            f"{name} {found}, but the model is called inside a batch whose parts have {self.plan.local_size} tokens a "
            "rank: call it with what `with sharding.shard(batch) as local:` gives, model(**local)"
        )

    def check_mask(self, argument: MaskArgument, value: Any) -> None:
        """Raise unless a call's mask is what `shard` put in the place of this batch's."""
        found = mask_argument(value)
        if found != argument or batch_number(value) != self.number:
            raise ValueError(
                f"the model was compiled for {argument}, and is called with {found or 'another tensor'}, or another "
                "batch's: call it with what `with sharding.shard(batch) as local:` gives, model(**local)"
            )

    def check_packing(self, name: str, value: Tensor, of: str) -> None:
        """Raise unless an argument of a call says of documents what argument `of` of the batch did."""
        # Writes by other ways than torch's ops leave the version as it is; the host sees them at no cost.
        if self.packed is not None and not (value.is_cuda and name == of and self.is_unchanged(of, value)):
            self.packed.check(name, value, of)

    def check_full(self, sums: Sequence[str]) -> None:
        """Raise where a rank has rows without a token while the model sums over rows whatever they hold."""
        if self.plan.fill:
            raise ValueError(
                f"{sums[0]} sums over tokens, and the {self.plan.fill} rows that fill up this batch's ranks would be "
                f"counted: pad rows to a multiple of {self.sharding.world_size * self.sharding.pad_to_multiple} "
                "tokens, or mask the sum"
            )

    def check_padding(self, readers: PaddingReaders) -> None:
        """Raise where a line of the model reads this batch's tokens of no document."""
        if self.sharding.capacity is not None:
            buffers_of(self.sharding).padding_readers.add(readers)  # a step that is replayed checks nothing
        readers.check(self.sharding, self.plan, self.batch)

    def check_unread(self, read: Collection[str]) -> None:
        """Raise where a batch has whole numbers per token that a model without a loss does not read, and nobody said
        what they hold in rows without a token: 0 would be a class to a loss outside."""
        if not self.plan.fill and self.sharding.capacity is None:
            return
        known = {*read, *self.labels, *self.fill, *packing_names(self.sharding)}
        for name in self.tokens:
            given: Any = self.batch.get(name)
            whole = given is not None and not given.is_floating_point() and given.dtype != torch.bool
            if whole and name not in known:
                raise ValueError(
                    f"batch[{name!r}] holds whole numbers, which the model does not read, and rows that fill up a rank "
                    f"hold 0 in it: a class, to a loss of what the model returns. Say what they are to hold: "
                    f"shard(batch, fill={{{name!r}: {IGNORE_INDEX}}}) for targets, {{{name!r}: 0}} where 0 counts "
                    "nothing, as in a mask"
                )

    def is_unchanged(self, name: str, value: Any) -> bool:
        """True if a call's argument is what all ranks compared in `shard`, and was not written to since."""
        if not isinstance(value, Tensor):
            given = self.batch.get(name)
            return isinstance(given, int | float) and given == value
        known = self.compared.get(id(value))
        return known is not None and known[1] == version_of(value) != -1
