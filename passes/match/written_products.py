"""The two products of attention that is written out, and the form of what they multiply.

    matmul(q, kᵀ), matmul(w, v), einsum    of (B, H, T, D), or with tokens before heads
    bmm, baddbmm, matmul, einsum           of (N, T, D): heads merged with rows, heads of one row, or one head

Heads that a view merged with rows of the batch, (B, H, T, D) to (B · H, T, D), are read before it, and the output
behind the view that parts them again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import bind, constant, needs_gradient, op_name, shape_of
from cp_rewrite.passes.graph.writes import writers_between
from cp_rewrite.torch_internals import expression

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COPIES = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"})
_VIEWS = frozenset({"view", "reshape", "flatten", "unflatten"})
_PRODUCTS = frozenset({"matmul", "einsum", "bmm", "baddbmm"})
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
SCORES = {
    "BHTD": re.compile(r"(\w)(\w)(\w)(\w),\1\2(\w)\4->\1\2\3\5"),
    "BTHD": re.compile(r"(\w)(\w)(\w)(\w),\1(\w)\3\4->\1\3\2\5"),
    "NTD": re.compile(r"(\w)(\w)(\w),\1(\w)\3->\1\2\4"),
}
OUTPUT = {
    "BHTD": re.compile(r"(\w)(\w)(\w)(\w),\1\2\4(\w)->\1\2\3\5"),
    "BTHD": re.compile(r"(\w)(\w)(\w)(\w),\1\4\2(\w)->\1\3\2\5"),
    "NTD": re.compile(r"(\w)(\w)(\w),\1\3(\w)->\1\2\4"),
}
"""Equations of the products, by the form of queries, keys and values."""


class Differs(Exception):
    """The graph has something else where a part of attention was looked for."""

    def __init__(self, node: fx.Node, detail: str) -> None:
        super().__init__(detail)
        self.node, self.detail = node, detail


@dataclass(frozen=True)
class Product:
    """One product: its operands, the form that they have, and a number that it is multiplied by."""

    left: fx.Node
    right: fx.Node
    form: str
    factor: float = 1.0


def is_product(node: Any) -> bool:
    return op_name(node) in _PRODUCTS


def product_of(node: fx.Node, equations: Mapping[str, re.Pattern[str]]) -> Product:
    """A matmul of four or three dims, or an einsum that says the same."""
    operands, factor = list(node.args), 1.0
    form = "BHTD" if len(shape_of(node) or ()) == 4 else "NTD"
    if op_name(node) == "einsum":
        text = str(operands.pop(0)).replace(" ", "")
        matches = {form: match for form, known in equations.items() if (match := known.fullmatch(text))}
        form = next((form for form, match in matches.items() if len({*match.groups()}) == match.re.groups), "")
        if not form:
            raise Differs(node, f"einsum {text!r} is no product over one head's queries and keys")
    elif op_name(node) == "baddbmm":
        given = bind(node, ("input", "batch1", "batch2"), beta=1.0, alpha=1.0)
        added, operands, alpha = given["input"], [given["batch1"], given["batch2"]], constant(given["alpha"])
        if constant(given["beta"]) != 0 and op_name(added) not in _ZEROS:
            raise Differs(node, "what baddbmm adds to q @ kᵀ is not made of zeros: a bias as of ALiBi is not read")
        factor = 0.0 if alpha is None else alpha
    if len(operands) != 2 or (node.kwargs and op_name(node) != "baddbmm"):
        raise Differs(node, f"{node.name} is no product of two tensors")
    left, right = operands
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        raise Differs(node, f"{node.name} is no product of two tensors")
    return Product(left, right, form, factor)


def untransposed(node: fx.Node) -> fx.Node:
    """k, of a node that is kᵀ."""
    name, dims, rank = op_name(node), node.args[1:], len(shape_of(node) or ())
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    if name in ("transpose", "swapaxes", "swapdims"):
        known = len(dims) == 2 and {int(str(d)) % rank for d in dims} == {rank - 2, rank - 1}
    elif name == "permute":
        known = dims in (swapped, (swapped,), ([*swapped],))
    else:
        known = name == "mT" or (name == "getattr" and dims == ("mT",))  # an op of its own in newer torch
    if not known or not isinstance(node.args[0], fx.Node):
        raise Differs(node, "write the keys' transpose as k.transpose(-2, -1)")
    return node.args[0]


def common_form(
    operands: Sequence[fx.Node], output: fx.Node, forms: set[str], rows: Any
) -> tuple[list[fx.Node], fx.Node, str]:
    """(queries, keys and values, the output, their one form).

    Args:
        forms: of the products. rows: of the batch.
    Raises:
        Differs: they have none.
    """
    if len(forms) == 1 and "NTD" not in forms:
        return [*operands], output, forms.pop()
    if "BTHD" not in forms:
        parted = [x if len(shape_of(x) or ()) == 4 else _before_merge(x, output) for x in operands]
        whole = output if len(shape_of(output) or ()) == 4 else _behind_merge(output)
        found = [x for x in parted if x is not None]
        if whole is not None and len(found) == len(parted) and _heads_of(found[0]) == _heads_of(whole):
            return found, whole, "BHTD"
    if forms != {"NTD"}:
        raise Differs(output, "queries and keys have their tokens in another dim than values and the output")
    if expression(rows) == 1:
        return [*operands], output, "HTD"
    if any(expression((shape_of(x) or (0,))[0]) != expression(rows) for x in operands):
        raise Differs(
            output, "heads are merged with the rows of the batch: view (B, H, T, D) as (B * H, T, D), and back"
        )
    return [*operands], output, "BTD"


def _before_merge(node: fx.Node, output: fx.Node) -> fx.Node | None:
    """x of (B, H, T, D), of a node that is x viewed as (B · H, T, D)."""
    shape, source = shape_of(node) or (), node
    while op_name(source) in _VIEWS | {"contiguous"} and isinstance(source.args[0], fx.Node):
        source = source.args[0]
        merged = _merged(shape_of(source))
        if merged is not None and merged == [*map(expression, shape)]:
            alike = needs_gradient(source) == needs_gradient(node) and not writers_between((source,), source, output)
            return source if alike else None
    return None


def _behind_merge(node: fx.Node) -> fx.Node | None:
    """The only reader of a node of (B · H, T, D), where it views it as (B, H, T, D)."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    merged = _merged(shape_of(reader)) if op_name(reader) in _VIEWS else None
    return reader if merged is not None and merged == [*map(expression, shape_of(node) or ())] else None


def _merged(shape: Sequence[Any] | None) -> list[Any] | None:
    """(B · H, T, D) of (B, H, T, D)."""
    if shape is None or len(shape) != 4:
        return None
    return [expression(shape[0] * shape[1]), *map(expression, shape[2:])]


def _heads_of(node: fx.Node) -> list[Any]:
    return [*map(expression, (shape_of(node) or ())[:2])]


def keeps_pairs(node: Any) -> bool:
    """Whether a node is logits or weights (…, T, T), of which only the dims before are viewed otherwise."""
    source = node.args[0] if op_name(node) in _VIEWS else None
    shapes = shape_of(source), shape_of(node)
    if None in shapes or not all(3 <= len(shape or ()) <= 4 for shape in shapes):
        return False
    before, after = ([*map(expression, (shape or ())[-2:])] for shape in shapes)
    return before == after


def is_copy(node: Any) -> bool:
    """Whether a node has the numbers of its operand, in another floating-point dtype or memory perhaps."""
    source = node.args[0] if isinstance(node, fx.Node) and node.args else None
    return op_name(node) in _COPIES and shape_of(source) == shape_of(node) and is_float(source) and is_float(node)


def is_float(node: Any) -> bool:
    value: Any = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in _FLOATS
