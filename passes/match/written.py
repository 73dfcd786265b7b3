"""Read attention that is written out as two products and a softmax:

    out = softmax([cap(q @ kᵀ · scale) + mask, sinks])[..., :-1] @ v        cap(x) = c · tanh(x / c)

Soft cap, mask and sinks may be missing. `sinks` is one more logit per head: a column that draws weight and is dropped
before the second product, or a factor sigmoid(logsumexp(logits) - sinks) of the output, which is the same. The mask may
be added, filled in or chosen by `where`.

Each node between the two products must be read by the next one only. So no mask is made of logits, and nothing changes
logits or weights in place on the side.

    product_of, common_form                  the two products, and the form of what they multiply
    unshifted, sinks_behind, find_scores     from the softmax up to the product of queries and keys
    Written, read_written                    all of it, from the softmax on
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.masks import DROPPED_AT
from cp_rewrite.passes.graph.nodes import (
    Scope,
    bind,
    constant,
    filled,
    needs_gradient,
    op_name,
    read_by,
    shape_of,
    times_constant,
    writers_between,
    written_nodes,
)
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression

from .operands import repeats_per_head

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

        matmul(q, kᵀ), matmul(w, v), einsum    of (B, H, T, D), or with tokens before heads
        bmm, baddbmm, matmul, einsum           of (N, T, D): heads merged with rows, heads of one row, or one head

    Heads that a view merged with rows of the batch, (B, H, T, D) to (B · H, T, D), are read before it, and the output
    behind the view that parts them again.

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
    """True if a node views logits or weights (…, T, T) and changes only dims before these two."""
    source = node.args[0] if op_name(node) in _VIEWS else None
    shapes = shape_of(source), shape_of(node)
    if None in shapes or not all(3 <= len(shape or ()) <= 4 for shape in shapes):
        return False
    before, after = ([*map(expression, (shape or ())[-2:])] for shape in shapes)
    return before == after


def is_copy(node: Any) -> bool:
    """True if a node copies the numbers of its operand, to another floating-point dtype or memory perhaps."""
    source = node.args[0] if isinstance(node, fx.Node) and node.args else None
    return op_name(node) in _COPIES and shape_of(source) == shape_of(node) and is_float(source) and is_float(node)


def is_float(node: Any) -> bool:
    value: Any = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in _FLOATS


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
    """True if a node writes into its first operand and returns it."""
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
    """True if a node is max(logits, c) with a c so low that keys are dropped anyway."""
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
    """True if a node may be the softmax of attention that is written out."""
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
    """True if a node is x[..., :-1] of four dims."""
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
