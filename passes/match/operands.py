"""Operands of attention nodes: whether their shapes, heads, dropout and scale fit; and key and value heads before they
were repeated, for n copies of a head would be n times the bytes to exchange."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.canonicalize import CanonicalizeError, canonicalize
from cp_rewrite.passes.graph.nodes import Scope, constant, needs_gradient, shape_of, writers_between
from cp_rewrite.passes.predicate.context import Leaf
from cp_rewrite.passes.predicate.evaluate import Evaluator
from cp_rewrite.passes.predicate.symbolic import ZERO
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression

_METHODS = frozenset(
    "__getitem__ unsqueeze expand expand_as reshape view repeat_interleave repeat contiguous clone flatten unflatten "
    "transpose permute movedim".split()
)
_FUNCTIONS: frozenset[Any] = frozenset(
    {operator.getitem, torch.repeat_interleave, torch.reshape, torch.unsqueeze, torch.flatten, torch.transpose}
)
Known = dict[Any, bool]


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


def ungroup(
    gm: fx.GraphModule, query: fx.Node, key: fx.Node, value: fx.Node, known: Known, reader: fx.Node, dim: int = 1
) -> tuple[fx.Node, fx.Node]:
    """The key and value nodes before their heads were repeated, each n times in a row:

        heads of k   0 1        ->  0 0 0 1 1 1        (n = 3: query head h reads key head h // n)

    The nodes themselves, unless all of this holds: they have four dims; both provably were repeated so, from equally
    many heads; what was repeated does not change in place before `reader` (attention); it needs gradients where its
    copies do. A `repeat` (0 1 0 1 0 1) is another order and stays. `known` remembers answers, as layers ask the same
    again. `dim` counts heads.
    """
    if query.meta["example_value"].ndim != 4:
        return key, value
    heads = query.meta["example_value"].shape[dim]
    k, v = (_before_repeat(gm, node, heads, known, dim) for node in (key, value))
    equal = k.meta["example_value"].shape[dim] == v.meta["example_value"].shape[dim]
    unchanged = not writers_between((k,), k, reader) and not writers_between((v,), v, reader)
    trained = needs_gradient(k) == needs_gradient(key) and needs_gradient(v) == needs_gradient(value)
    return (k, v) if equal and unchanged and trained else (key, value)


def _before_repeat(gm: fx.GraphModule, node: fx.Node, heads: Any, known: Known, dim: int) -> fx.Node:
    """The earliest node whose heads `node` has repeated; `node` itself where there is none."""
    chain = [node]
    while (source := _moved_from(chain[-1])) is not None:
        chain.append(source)
    others = [other for other in range(4) if other != dim]
    whole = [expression(size) for size in node.meta["example_value"].shape]
    for depth in range(len(chain) - 1, 0, -1):
        shape = chain[depth].meta["example_value"].shape
        # Compared as expressions: symbolic sizes would be guarded to be what they are on this batch.
        if len(shape) != 4 or any(expression(shape[i]) != whole[i] for i in others):
            continue
        if heads % shape[dim] or shape[dim] == heads:
            continue
        signature = dim, *map(_signature, chain[: depth + 1])
        if signature not in known:
            known[signature] = _repeats_heads(gm, chain[depth], node, dim)
        if known[signature]:
            return chain[depth]
    return node


def _moved_from(node: fx.Node) -> fx.Node | None:
    """The one tensor whose elements `node` only moves, None for other ops."""
    moves = (node.op == "call_method" and node.target in _METHODS) or (
        node.op == "call_function" and node.target in _FUNCTIONS
    )
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("example_value"), Tensor)]
    return tensors[0] if moves and len(tensors) == 1 and node.args[0] is tensors[0] else None


def _signature(node: fx.Node) -> Any:
    """Equal for nodes that do the same to their first operand."""

    def plain(arg: fx.Node) -> Any:
        value = arg.meta.get("example_value")
        return "tensor" if isinstance(value, Tensor) else str(value)

    return (
        node.op,
        str(node.target),
        str(fx.map_arg((node.args[1:], node.kwargs), plain)),
        str(node.meta["example_value"].shape),
    )


def repeats_per_head(scope: Scope, node: fx.Node) -> fx.Node | None:
    """The tensor s of (H,) whose numbers stand in node[b, h, t] = s[h], or node[b, h, t, 0]; None: there is none."""
    source: fx.Node | None = node
    while source is not None and source.meta["example_value"].ndim > 1:
        source = _moved_from(source)
    if source is None or node.meta["example_value"].ndim not in (3, 4):
        return None
    read = _read(scope.gm, source, node)
    return source if read is not None and read[0] == read[2].function(read[1][1]) else None


def _repeats_heads(gm: fx.GraphModule, source: fx.Node, node: fx.Node, dim: int) -> bool:
    """True if node[b, h, t, d] is source[b, h // n, t, d], with heads at `dim`."""
    read = _read(gm, source, node)
    if read is None:
        return False
    value, index, leaf, shape = read
    head = ZERO if leaf.shape[dim] == 1 else sympy.floor(index[dim] * leaf.shape[dim] / shape[dim])
    return value == leaf.function(*index[:dim], head, *index[dim + 1 :])


def _read(gm: fx.GraphModule, source: fx.Node, node: fx.Node) -> tuple[Any, tuple[Any, ...], Leaf, Any] | None:
    """(the element node[b, h, t, d], its index, the leaf in it that stands for `source`, the shape of `node`)."""
    try:
        canonical = canonicalize(Scope(gm), node, lambda _, n: n is source)
    except CanonicalizeError:
        return None
    evaluator = Evaluator(frozenset(), lambda n: n.name)
    tensor = evaluator.run(canonical)
    index = tuple(ZERO if s == 1 else evaluator.symbol(n, s) for n, s in zip("bhtd", tensor.shape, strict=False))
    leaf = next((x for x in evaluator.leaves.values() if x.node is source), None)
    return None if leaf is None else (tensor.at(index), index, leaf, tensor.shape)
