"""Read attention that is written out as two products and a softmax:

    out = softmax([cap(q @ kᵀ · scale) + mask, sinks])[..., :-1] @ v        cap(x) = c · tanh(x / c)

Soft cap, mask and sinks may be missing. `sinks` is one more logit per head: a column that draws weight and is dropped
before the second product. The mask may be added, filled in or chosen by `where`.

Each node between the two products must be read by the next one only. So no mask is made of logits, and nothing changes
logits or weights in place on the side.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.operands import needs_gradient, op_name, shape_of, times_constant
from cp_rewrite.passes.graph.regions import Scope
from cp_rewrite.passes.graph.writes import writers_between
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression

from .grouped_heads import repeats_per_head

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COPIES = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"})
_PRODUCTS = frozenset({"matmul", "einsum"})
_SCORES = {
    "BHTD": re.compile(r"(\w)(\w)(\w)(\w),\1\2(\w)\4->\1\2\3\5"),
    "BTHD": re.compile(r"(\w)(\w)(\w)(\w),\1(\w)\3\4->\1\3\2\5"),
}
_OUTPUT = {
    "BHTD": re.compile(r"(\w)(\w)(\w)(\w),\1\2\4(\w)->\1\2\3\5"),
    "BTHD": re.compile(r"(\w)(\w)(\w)(\w),\1\4\2(\w)->\1\3\2\5"),
}
"""Equations of the products, by the form of queries, keys and values."""


@dataclass(frozen=True)
class Written:
    """The parts of attention that is written out.

    Args:
        output: the second product, (B, Hq, T, Dv). query, key, value: as in `Site`.
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
        shape = shape_of(self.key)
        heads = self.form.index("H")
        one_head = shape is not None and len(shape) == 4 and expression(shape[heads]) == 1  # products broadcast them
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
        if len(self.logits) == 2 and op_name(self.logits[1]) == "add":
            mask = next((arg for arg in self.logits[1].args if arg is not self.logits[0]), None)
            if isinstance(mask, fx.Node):
                return mask, ()
        return self.logits[-1], self.logits


def is_softmax(node: fx.Node) -> bool:
    """Whether a node may be the softmax of attention that is written out."""
    return op_name(node) == "softmax"


def read_written(scope: Scope, softmax: fx.Node, local_tokens: Collection[sympy.Expr]) -> Written | list[Refusal]:
    """The attention that a softmax belongs to; [] where the softmax does not run over keys."""
    shape = shape_of(softmax)
    if shape is None or len(shape) != 4 or expression(shape[2]) not in local_tokens:
        return []
    if expression(shape[3]) not in {n for tokens in local_tokens for n in (tokens, tokens + 1)}:
        return []
    try:
        return _read(scope, softmax)
    except _Differs as error:
        detail = f"attention written out as products and a softmax is not one that is known: {error.detail}"
        return [Refusal(Reason.KERNEL, detail, error.node)]


class _Differs(Exception):
    """The graph has something else where a part of attention was looked for."""

    def __init__(self, node: fx.Node, detail: str) -> None:
        super().__init__(detail)
        self.node, self.detail = node, detail


def _read(scope: Scope, softmax: fx.Node) -> Written:
    if _argument(softmax, 1, "dim") not in (-1, 3) or not _is_float(softmax):
        raise _Differs(softmax, "the softmax does not run over the keys, in a floating-point dtype")
    top, shift = _unshifted(_argument(softmax, 0, "input"))
    masked, sinks = _sinks_behind(scope, top)
    found = _find_scores(masked)
    if found is None:
        raise _Differs(softmax, "between q @ kᵀ and the softmax only scale, soft cap and mask are read")
    logits, product, scale, softcap = found
    if softcap < 0:
        raise _Differs(logits[0], f"the soft cap is {softcap:g}")
    output, dropout = _second_product(softmax, sinks is not None)
    _check_path(product, output, shift)
    query, keys, form = _factors(product, _SCORES)
    key = keys if op_name(product) == "einsum" else _untransposed(keys)
    _, value, also = _factors(output, _OUTPUT)
    if form != also:
        raise _Differs(output, "queries and keys have their tokens in another dim than values and the output")
    if product.meta["example_value"].dtype != output.meta["example_value"].dtype:
        raise _Differs(product, "q @ kᵀ and the output have different dtypes")
    if changed := writers_between((query, key, value), product, output):
        raise _Differs(changed[0], "queries, keys or values change in place before attention is through with them")
    return Written(output, query, key, value, tuple(logits), scale, softcap, dropout, sinks, form)


def _unshifted(node: Any) -> tuple[Any, list[fx.Node]]:
    """(x, the nodes of max(x)) where a node is x - max(x), whose softmax is that of x; else (node, [])."""
    if op_name(node) not in ("sub", "subtract") or len(node.args) != 2 or node.kwargs:
        return node, []
    x, top = node.args
    chain: list[fx.Node] = []
    while op_name(top) in ("getitem", "detach", "max", "amax"):
        chain.append(top)
        if op_name(top) in ("max", "amax"):
            over_keys = _argument(top, 1, "dim") in (-1, 3, [-1], (-1,)) and _argument(top, 2, "keepdim") is True
            if top.args[0] is x and over_keys:
                return x, chain
            break
        if op_name(top) == "getitem" and top.args[1] != 0:
            break
        top = top.args[0]
    if not chain:  # a mask, perhaps
        return node, []
    raise _Differs(node, "something else than their own maximum is taken off the logits")


def _sinks_behind(scope: Scope, node: Any) -> tuple[Any, fx.Node | None]:
    """(logits, sinks) where a node is cat([logits, sinks as a column]); else (node, None)."""
    if op_name(node) not in ("cat", "concat", "concatenate"):
        return node, None
    parts: Any = _argument(node, 0, "tensors")
    if len(parts) != 2 or _argument(node, 1, "dim") not in (-1, 3):
        raise _Differs(node, "what is put behind the logits is no column of sinks")
    sinks = repeats_per_head(scope, parts[1])
    if sinks is None:
        raise _Differs(node, "the column behind the logits is not one number per head")
    return parts[0], sinks


def _find_scores(node: Any) -> tuple[list[fx.Node], fx.Node, float, float] | None:
    """(nodes from the scores to `node`, q @ kᵀ, scale, soft cap) of logits with a mask in them."""
    if not isinstance(node, fx.Node):
        return None
    found = _scaled_product(node)
    if found is not None:
        return [node], *found
    name, operands = op_name(node), node.args
    if name == "masked_fill" or _is_copy(node) or (name in ("sub", "subtract") and not node.kwargs):
        operands = operands[:1]
    elif name == "where":
        operands = operands[1:]
    elif name != "add" or node.kwargs:
        return None
    below = next((found for found in map(_find_scores, operands) if found is not None), None)
    return None if below is None else ([*below[0], node], *below[1:])


def _scaled_product(node: fx.Node) -> tuple[fx.Node, float, float] | None:
    """(product, scale, soft cap) where a node is product · scale, or c · tanh(product · scale / c)."""
    scale, x = _without_factors(node)
    softcap = 0.0
    if op_name(x) == "tanh":
        factor, x = _without_factors(x.args[0])
        softcap, scale = scale, scale * factor
    return (x, scale, softcap) if op_name(x) in _PRODUCTS else None


def _without_factors(node: Any) -> tuple[float, Any]:
    """(c, x) where a node is c · x, in another dtype perhaps."""
    factor = 1.0
    while isinstance(node, fx.Node):
        c, x = times_constant(node)
        if c is not None:
            factor, node = factor * c, x
        elif _is_copy(node):
            node = node.args[0]
        else:
            break
    return factor, node


def _second_product(softmax: fx.Node, has_sinks: bool) -> tuple[fx.Node, Any]:
    """(the product of weights and values, dropout of the weights)."""
    node, column, dropout = softmax, has_sinks, 0.0
    while True:
        if len(node.users) != 1:
            raise _Differs(node, "the weights are read more than once")
        (user,) = node.users
        if op_name(user) in _PRODUCTS and not column and _factors(user, _OUTPUT)[0] is node:
            return user, dropout
        if op_name(user) == "dropout":
            p, training = _argument(user, 1, "p", 0.5), _argument(user, 2, "training", True)
            dropout = p if training is not False and dropout == 0.0 else dropout
        elif column and _drops_last_column(user):
            column = False
        elif not _is_copy(user):
            raise _Differs(user, "between the softmax and the product with the values only dropout and casts are read")
        node = user


def _drops_last_column(node: fx.Node) -> bool:
    """Whether a node is x[..., :-1] of four dims."""
    if op_name(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    *front, last = node.args[1]
    whole = front == [...] or front == [slice(None)] * 3
    return whole and isinstance(last, slice) and (last.start, last.stop, last.step) == (None, -1, None)


def _factors(product: fx.Node, equations: Mapping[str, re.Pattern[str]]) -> tuple[fx.Node, fx.Node, str]:
    """(both operands of a matmul, or of an einsum that says the same, their form)."""
    operands, form = list(product.args), "BHTD"
    if op_name(product) == "einsum":
        text = str(operands.pop(0)).replace(" ", "")
        matches = {form: match for form, known in equations.items() if (match := known.fullmatch(text))}
        form = next((form for form, match in matches.items() if len(set(match.groups())) == 5), "")
        if not form:
            raise _Differs(product, f"einsum {text!r} is no product over one head's queries and keys")
    if len(operands) != 2 or product.kwargs or not all(isinstance(x, fx.Node) for x in operands):
        raise _Differs(product, f"{product.name} is no product of two tensors")
    return operands[0], operands[1], form  # type: ignore[return-value]


def _untransposed(node: fx.Node) -> fx.Node:
    """k, of a node that is kᵀ."""
    name, dims = op_name(node), node.args[1:]
    if name in ("transpose", "swapaxes", "swapdims"):
        known = len(dims) == 2 and {int(str(d)) % 4 for d in dims} == {2, 3}
    elif name == "permute":
        known = dims in ((0, 1, 3, 2), ((0, 1, 3, 2),), ([0, 1, 3, 2],))
    else:
        known = name == "mT" or (name == "getattr" and dims == ("mT",))  # an op of its own in newer torch
    if not known or not isinstance(node.args[0], fx.Node):
        raise _Differs(node, "write the keys' transpose as k.transpose(-2, -1)")
    return node.args[0]


def _check_path(product: fx.Node, output: fx.Node, shift: Collection[fx.Node]) -> None:
    """Each node from the first product to the second is read by the next one only, and hands gradients down."""
    node = product
    while True:
        if any(map(needs_gradient, node.all_input_nodes)) and not needs_gradient(node):
            raise _Differs(node, "gradients stop here")
        if node is output:
            return
        readers = [user for user in node.users if user not in shift]
        if len(readers) != 1 or _uses(node, readers[0]) != 1:
            raise _Differs(node, "logits or weights are read more than once, or changed in place")
        node = readers[0]


def _uses(node: fx.Node, reader: fx.Node) -> int:
    """How often a node stands among the arguments of its reader: x + x is no x."""
    arguments: list[fx.Node] = []
    fx.map_arg((reader.args, reader.kwargs), arguments.append)
    return arguments.count(node)


def _is_copy(node: fx.Node) -> bool:
    """Whether a node has the numbers of its operand, in another floating-point dtype or memory perhaps."""
    source = node.args[0] if node.args else None
    return op_name(node) in _COPIES and shape_of(source) == shape_of(node) and _is_float(source) and _is_float(node)


def _is_float(node: Any) -> bool:
    value: Any = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in _FLOATS


def _argument(node: Any, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
