"""Gates between an expert's two products, row by row, and the weight of each row's choice: forward and gradients.

    first (M, G) ── gate ── (M, F) ── times weight (M, 1) ── to the second product

A gate is a function of torch, of which ranks know the name. On GPUs it is traced with its gradients and compiled, once
for each dtype, so that each row is read once; elsewhere, and where it does not compile, it runs as it is written.

Shapes: M rows, G columns that the gate takes, F that it gives.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Gate = Callable[[Tensor], Tensor]
"""(M, G) -> (M, F), each row by itself; what it is given it leaves as it is."""


def halves(activation: Gate) -> Gate:
    """The gate that multiplies what an activation gives of the first half of columns by the second half."""

    def gate(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, -1)
        return activation(first) * second

    return gate


GATES: dict[str, Gate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda rows: F.relu(rows).square(),
    "swiglu": halves(F.silu),
    "geglu": halves(F.gelu),
}
"""Names that all ranks know -> gates. The last two halve their rows."""
_vjp: Any = torch.func.vjp


def weighed(gate: str, first: Tensor, weight: Tensor) -> Tensor:
    """(M, F): what a gate gives of `first`, each row times its weight (M, 1), in the dtype of `first`."""
    return _run(_weighed, gate, first, weight)[0]


def gradients(gate: str, first: Tensor, weight: Tensor, grad: Tensor) -> Sequence[Tensor]:
    """`weighed` once more, and the gradients of `first` and of each row's weight (M, 1), of that of the result."""
    return _run(_gradients, gate, first, weight, grad)


def _weighed(gate: Gate, first: Tensor, weight: Tensor) -> tuple[Tensor]:
    return ((gate(first) * weight).to(first.dtype),)


def _gradients(gate: Gate, first: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inner, pull = _vjp(gate, first)
    (dfirst,) = pull((grad * weight).to(inner.dtype))
    dweight = (grad.to(weight.dtype) * inner).sum(1, keepdim=True)
    return (inner * weight).to(first.dtype), dfirst, dweight


def _run(function: Callable[..., Sequence[Tensor]], gate: str, *rows: Tensor) -> Sequence[Tensor]:
    key = function, gate, *((x.dtype, x.shape[1]) for x in rows)
    if not rows[0].is_cuda or key in _UNCOMPILED or not rows[0].shape[0]:
        return function(GATES[gate], *rows)
    try:
        return run_compiled(function, gate, *rows)
    except Exception as error:
        _UNCOMPILED.add(key)
        first_line = str(error).partition("\n")[0]
        warnings.warn(f"cp_rewrite: the gate {gate} of experts is not compiled: {first_line}", stacklevel=2)
        return function(GATES[gate], *rows)


_UNCOMPILED: set[Any] = set()
"""Calls that do not compile, by function, gate and kinds of rows."""


def run_compiled(function: Callable[..., Sequence[Tensor]], gate: str, *rows: Tensor) -> Sequence[Tensor]:
    """`function` of a gate and of rows, which differ in number from call to call."""
    for x in rows:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    with torch.no_grad():
        return _compiled(function, gate, *((x.dtype, x.shape[1], x.device) for x in rows))(*rows)


@functools.cache
def _compiled(function: Callable[..., Sequence[Tensor]], gate: str, *kinds: tuple[Any, int, Any]) -> Any:
    sample = [torch.ones(6, columns, dtype=dtype, device=device) for dtype, columns, device in kinds]
    graph: Any = make_fx(functools.partial(function, GATES[gate]), tracing_mode="symbolic")(*sample)
    again = fx.GraphModule(graph, graph.graph)  # Dynamo skips code that was made while it traced
    return torch.compile(again, fullgraph=True)
