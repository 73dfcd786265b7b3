"""This rank's tokens, which `torch.compile` traces as long as the row.

    local["input_ids"]      outside of a compiled model: a (B, T_l) tensor as any other
                            traced by Dynamo: (B, T), T the row's tokens

So every decision that Python makes by sizes is the row's, as on one process: `if T > window`, a place `h[:, 40]` that a
rank does not have, a loop over chunks, a guard. What runs gets the (B, T_l) tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import compiled_by, is_of_compiler, is_of_fsdp, is_traced, leave_ones_open, mode_of

_BY_ITSELF = (
    "a tensor of the batch came into what another backend of torch.compile compiles, as a loss outside of the model, "
    "which would take it for as long as the row: give it cp_rewrite.to_local(x). A model that parallelize returned is "
    "compiled already: call it as it is"
)


_REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
"""FSDP puts a Function of its own around inputs that take gradients, to know when their backward ends. No op would see
it on a tensor of the batch, and it does without: what is left then is reduced at the end of the backward."""


class AsRow(Tensor):
    """A tensor whose token dims look as long as the row to Dynamo, and as they are to everybody else.

    Args:
        local: this rank's tensor. size: the shape that Dynamo sees. axes: the dims in which both differ.
    """

    local: Tensor
    """The tensor itself."""
    held: Tensor
    """It, without the history that its gradient takes: Dynamo makes a fake tensor of it."""
    axes: tuple[int, ...]
    row: Tensor | None
    """The fake tensor, as long as the row, that ops are given in the place of a fake `AsRow`; None of others."""

    @staticmethod
    def __new__(cls: type[AsRow], local: Tensor, size: Sequence[Any], axes: tuple[int, ...]) -> AsRow:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(size), dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.axes, made.row = local, axes, None
        made.held = local.detach() if local.requires_grad else local
        return made

    def __init__(self, local: Tensor, size: Sequence[Any], axes: tuple[int, ...]) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if compiled_by("torch"):
            raise TypeError(_BY_ITSELF)
        leave_ones_open()
        return ["held"], self.axes

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], axes: Any, outer_size: Any, outer_stride: Any) -> AsRow:
        return AsRow(inner["held"], outer_size, axes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling() or is_traced() or is_of_compiler(sys._getframe(1)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _REQUIRES_GRAD and is_of_fsdp(sys._getframe(1)):
            return False
        return _on_local(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_as_traced, args), **tree_map(_as_traced, kwargs or {}))


def traced_tokens(sharding: Sharding, plan: BatchPlan) -> int:
    """How many tokens Dynamo sees in what a rank's model is called with: those of the row. With a capacity rows of all
    lengths have one graph, that of the longest. Blocks that are compiled by themselves, and models that are given masks
    that a rank made of its own tokens, are traced on these."""
    if sharding.block_tokens or sharding.assume_mask is not None:
        return plan.local_size
    return plan.world_size * plan.local_size if sharding.capacity is not None else plan.rows[0].total


def as_row(local: Tensor, dims: Sequence[int], tokens: int) -> Tensor:
    """`local` with the look of `tokens` tokens at `dims`; itself, where it has as many."""
    if all(local.shape[dim] == tokens for dim in dims):
        return _marked_dynamic(local, dims)
    size = list(local.shape)
    for dim in dims:
        size[dim] = tokens
    return _marked_dynamic(AsRow(local, size, tuple(dims)), dims)


def _marked_dynamic(value: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        # A number made from a fixed token count would be a plain constant in the graph, and wrong on a shard unseen.
        torch._dynamo.maybe_mark_dynamic(value, dim)
    return value


def to_local(value: Any) -> Any:
    """This rank's part of a batch's tensor as a plain tensor of the same memory and gradient: for C++ extensions, for
    functions that are compiled by themselves, and for `torch.autograd.Function` outside of the model.

    Args:
        value: what `shard` gave, or an op made of it; (B, T_l, …). Anything else is given back.
    """
    return value.local if type(value) is AsRow else value


def own_of(value: Any) -> Any:
    """The same of what comes from eager code.

    Raises:
        TypeError: a torch.autograd.Function made it, which took its gradient where no op can see it.
    """
    if type(value) is AsRow:
        with torch._C.DisableTorchFunctionSubclass():
            if value.grad_fn is not None:
                raise TypeError(
                    f"{type(value.grad_fn).__name__} was applied to a tensor of the batch outside of the model, and "
                    "its gradient would be lost: call the function inside of the compiled model, or give it "
                    "cp_rewrite.to_local(x)"
                )
    return to_local(value)


def row_of(fake: AsRow) -> Tensor:
    """The fake tensor of the row's shape that stands for a fake `AsRow`: one for all its uses, which share memory."""
    if fake.row is None:
        mode = mode_of(fake.held)
        assert mode is not None
        with mode, torch.no_grad():
            fake.row = torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
    return fake.row


def _alike(given: AsRow) -> AsRow:
    """It, with the look of its tensor, which an op in place may have had take a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        if given.requires_grad != given.local.requires_grad:
            given.requires_grad_(given.local.requires_grad)
        given.held = _marked_dynamic(given.local.detach(), given.axes) if given.requires_grad else given.local
    return given


def _as_traced(value: Any) -> Any:
    if type(value) is not AsRow:
        return value
    return row_of(value) if mode_of(value.held) is not None else value.local


def _on_local(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of torch, run on this rank's tensors. What it gives keeps the look of the row where it has the tokens
    in the dims of its operand."""
    given = next((x for x in tree_leaves((args, kwargs)) if type(x) is AsRow), None)
    out = func(*tree_map(own_of, args), **tree_map(own_of, kwargs))
    if given is None or not isinstance(out, Tensor):
        return out
    if out is given.local:
        return _alike(given)
    local, axes = given.local, given.axes
    if out.ndim != local.ndim or any(out.shape[dim] != local.shape[dim] for dim in axes):
        return out
    with torch._C.DisableTorchFunctionSubclass():
        tokens = given.shape[axes[0]]
    return as_row(out, axes, tokens)
