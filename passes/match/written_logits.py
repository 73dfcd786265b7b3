"""From the softmax of attention that is written out up to the product of queries and keys."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from cp_rewrite.masks import DROPPED_AT
from cp_rewrite.passes.graph.nodes import bind, constant, filled, op_name, read_by, shape_of, times_constant
from cp_rewrite.passes.graph.regions import Scope
from cp_rewrite.passes.graph.writes import written_nodes
from cp_rewrite.torch_internals import expression

from .operands import repeats_per_head
from .written_products import SCORES, Differs, is_copy, is_product, keeps_pairs, product_of


def readers(node: fx.Node) -> list[fx.Node]:
    """Users of a node that read its numbers, not its shape or dtype alone."""
    return [user for user in node.users if node in read_by(user)]


def same_tensor(node: fx.Node) -> list[fx.Node]:
    """The nodes that are one tensor: what is written into it returns it. x, then x.masked_fill_(…), and so on."""
    while _is_written(node):
        node = node.args[0]  # type: ignore[assignment]
    found = [node]
    for known in found:
        found += [user for user in known.users if user.args[:1] == (known,) and _is_written(user)]
    return sorted(found)


def _is_written(node: fx.Node) -> bool:
    """Whether a node writes into its first operand and returns it."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in written_nodes(node):
        return False
    sizes, others = shape_of(node), shape_of(source)
    # As expressions: sizes that happen to be equal on this batch would be guarded to stay so.
    return sizes is not None and others is not None and [*map(expression, sizes)] == [*map(expression, others)]


def _operand(node: fx.Node, source: Any) -> Any:
    """The node that an operand is, when `node` reads it, after what was written into it."""
    return max(x for x in same_tensor(source) if x < node) if isinstance(source, fx.Node) else source


def unshifted(node: Any) -> tuple[Any, list[fx.Node]]:
    """(x, the nodes of max(x)) where a node is x - max(x), whose softmax is that of x; else (node, [])."""
    if op_name(node) not in ("sub", "subtract") or len(node.args) != 2 or node.kwargs:
        return node, []
    x, top = node.args
    chain: list[fx.Node] = []
    while op_name(top) in ("getitem", "detach", "max", "amax"):
        chain.append(top)
        if op_name(top) in ("max", "amax"):
            last = len(shape_of(x) or ()) - 1
            given = bind(top, ("input", "dim", "keepdim"), dim=None, keepdim=False)
            over_keys = given["dim"] in (-1, last, [-1], (-1,)) and given["keepdim"] is True
            if top.args[0] is x and over_keys:
                return x, chain
            break
        if op_name(top) == "getitem" and top.args[1] != 0:
            break
        top = top.args[0]
    if not chain:  # a mask, perhaps
        return node, []
    raise Differs(node, "something else than their own maximum is taken off the logits")


def sinks_behind(scope: Scope, node: Any) -> tuple[Any, fx.Node | None]:
    """(logits, sinks) where a node is cat([logits, sinks as a column]); else (node, None)."""
    if op_name(node) not in ("cat", "concat", "concatenate"):
        return node, None
    given = bind(node, ("tensors", "dim"), dim=0)
    parts: Any = given["tensors"]
    if len(parts) != 2 or given["dim"] not in (-1, 3):
        raise Differs(node, "what is put behind the logits is no column of sinks")
    sinks = repeats_per_head(scope, parts[1])
    if sinks is None:
        raise Differs(node, "the column behind the logits is not one number per head")
    return parts[0], sinks


Scores = tuple[list[fx.Node], fx.Node, float, float]


def find_scores(node: Any, reader: fx.Node) -> Scores | None:
    """(nodes from the scores to `node`, q @ kᵀ, scale, soft cap) of logits with a mask in them.

    c · (s + mask) has the scale and soft cap of c · s, and the mask c · mask.
    """
    node = _operand(reader, node)
    if not isinstance(node, fx.Node):
        return None
    found = _scaled_product(node)
    if found is not None:
        return [node], *found
    name, operands = op_name(node), node.args
    factor, scaled = times_constant(node)
    if factor is not None:
        operands = (scaled,)
    elif name == "masked_fill" or is_copy(node) or keeps_pairs(node) or _is_bounded(node):
        operands = operands[:1]
    elif name in ("sub", "subtract") and not node.kwargs:
        operands = operands[:1]
    elif name == "where":
        operands = operands[1:]
    elif name != "add" or node.kwargs:
        return None
    below = next((under for x in operands if (under := find_scores(x, node)) is not None), None)
    if below is None:
        return None
    return [*below[0], node], below[1], below[2] * (factor or 1.0), below[3] * (factor or 1.0)


def _is_bounded(node: fx.Node) -> bool:
    """Whether a node is max(logits, c), where c is so low that it drops keys anyway."""
    name = op_name(node)
    if name not in ("max", "maximum", "clamp", "clamp_min") or shape_of(node) != shape_of(node.args[0]):
        return False
    given = bind(node, ("input", "min" if name.startswith("clamp") else "other"))
    bound = constant(given.get("min")) if name.startswith("clamp") else filled(given.get("other"))
    return bound is not None and bound <= DROPPED_AT and len(node.args) + len(node.kwargs) == 2


def _scaled_product(node: fx.Node) -> tuple[fx.Node, float, float] | None:
    """(product, scale, soft cap) where a node is product · scale, or c · tanh(product · scale / c)."""
    scale, x = _without_factors(node)
    softcap = 0.0
    if op_name(x) == "tanh":
        factor, x = _without_factors(_operand(x, x.args[0]))
        softcap, scale = scale, scale * factor
    return (x, scale * product_of(x, SCORES).factor, softcap) if is_product(x) else None


def _without_factors(node: Any) -> tuple[float, Any]:
    """(c, x) where a node is c · x, in another dtype or view perhaps."""
    factor = 1.0
    while isinstance(node, fx.Node):
        c, x = times_constant(node)
        if c is not None:
            factor, node = factor * c, _operand(node, x)
        elif is_copy(node) or keeps_pairs(node):
            node = _operand(node, node.args[0])
        else:
            break
    return factor, node
