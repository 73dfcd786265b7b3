"""Read attention that is written out as two products and a softmax:

    out = softmax([cap(q @ kᵀ · scale) + mask, sinks])[..., :-1] @ v        cap(x) = c · tanh(x / c)

Soft cap, mask and sinks may be missing. `sinks` is one more logit per head: a column that draws weight and is dropped
before the second product, or a factor sigmoid(logsumexp(logits) - sinks) of the output, which is the same. The mask may
be added, filled in or chosen by `where`.

Each node between the two products must be read by the next one only. So no mask is made of logits, and nothing changes
logits or weights in place on the side.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sympy
import torch.fx as fx

from cp_rewrite.passes.graph.nodes import bind, needs_gradient, op_name, shape_of
from cp_rewrite.passes.graph.regions import Scope
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.graph.writes import writers_between
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression

from .operands import repeats_per_head
from .written_logits import find_scores, readers, same_tensor, sinks_behind, unshifted
from .written_products import (
    OUTPUT,
    SCORES,
    Differs,
    common_form,
    is_copy,
    is_float,
    is_product,
    keeps_pairs,
    product_of,
    untransposed,
)


@dataclass(frozen=True)
class Written:
    """The parts of attention that is written out.

    Args:
        output: the second product, or what stands for it, of `form`. query, key, value: as in `Site`.
        logits: the nodes from the scaled and capped scores to the logits with the mask in them.
        scale, softcap, form: as in `Site`. dropout: of the weights, as the graph has it. sinks: node of (Hq,), or None.
    """

    output: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    logits: tuple[fx.Node, ...]
    scale: float
    softcap: float
    dropout: Any
    sinks: fx.Node | None
    form: str

    @property
    def arguments(self) -> dict[str, Any]:
        """As arguments of `scaled_dot_product_attention`, mask and sinks left out."""
        shape, heads = shape_of(self.key), self.form.find("H")
        one_head = shape is not None and heads >= 0 and expression(shape[heads]) == 1  # products broadcast them
        return {"query": self.query, "key": self.key, "value": self.value, "scale": self.scale,
                "dropout_p": self.dropout, "enable_gqa": one_head}  # fmt: skip

    @property
    def mask(self) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
        """(the mask's node, the logits that it is part of).

        Where a mask is plainly added, its own node and no logits. Where it is filled in, say, the last of the logits:
        they are the mask of logits that are 0.
        """
        if len(self.logits) == 1:
            return None, ()
        if len(self.logits) == 2 and op_name(self.logits[1]) == "add" and len(shape_of(self.logits[0]) or ()) == 4:
            mask = next((arg for arg in self.logits[1].args if arg is not self.logits[0]), None)
            if isinstance(mask, fx.Node):
                return mask, ()
        return self.logits[-1], self.logits


def is_softmax(node: fx.Node) -> bool:
    """Whether a node may be the softmax of attention that is written out."""
    return op_name(node) == "softmax"


def read_written(
    scope: Scope, softmax: fx.Node, local_tokens: Collection[sympy.Expr], tokens: TokenAxis
) -> Written | list[Refusal]:
    """The attention that a softmax belongs to; [] where the softmax does not run over keys."""
    shape = shape_of(softmax)
    if shape is None or len(shape) not in (3, 4) or expression(shape[-2]) not in local_tokens:
        return []
    if expression(shape[-1]) not in {n for tokens in local_tokens for n in (tokens, tokens + 1)}:
        return []
    try:
        return _read(scope, softmax, tokens.rows)
    except Differs as error:
        detail = f"attention written out as products and a softmax is not one that is known: {error.detail}"
        return [Refusal(Reason.KERNEL, detail, error.node)]


def _read(scope: Scope, softmax: fx.Node, rows: Any) -> Written:
    last = len(shape_of(softmax) or ()) - 1
    given = bind(softmax, ("input", "dim"))
    if given.get("dim") not in (-1, last) or not is_float(softmax):
        raise Differs(softmax, "the softmax does not run over the keys, in a floating-point dtype")
    top, aside = unshifted(given["input"])
    masked, sinks = sinks_behind(scope, top)
    found = find_scores(masked, softmax)
    if found is None:
        raise Differs(softmax, "between q @ kᵀ and the softmax only scale, soft cap and mask are read")
    logits, product, scale, softcap = found
    if softcap < 0:
        raise Differs(logits[0], f"the soft cap is {softcap:g}")
    output, dropout = _second_product(softmax, sinks is not None)
    factor = None if sinks is not None else _sink_factor(scope, logits[-1], output)
    path_end = output
    if factor is not None:
        path_end, sinks, aside = factor
    _check_path(product, path_end, aside)
    scores, weighted = product_of(product, SCORES), product_of(output, OUTPUT)
    key = scores.right if op_name(product) == "einsum" else untransposed(scores.right)
    operands = (scores.left, key, weighted.right)
    if product.meta["example_value"].dtype != output.meta["example_value"].dtype:
        raise Differs(product, "q @ kᵀ and the output have different dtypes")
    if changed := writers_between(operands, product, path_end):
        raise Differs(changed[0], "queries, keys or values change in place before attention is through with them")
    (query, key, value), output, form = common_form(operands, path_end, {scores.form, weighted.form}, rows)
    return Written(output, query, key, value, tuple(logits), scale, softcap, dropout, sinks, form)


def _second_product(softmax: fx.Node, has_sinks: bool) -> tuple[fx.Node, Any]:
    """(the product of weights and values, dropout of the weights)."""
    node, column, dropout = softmax, has_sinks, 0.0
    while True:
        found = readers(node)
        if len(found) != 1:
            raise Differs(node, "the weights are read more than once")
        (user,) = found
        if is_product(user) and not column and product_of(user, OUTPUT).left is node:
            return user, dropout
        if op_name(user) == "dropout":
            given = bind(user, ("input", "p", "training"), p=0.5, training=True)
            dropout = given["p"] if given["training"] is not False and dropout == 0.0 else dropout
        elif column and _drops_last_column(user):
            column = False
        elif not is_copy(user) and not keeps_pairs(user):
            raise Differs(user, "between the softmax and the product with the values only dropout and casts are read")
        node = user


def _drops_last_column(node: fx.Node) -> bool:
    """Whether a node is x[..., :-1] of four dims."""
    if op_name(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    *front, last = node.args[1]
    whole = front == [...] or front == [slice(None)] * 3
    return whole and isinstance(last, slice) and (last.start, last.stop, last.step) == (None, -1, None)


def _sink_factor(scope: Scope, logits: fx.Node, output: fx.Node) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """(out · f, sinks, the nodes from the logits to f) where the output's reader multiplies it by a factor
    f = sigmoid(logsumexp(logits) - sinks). A column of sinks takes the same share of the weights:

        e^lse / (e^lse + e^sink)  =  sigmoid(lse - sink)
    """
    aside = [user for user in readers(logits) if op_name(user) == "logsumexp"]
    if len(aside) != 1 or bind(aside[0], ("input", "dim")).get("dim") not in (-1, 3, [-1], (-1,)):
        return None
    sinks: fx.Node | None = None
    while True:
        found = readers(aside[-1])
        if len(found) != 1:
            return None
        (node,) = found
        name = op_name(node)
        if name == "sub" and sinks is None and len(node.args) == 2 and node.args[0] is aside[-1] and not node.kwargs:
            column = node.args[1]
            alike = isinstance(column, fx.Node) and len(shape_of(column) or ()) == len(shape_of(aside[-1]) or ())
            sinks = repeats_per_head(scope, column) if alike else None
            if sinks is None:
                return None
        elif name == "mul" and sinks is not None and {*node.args} == {aside[-1], output} and not node.kwargs:
            shape, whole = ([*map(expression, shape_of(x) or ())] for x in (aside[-1], output))
            column = len(shape) == 4 and shape[3] == 1 and shape[:3] == whole[:3]
            alike = node.meta["example_value"].dtype == output.meta["example_value"].dtype
            return (node, sinks, aside) if column and alike and "sigmoid" in map(op_name, aside) else None
        elif name == "sigmoid":
            if sinks is None or "sigmoid" in map(op_name, aside):
                return None
        elif not is_copy(node) and not (name == "unsqueeze" and node.args[1:] == (-1,)):
            return None
        aside.append(node)


def _check_path(product: fx.Node, output: fx.Node, aside: Collection[fx.Node]) -> None:
    """Each node from the first product to the second is read by the next one only, and hands gradients down.

    What is written into a tensor stands for it from there on.
    """
    node = product
    while True:
        if any(map(needs_gradient, node.all_input_nodes)) and not needs_gradient(node):
            raise Differs(node, "gradients stop here")
        if node is output:
            return
        same = [x for x in same_tensor(node) if x <= node]
        later = sorted({user for x in same for user in readers(x) if user > node and user not in aside})
        writes = bool(later) and later[0] in same_tensor(node)
        if not later or (len(later) != 1 and not writes) or sum(_uses(x, later[0]) for x in same) != 1:
            raise Differs(node, "logits or weights are read more than once, or changed in place")
        node = later[0]


def _uses(node: fx.Node, reader: fx.Node) -> int:
    """How often a node stands among the arguments of its reader: x + x is no x."""
    arguments: list[fx.Node] = []
    fx.map_arg((reader.args, reader.kwargs), arguments.append)
    return arguments.count(node)
