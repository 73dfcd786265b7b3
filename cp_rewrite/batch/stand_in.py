"""A wide result that a step left out of its memory: a tensor without memory, made at the first access."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_KEEP = "cp_rewrite.Sharding(keep_outputs=True)"
_DESCRIBES: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad", "itemsize",
        "nbytes", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "output_nr", "_version", "_base",
    )
) | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.get_device, Tensor.is_inference, Tensor.register_hook, Tensor.__len__, Tensor.__hash__,
}  # fmt: skip
"""Attributes and methods that need no numbers."""
_told: list[bool] = []


class StandIn(Tensor):
    """An output beside the loss that nobody may read, as logits: of its shape, dtype and device.

    Anything that asks for its numbers gets those of `value()`. They have no way back: a backward that comes to them
    raises.
    """

    _make: Callable[[], Tensor] | None
    _value: Tensor | None

    @staticmethod
    @torch.compiler.disable
    def of(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device, trained: bool, make: Callable[[], Tensor]
    ) -> StandIn:
        """The stand-in for what `make` gives. trained: gradients reach it."""

        def without_memory() -> StandIn:
            found: Any = Tensor._make_wrapper_subclass(StandIn, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
            found._make, found._value = make, None
            return found

        return _no_way_back(without_memory) if trained and torch.is_grad_enabled() else without_memory()

    @torch.compiler.disable
    def value(self) -> Tensor:
        """The numbers, computed once.

        Raises:
            RuntimeError: the weights that they are computed with are not there any more.
        """
        if self._value is None:
            assert self._make is not None, "a stand-in has its value or what makes it"
            _tell_once(self)
            # Whoever reads it first, without gradients or under autocast, may hand it to one who reads it otherwise.
            with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
                with torch.no_grad():
                    found = self._make()
                    made = found.new_empty(0).set_(found)  # no view, so that it can be written to
                with torch.enable_grad():
                    self._value = _no_way_back(lambda: made) if self.requires_grad else made
            marks = {name: mark for name, mark in vars(self).items() if name not in ("_make", "_value")}
            vars(self._value).update(marks)
            self._make = None
        return self._value

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_with_values(args), **_with_values(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_with_values(args), **_with_values(kwargs or {}))


def _with_values(tree: Any) -> Any:
    return tree_map_only(StandIn, StandIn.value, tree)


def _tell_once(left_out: StandIn) -> None:
    if not _told:
        _told.append(True)
        size = left_out.numel() * left_out.element_size() / 2**20
        warnings.warn(
            f"cp_rewrite: an output of shape {tuple(left_out.shape)} beside a loss is read: it was left out of the "
            f"step's memory, and is computed once more, {size:,.1f} MiB; {_KEEP} keeps such outputs",
            stacklevel=2,
        )


def _no_way_back(make: Callable[[], Tensor]) -> Any:
    return _NoWayBack.apply(torch.empty(0, requires_grad=True), make)


class _NoWayBack(torch.autograd.Function):
    """A tensor that needs gradients, and whose backward raises."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):  # who wraps all outputs, as DDP does, hands on that there is none
            return None, None
        raise RuntimeError(
            "cp_rewrite: a gradient came to an output that the model returned beside its loss and that was left out of "
            f"the step's memory, as Sharding(tile=…) has it: train on such outputs with {_KEEP}"
        )


def gone(why: str) -> RuntimeError:
    """The error of who reads a stand-in too late."""
    return RuntimeError(
        f"cp_rewrite: an output beside a loss was left out of the step's memory, and {why}: read it before, or keep "
        f"such outputs with {_KEEP}"
    )
