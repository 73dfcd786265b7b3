"""Tokens that a mask picks, as many as there happen to be, where they are only added up: all tokens, 0 for the others.

x[mask].sum(0)                               where(mask, x, 0).sum(0)
x[mask].mean(0)                              the same / mask.sum()
F.cross_entropy(logits[mask], labels[mask])  F.cross_entropy(logits, where(mask, labels, ignore_index))

What treats each token alone in between runs on all tokens first (`late_picks`).

Ops that treat each token alone, on tokens that a mask picks: they run on all tokens, and the pick comes after them.

f(x[mask])    f(where(mask, x, 0))[mask]

Only where sums and losses are all that read the result: `picked_sums` then has no use for the pick. Tokens that are not
picked go in as 0, so that f and its gradient are finite there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite.passes.graph.new_nodes import maker
from cp_rewrite.passes.graph.nodes import bind, draws_random_numbers, graph_modules, op_name, value_of
from cp_rewrite.passes.graph.writes import memory_of, written_nodes
from cp_rewrite.torch_internals import FakeTensorMode, expression, fake_mode_of

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


_aten: Any = torch.ops.aten
_REDUCED = ("input", "dim", "keepdim")
"""Arguments of sum and mean."""


@dataclass(frozen=True)
class _Pick:
    """x[mask], where all reads of it are known.

    Args:
        node: the pick. sums: reductions that read it. losses: cross entropies.
        sizes: nodes that only assert that it has some size.
    """

    node: fx.Node
    x: fx.Node
    mask: fx.Node
    sums: Sequence[fx.Node]
    losses: Sequence[fx.Node]
    sizes: Sequence[fx.Node]


def sum_picked(gm: fx.GraphModule, counts: Collection[Any], kept: Collection[fx.Node]) -> None:
    """Rewrite those of a graph and its nested regions.

    Args:
        counts: the number of tokens, in all its symbols. kept: nodes that are read beside the graph.
    """
    mode = fake_mode_of(gm.graph.nodes)
    if mode is None:
        return
    modules = graph_modules(gm)
    written = {memory_of(target) for m in modules for node in m.graph.nodes for target in written_nodes(node)}
    for module in modules:
        _late(module, counts, kept, written, mode)
        picks = {n: pick for n in module.graph.nodes if n not in kept and (pick := _read(n, counts)) is not None}
        found = {n: pick for n, pick in picks.items() if memory_of(pick.mask) not in written}
        losses = {loss: _of_both(loss, found, written) for pick in found.values() for loss in pick.losses}
        for loss, both in losses.items():
            if both is not None:
                _over_all_tokens(loss, *both, mode)
        done = {n: pick for n, pick in found.items() if all(losses[loss] is not None for loss in pick.losses)}
        for node, pick in done.items():
            for reduction in pick.sums:
                _sum(reduction, node, pick, mode)
        asserted = {size for pick in done.values() for size in pick.sizes}  # two may be asserted to be equal
        for node in reversed(module.graph.nodes):
            if node in asserted or node in done:
                module.graph.erase_node(node)


def _late(
    module: fx.GraphModule, counts: Collection[Any], kept: Collection[fx.Node], written: Collection[Any], mode: Any
) -> None:
    """Let picks of one mask come after what follows from them."""
    picks = {n: pick for n in module.graph.nodes if (pick := _picked(n, counts)) and memory_of(pick[1]) not in written}
    while picks:
        mask = next(iter(picks.values()))[1]
        group = {n: x for n, (x, other) in picks.items() if _is_again(mask, other, written)}
        pick_late(module.graph, Picks(mask, group, _ends, lambda n: n in kept or memory_of(n) in written), mode)
        picks = {n: pick for n, pick in picks.items() if n not in group}


def _ends(node: fx.Node) -> bool:
    """Whether a node only adds up, or asserts the size of, what it reads."""
    if node.target is _aten.sym_size.int:
        return asserts(node) is not None
    return node.target is F.cross_entropy or any(_is_sum(node, read) for read in node.all_input_nodes[:1])


def _picked(node: fx.Node, counts: Collection[Any]) -> tuple[fx.Node, fx.Node] | None:
    """(x, mask) of x[mask], for a mask of tokens."""
    if op_name(node) not in ("getitem", "masked_select") or len(node.args) != 2 or node.kwargs:
        return None
    x, mask = node.args
    mask = mask[0] if isinstance(mask, tuple) and len(mask) == 1 else mask
    if not isinstance(x, fx.Node) or not isinstance(mask, fx.Node):
        return None
    values = value_of(x), value_of(mask)
    if not all(isinstance(value, Tensor) for value in values) or values[1].dtype is not torch.bool:
        return None
    symbols = {symbol for size in values[1].shape for symbol in expression(size).free_symbols}
    if not symbols & {*counts} or (op_name(node) == "masked_select" and values[0].shape != values[1].shape):
        return None
    return x, mask


def _read(node: fx.Node, counts: Collection[Any]) -> _Pick | None:
    picked = _picked(node, counts)
    if picked is None:
        return None
    sizes = [user for user in node.users if user.target is _aten.sym_size.int]
    asserted = [asserts(size) for size in sizes]
    sums = [user for user in node.users if _is_sum(user, node)]
    losses = [user for user in node.users if user.target is F.cross_entropy]
    if None in asserted or len(sums) + len(losses) + len(sizes) < len(node.users):
        return None
    return _Pick(node, *picked, sums, losses, [each for chain in asserted for each in chain or ()])


def asserts(node: fx.Node) -> list[fx.Node] | None:
    """A node and those that follow from it, users first, if they only assert something."""
    if node.target is _aten._assert_scalar.default:
        return [node]
    chains = [asserts(user) for user in node.users]
    if None in chains or not chains or isinstance(value_of(node), Tensor):
        return None
    return [*(each for chain in chains for each in chain or ()), node]


def _is_sum(node: fx.Node, of: fx.Node) -> bool:
    """Whether a node sums over the picked entries, and perhaps over more dims."""
    given = bind(node, _REDUCED)
    if op_name(node) not in ("sum", "mean") or node.args[:1] != (of,) or given.keys() - {"input", "dim"}:
        return False
    dims = _dims(given, value_of(of).ndim)
    return dims is not None and all(isinstance(value_of(of).shape[dim], int) for dim in dims[1:])


def _dims(given: dict[str, Any], ndim: int) -> list[int] | None:
    """The dims that are reduced; None where the picked entries' is not among them."""
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else range(ndim) if dims is None else dims
    found = sorted(dim % ndim for dim in dims) if all(isinstance(dim, int) for dim in dims) else []
    return found if found[:1] == [0] else None


def _sum(node: fx.Node, picked: fx.Node, pick: _Pick, mode: FakeTensorMode) -> None:
    dims = _dims(bind(node, _REDUCED), value_of(picked).ndim) or []
    more, new = value_of(pick.mask).ndim, maker(picked, mode)
    after, dtype, means = maker(node, mode), value_of(node).dtype, op_name(node) == "mean"
    wide = torch.float32 if means and dtype in (torch.float16, torch.bfloat16) else dtype
    total = after(
        torch.sum, chosen(pick.x, pick.mask, new), [*range(more), *(dim + more - 1 for dim in dims[1:])], dtype=wide
    )
    if means:
        entries = math.prod(value_of(picked).shape[dim] for dim in dims[1:])
        total = after(torch.div, total, after(torch.mul, after(torch.sum, pick.mask), entries))
    total = total if wide is dtype else after(torch.Tensor.to, total, dtype)
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)


def _of_both(loss: fx.Node, found: dict[fx.Node, _Pick], written: Collection[Any]) -> tuple[_Pick, _Pick] | None:
    """The picks of a loss's scores and of its targets, by one mask. written: memory that nodes write into."""
    given = bind(loss)
    scores, targets = (found.get(given[name]) for name in ("input", "target"))
    if scores is None or targets is None or given["reduction"] not in ("mean", "sum"):
        return None
    if (given["size_average"], given["reduce"]) != (None, None):  # older words for the reduction
        return None
    if any(memory_of(pick.x) in written for pick in (scores, targets)):  # a pick is a copy, which keeps what it was
        return None
    if not _is_again(scores.mask, targets.mask, written):
        return None
    ndim = value_of(targets.mask).ndim
    whole = value_of(targets.x).ndim == ndim and value_of(scores.x).ndim == ndim + 1
    return (scores, targets) if whole and not value_of(targets.x).is_floating_point() else None


def _is_again(a: Any, b: Any, written: Collection[Any]) -> bool:
    """Whether two arguments are one, or computed in the same way from what nothing writes into."""
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and a == b
    if a.op not in ("call_function", "call_method") or a.target != b.target or a.kwargs or b.kwargs:
        return False
    pure = not draws_random_numbers(a) and not any(memory_of(n) in written for n in (a, b, *a.all_input_nodes))
    alike = len(a.args) == len(b.args) and all(_is_again(x, y, written) for x, y in zip(a.args, b.args, strict=True))
    return pure and alike


def _over_all_tokens(loss: fx.Node, scores: _Pick, targets: _Pick, mode: FakeTensorMode) -> None:
    new, ndim = maker(loss, mode), value_of(scores.mask).ndim
    labels = new(torch.where, targets.mask, targets.x, bind(loss)["ignore_index"])
    finite = chosen(scores.x, scores.mask, maker(scores.node, mode))  # those not picked may be infinite or nan
    whole = finite if ndim == 1 else new("flatten", finite, 0, ndim - 1)
    loss.kwargs = {name: value for name, value in loss.kwargs.items() if name not in ("input", "target")}
    loss.args = whole, new("flatten", labels), *loss.args[2:]
