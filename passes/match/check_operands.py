"""Whether the operands of an attention node fit: their shapes, heads, dropout and scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch.fx as fx

from cp_rewrite.passes.graph.nodes import constant, shape_of
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression


def check_operands(
    node: fx.Node, args: Mapping[str, Any], local_tokens: frozenset[sympy.Expr], form: str = "BHTD"
) -> list[Refusal]:
    """Every reason why query, key and value don't fit: each of `form`, all of one row's tokens, heads in groups."""
    found: list[Refusal] = []
    names = {"B": "batch", "H": "heads", "T": "tokens", "D": "head dim"}
    shapes = {name: shape_of(args[name]) for name in ("query", "key", "value")}
    for name, shape in shapes.items():
        if shape is None or len(shape) != len(form):
            sizes = "no tensor" if shape is None else f"{len(shape)}-d"
            dims = ", ".join(names[letter] for letter in form)
            found.append(Refusal(Reason.SHAPE, f"{name} is {sizes}; ({dims}) is read", node))
        elif expression(shape[form.index("T")]) not in local_tokens:
            counted = ", ".join(map(str, local_tokens)) or "none (is every argument with tokens named?)"
            dim = form.index("T")
            detail = f"{name} has {shape[dim]} tokens in dim {dim}, the annotated inputs have {counted}"
            found.append(Refusal(Reason.QK_LENGTH, detail, node))
    if not found:
        found += _check_heads(node, bool(args["enable_gqa"]), form, *(s for s in shapes.values() if s is not None))
    return found


def _check_heads(node: fx.Node, grouped: bool, form: str, query: Any, key: Any, value: Any) -> list[Refusal]:
    q, k, v = (expression(shape[form.index("H")] if "H" in form else 1) for shape in (query, key, value))
    rows = {expression(shape[0]) for shape in (query, key, value)}
    found: list[Refusal] = []
    if len(rows) != 1 and form[0] != "H":
        found.append(Refusal(Reason.SHAPE, f"query, key and value have {sorted(map(str, rows))} batch rows", node))
    one = k == v == 1  # products broadcast over heads
    if not one and (k != v or (q != k and not grouped) or (grouped and not (q / k).is_integer)):
        found.append(Refusal(Reason.SHAPE, f"{q} query heads do not fit {k} key and {v} value heads", node))
    return found


def check_options(node: fx.Node, args: Mapping[str, Any]) -> list[Refusal]:
    """Every reason why dropout, scale and `is_causal` can't be taken over."""
    found: list[Refusal] = []
    dropout, scale = constant(args["dropout_p"]), constant(args["scale"])
    if dropout is None or dropout > 0:
        what = "is computed in the graph" if dropout is None else f"is {dropout:g}"
        found.append(Refusal(Reason.DROPOUT, f"dropout_p {what}", node))
    if args["scale"] is not None and scale is None:
        found.append(Refusal(Reason.KERNEL, "the softmax scale is computed in the graph", node))
    elif scale is not None and scale <= 0:
        found.append(Refusal(Reason.KERNEL, f"the softmax scale is {scale:g}; kernels take positive ones", node))
    if not isinstance(args["is_causal"], bool):
        found.append(Refusal(Reason.MASK_OPAQUE, "is_causal is computed in the graph", node))
    if args["is_causal"] and args["attn_mask"] is not None:
        found.append(Refusal(Reason.MASK_NOT_PACKED, "attn_mask and is_causal=True exclude each other", node))
    return found
