"""Ops that treat each token alone, on tokens that a mask picks: they run on all tokens, and the pick comes after them.

f(x[mask])    f(where(mask, x, 0))[mask]

Only where sums and losses are all that read the result: `picked_sums` then has no use for the pick. Tokens that are not
picked go in as 0, so that f and its gradient are finite there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.new_nodes import maker
from cp_rewrite.passes.graph.nodes import bind, op_name, value_of
from cp_rewrite.torch_internals import FakeTensorMode, expression

_OF_EACH = frozenset(
    "add sub mul neg square sin cos tanh sigmoid logsigmoid softplus relu gelu silu elu leaky_relu mish eq ne "
    "gt lt float double half bfloat16 long int to type_as clone contiguous detach".split()
)
"""Of each number; of finite numbers they are finite, and so are their gradients."""
_BY_NUMBER: dict[str, Callable[[Any], bool]] = {
    "pow": lambda other: isinstance(other, int) and other > 0,
    "div": lambda other: isinstance(other, int | float) and other != 0,
    "mod": lambda other: isinstance(other, int) and other != 0,
}
"""The same, by a second operand that is such a number."""
_OF_LAST = frozenset({"linear", "layer_norm", "rms_norm"})
_OF_NORMS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
_SMALLEST_EPS = 1e-20
"""Of norms: with less, or none, a row of 0 gives 0 / 0, or so does its gradient, which has eps ** -1.5 in it."""
_LARGEST_EXPONENT = 16.0
"""What may be added in front of `exp`, which must not overflow where 0 stands for tokens that are not picked."""
_OVER_DIM = frozenset({"softmax", "log_softmax", "logsumexp", "sum", "mean", "amax", "argmax", "squeeze"})
_SAME = frozenset({"view", "reshape", "flatten"})


@dataclass(frozen=True)
class Picks:
    """Those of one mask in a graph.

    Args:
        of: the node of a pick -> the tensor that it picks from.
        ends: True if a node only adds up what it reads. seen: True if a node is read beside the graph, or written into.
    """

    mask: fx.Node
    of: dict[fx.Node, fx.Node]
    ends: Callable[[fx.Node], bool]
    seen: Callable[[fx.Node], bool]


def pick_late(graph: fx.Graph, picks: Picks, mode: FakeTensorMode) -> None:
    """Let what follows from the picks run on all tokens."""
    chain = _chain(graph.nodes, picks)
    whole: dict[fx.Node, fx.Node] = {}
    for node in chain:
        for pick in [n for n in node.all_input_nodes if n in picks.of and n not in whole]:
            whole[pick] = chosen(picks.of[pick], picks.mask, maker(pick, mode))
        whole[node] = _on_all(node, whole, value_of(picks.mask).ndim, mode)
    for node in reversed(chain):
        if node.users:
            with graph.inserting_before(node):
                late = graph.call_function(operator.getitem, (whole[node], picks.mask))
            late.meta = dict(node.meta)
            node.replace_all_uses_with(late)
        graph.erase_node(node)


def chosen(x: fx.Node, mask: fx.Node, new: Callable[..., fx.Node]) -> fx.Node:
    """All tokens of `x`, 0 for those that the mask doesn't pick."""
    sizes = [new("size", mask, dim) for dim in range(value_of(mask).ndim)]
    behind = value_of(x).ndim - len(sizes)
    nothing = False if value_of(x).dtype is torch.bool else 0  # an int would make it one of ints
    return new(torch.where, new("reshape", mask, (*sizes, *[1] * behind)), x, nothing)


def _chain(nodes: Iterable[fx.Node], picks: Picks) -> list[fx.Node]:
    """What follows from the picks, in order, up to sums and losses; nothing where something else reads it."""
    known, chain = {*picks.of}, list[fx.Node]()
    for node in nodes:
        if known.isdisjoint(node.all_input_nodes) or picks.ends(node):
            continue
        if picks.seen(node) or not _treats_each_alone(node, known):
            return []
        known.add(node)
        chain.append(node)
    return chain


def _treats_each_alone(node: fx.Node, known: Collection[fx.Node]) -> bool:
    """True if a node's row i is computed from row i of those known, and of nothing else that has as many rows."""
    name, value = op_name(node), value_of(node)
    first, *more = [n for n in node.all_input_nodes if n in known]
    if not isinstance(value, Tensor) or _shape(value)[:1] != _shape(value_of(first))[:1]:
        return False
    if name == "exp" and not _small_at_zero(first, known):
        return False
    if (
        name == "exp"
        or name in _OF_EACH
        or (name in _BY_NUMBER and _BY_NUMBER[name](bind(node, ("input", "other")).get("other")))
    ):
        return _alike(value, [first, *more], node)
    if more or node.args[:1] != (first,):
        return False
    if name in _OF_LAST:
        return value_of(first).ndim > 1 and (name == "linear" or _finite_norm(node))
    if name in _SAME:
        return _shape(value) == _shape(value_of(first))
    if name in _OVER_DIM:
        return _from_behind(node) is not None
    return name == "getitem" and node.all_input_nodes == [first] and _of_features(node.args[1])


def _finite_norm(node: fx.Node) -> bool:
    """True if a norm of a row of 0, and its gradient, are finite."""
    eps = bind(node, _OF_NORMS[op_name(node)]).get("eps")
    return eps is None or (isinstance(eps, float) and eps >= _SMALLEST_EPS)


def _small_at_zero(node: fx.Node, known: Collection[fx.Node]) -> bool:
    """True if nothing is added to what follows from picks, up to a node, but small numbers."""
    if op_name(node) in ("add", "sub"):
        terms = [x for x in (*node.args[:2], *node.kwargs.values()) if x not in known]
        if not all(isinstance(x, int | float) and abs(x) <= _LARGEST_EXPONENT for x in terms):
            return False
    return all(_small_at_zero(n, known) for n in node.all_input_nodes if n in known)


def _alike(value: Tensor, operands: Sequence[fx.Node], node: fx.Node) -> bool:
    """True if operands meet row by row, and all others have no dim of rows."""
    if any(value_of(n).ndim != value.ndim for n in operands):
        return False
    others = [value_of(n) for n in node.all_input_nodes if n not in operands]
    return all(isinstance(other, Tensor) and other.ndim < value.ndim for other in others)


def _shape(value: Tensor) -> list[Any]:
    return [expression(size) for size in value.shape]


def _of_features(index: Any) -> bool:
    """True if an index takes all rows, and numbers or slices of what is behind them."""
    index = index if isinstance(index, tuple) else (index,)
    plain = all(each is Ellipsis or each is None or isinstance(each, int | slice) for each in index)
    return plain and index[:1] in ((Ellipsis,), (slice(None),))


def _from_behind(node: fx.Node) -> list[int] | int | None:
    """The dims that an op is over, counted from the last; None: the picked entries' are among them."""
    given: Any = bind(node, ("input", "dim")).get("dim")
    ndim = value_of(node.args[0]).ndim  # type: ignore[arg-type]
    dims = [given] if isinstance(given, int) else given
    if not isinstance(dims, Sequence) or not dims or not all(isinstance(dim, int) and dim % ndim for dim in dims):
        return None
    behind = [dim % ndim - ndim for dim in dims]
    return behind[0] if isinstance(given, int) else behind


def _on_all(node: fx.Node, whole: dict[fx.Node, fx.Node], rows: int, mode: FakeTensorMode) -> fx.Node:
    """A node of the chain on all tokens, whose first `rows` dims are in the place of the picked entries'."""
    name, new, args, kwargs = op_name(node), maker(node, mode), node.args, dict(node.kwargs)
    if name in _SAME:
        return whole[node.args[0]]  # type: ignore[index]
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        args = (args[0], index if index[0] is Ellipsis else (*[slice(None)] * rows, *index[1:]))
    if name in _OVER_DIM:
        args = args[0], _from_behind(node), *args[2:]
        kwargs = {key: value for key, value in kwargs.items() if key not in ("dim", "axis")}
    args, kwargs = fx.map_arg((args, kwargs), lambda n: whole.get(n, n))
    made = new(node.target, *args, **kwargs)
    given: Any = value_of(made)
    with mode, torch.no_grad():  # autocast decided on the dtype
        made.meta["example_value"] = given.to(value_of(node).dtype).requires_grad_(given.requires_grad)
    return made
