"""Tokens that a mask picks, as many as there happen to be: all tokens of the row, of which those that it does not pick
count for nothing.

    x[mask]                   where(mask, x, 0)                  (N, C)  ->  (B, T, C)
    f(x[mask])                f(where(mask, x, 0))               what treats each token alone
    x[mask].mean(0)           where(mask, x, 0).sum((0, 1)) / mask.sum()
    len(x[mask])              mask.sum()
    h[mask] = f(x[mask])      h = where(mask, f(where(mask, x, 0)), h)
    a = x[mask]; a[a > 0]     where(mask, x, 0)[where(mask, a > 0, False)], by a mask of all tokens
    x[mask.nonzero()[:, 0]]   x[mask]

A node that follows from picks of one mask has a *whole*: the same of all tokens. What reads picks and gives no picks,
a sum, a loss or a write, reads wholes. Tokens that are not picked may hold nan, and an op may be infinite where they
hold 0: they hold a number there at which the op and its gradient are finite, so that 0 comes back to them. A pick that
something else reads stays as it is, and is refused where it is read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.new_nodes import maker
from cp_rewrite.passes.graph.nodes import (
    bind,
    draws_random_numbers,
    graph_modules,
    memory_of,
    op_name,
    value_of,
    written_nodes,
)
from cp_rewrite.torch_internals import FakeTensorMode, expression, fake_mode_of

from .scatters import replace_written

_aten: Any = torch.ops.aten
_OF_EACH = frozenset(
    "add sub rsub mul neg abs sign square sin cos tanh sinh sigmoid logsigmoid erf atan asinh relu relu6 gelu silu elu "
    "selu celu leaky_relu mish softplus softsign hardtanh hardswish hardsigmoid relu6 eq ne gt lt ge le float double "
    "half bfloat16 long int bool to type_as clone contiguous detach maximum minimum clamp clamp_min clamp_max where "
    "masked_fill floor ceil round trunc isnan isinf isfinite logical_not logical_and logical_or logical_xor "
    "bitwise_not bitwise_and bitwise_or and or invert invert zeros_like ones_like lerp addcmul logaddexp".split()
)
"""Ops of each number; of finite numbers they are finite, and so are their gradients."""
_FINITE_AT: dict[str, Sequence[float]] = {
    **dict.fromkeys("exp expm1 exp2 log1p asin acos atanh tan cosh".split(), (0,)),
    **dict.fromkeys("log log2 log10 sqrt rsqrt reciprocal pow erfinv".split(), (1,)),
    **dict.fromkeys("div truediv true_divide divide floordiv floor_divide mod remainder fmod xlogy".split(), (1, 1)),
    "erfinv": (0,),
}
"""Others, and numbers of their operands at which they and their gradients are finite; the last is of all others."""
_WITH_DIM: dict[str, Sequence[str]] = {
    **dict.fromkeys(
        "sum mean amax amin logsumexp argmax argmin any all prod max min".split(), ("input", "dim", "keepdim")
    ),
    **dict.fromkeys("softmax log_softmax squeeze unsqueeze unbind".split(), ("input", "dim")),
    **dict.fromkeys(("chunk", "split", "tensor_split"), ("input", "parts", "dim")),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), ("tensors", "dim")),
    "norm": ("input", "p", "dim", "keepdim"),
    "normalize": ("input", "p", "dim", "eps"),
    "vector_norm": ("input", "ord", "dim", "keepdim"),
    "cosine_similarity": ("input", "other", "dim", "eps"),
    "topk": ("input", "k", "dim", "largest", "sorted"),
    "sort": ("input", "dim", "descending"),
    "unflatten": ("input", "dim", "sizes"),
    "gather": ("input", "dim", "index"),
}
"""Ops over dims that are named -> their arguments. (var and std have no gradient where all features are equal.)"""
_DIMS = {
    "topk": -1,
    "sort": -1,
    "normalize": 1,
    "cosine_similarity": 1,
    "cat": 0,
    "stack": 0,
    "chunk": 0,
    "split": 0,
    "unbind": 0,
}
"""The dims of some, where none is named."""
_PARTS = frozenset({"chunk", "split", "tensor_split", "unbind"})
_FINITE_OVER = dict.fromkeys(("norm", "vector_norm", "normalize", "cosine_similarity"), (1,))
_OF_LAST = frozenset({"linear", "layer_norm", "rms_norm", "matmul", "embedding", "one_hot", "glu"})
_OF_NORMS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
_SMALLEST_EPS = 1e-20
"""The smallest eps of norms: with less, or none, a row of equal numbers gives 0 / 0, or so does its gradient, which has
eps ** -1.5 in it."""
_SAME = frozenset({"view", "reshape", "flatten"})
_LOSSES: dict[Any, Sequence[float]] = {
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss), ()),
    **dict.fromkeys((F.margin_ranking_loss, F.poisson_nll_loss), ()),
    F.binary_cross_entropy_with_logits: (),
    F.binary_cross_entropy: (0.5,),
    F.kl_div: (1,),
}
"""Losses of each number, with such numbers; "mean" divides by how many they are."""
_ENTROPIES = (F.cross_entropy, F.nll_loss)
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys("sum nansum mean count_nonzero any norm var std".split(), 0),
    **dict.fromkeys("amax max logsumexp".split(), -math.inf),
    **dict.fromkeys("amin min".split(), math.inf),
    **dict.fromkeys("prod all".split(), 1),
}
"""Reductions over the picked entries, and the number of all others that changes none."""
_OF_NUMBERS = {
    **{name: name for name in "add sub mul mod neg pow abs".split()},
    **{"truediv": "div", "div": "div", "floordiv": "floor_divide", "sym_max": "maximum", "sym_min": "minimum"},
    **{"sym_float": "clone", "max": "maximum", "min": "minimum"},
}
"""Names of functions that Python's numbers are made with -> of the same functions of tensors."""


def sum_picked(gm: fx.GraphModule, counts: Collection[Any], kept: Collection[fx.Node]) -> None:
    """Rewrite what picks of a graph and its nested regions are used for.

    Args:
        counts: the number of tokens, in all its symbols. kept: nodes that are read beside the graph.
    """
    mode = fake_mode_of(gm.graph.nodes)
    if mode is None:
        return
    modules = graph_modules(gm)
    written = {memory_of(target) for m in modules for node in m.graph.nodes for target in written_nodes(node)}
    for module in modules:
        done: set[fx.Node] = set()
        while found := {
            n: pick
            for n in module.graph.nodes
            if n not in done and (pick := _picked(n, counts)) and memory_of(pick[1]) not in written
        }:
            mask = next(iter(found.values()))[1]
            group = {n: x for n, (x, other) in found.items() if _is_again(mask, other, written)}
            done |= {*group}
            _Wholes(module.graph, mask, group, mode, written, kept).rewrite()


def read_by_mask(gm: fx.GraphModule, counts: Collection[Any]) -> None:
    """Let what reads or writes tokens at all places where a mask is true do so by the mask; of a graph and its nested
    regions.

    x[mask.nonzero(as_tuple=True)]                      x[mask]
    x.index_select(0, mask.nonzero().squeeze(-1))       x[mask], of a flat mask
    h[torch.where(mask)] = y                            h[mask] = y

    Args:
        counts: as of `sum_picked`.
    """
    mode = fake_mode_of(gm.graph.nodes)
    modules = graph_modules(gm) if mode is not None else ()
    written = {memory_of(target) for m in modules for node in m.graph.nodes for target in written_nodes(node)}
    for node in [node for module in modules for node in module.graph.nodes]:
        mask: Any = node.args[0] if len(node.args) == 1 else None
        if op_name(node) in ("nonzero", "where") and isinstance(mask, fx.Node) and memory_of(mask) not in written:
            told = value_of(mask)
            if isinstance(told, Tensor) and told.dtype is torch.bool and _is_of_tokens(told, counts):
                _read_by_mask(node, mask, mode, counts)


def _read_by_mask(node: fx.Node, mask: fx.Node, mode: FakeTensorMode, counts: Collection[Any]) -> None:
    places = _places(node, value_of(mask).ndim)
    for user in dict.fromkeys(user for place in places for user in place.users):
        read = _read_at(user, places, mask, counts)
        if read is not None:
            user.op, user.kwargs, (user.target, user.args) = "call_function", {}, read
    with node.graph.inserting_before(node), mode:
        pick = node.graph.call_function(operator.getitem, (mask, mask))  # which is asked how many they are
        first: Any = value_of(node)
        size = (first if isinstance(first, Tensor) else first[0]).shape[0]
        pick.meta = node.meta | {"example_value": torch.empty(size, dtype=torch.bool, device=value_of(mask).device)}
    for asked in (*places, node):
        for user in [*asked.users]:
            if user.target is _aten.sym_size.int and user.args[1] == 0:
                user.args = (pick, 0)
    for dead in (*places, node, pick):
        if not dead.users:
            dead.graph.erase_node(dead)


def _places(node: fx.Node, ndim: int) -> dict[fx.Node, int]:
    """Nodes that hold the places of one dim, (N,), of a node that gives those of all dims -> the dim."""
    if not isinstance(value_of(node), Tensor):
        return {user: user.args[1] for user in node.users if isinstance(user.args[1], int)}  # type: ignore[misc]
    found: dict[fx.Node, int] = {}
    for user in node.users:
        index: Any = user.args[1] if len(user.args) > 1 else None
        if user.target is operator.getitem and isinstance(index, tuple) and index[:1] in ((slice(None),), (Ellipsis,)):
            if len(index) == 2 and isinstance(index[1], int):
                found[user] = index[1] % ndim
        elif op_name(user) == "unbind" and bind(user, ("input", "dim")).get("dim") in (1, -1):
            found |= {each: each.args[1] for each in user.users}  # type: ignore[dict-item]
        elif ndim == 1 and op_name(user) in (*_SAME, "squeeze") and getattr(value_of(user), "ndim", 0) == 1:
            found[user] = 0
    return found


def _read_at(node: fx.Node, places: Mapping[fx.Node, int], mask: fx.Node, counts: Collection[Any]) -> Any:
    """(function, arguments) where a node reads or writes a tensor of the mask's dims at its places."""
    if op_name(node) == "index_select":
        given = bind(node, ("input", "dim", "index"))
        x, index, value = given["input"], (given["index"],) if given["dim"] == 0 else (), ()
    elif node.target in (operator.getitem, operator.setitem):
        x, index, *value = node.args
        index = index if isinstance(index, tuple) else (index,)
    else:
        return None
    told, held = value_of(mask), value_of(x)
    dims, behind = [places.get(each) if isinstance(each, fx.Node) else None for each in index], index[told.ndim :]
    tokens = dict.fromkeys(counts, min(counts, key=str))
    if dims[: told.ndim] != [*range(told.ndim)] or any(each != slice(None) for each in behind):
        return None
    if not isinstance(held, Tensor) or _shape(held, tokens)[: told.ndim] != _shape(told, tokens):
        return None
    return operator.setitem if value else operator.getitem, (x, mask, *value)


def _picked(node: fx.Node, counts: Collection[Any]) -> tuple[fx.Node, fx.Node] | None:
    """(x, mask) of x[mask], for a mask of tokens."""
    x, mask = _indexed(node)
    return (x, mask) if mask is not None and _is_of_tokens(value_of(mask), counts) else None


def _indexed(node: fx.Node, same: Mapping[Any, Any] | None = None) -> tuple[Any, Any]:
    """(x, mask) of x[mask], for bools; else (None, None). same: what stands for some sizes."""
    nothing = None, None
    if op_name(node) not in ("getitem", "masked_select") or len(node.args) != 2 or node.kwargs:
        return nothing
    x, mask = node.args
    if isinstance(mask, tuple) and all(entry == slice(None) for entry in mask[1:]):
        mask = mask[0]
    if not isinstance(x, fx.Node) or not isinstance(mask, fx.Node):
        return nothing
    values = value_of(x), value_of(mask)
    if not all(isinstance(value, Tensor) for value in values) or values[1].dtype is not torch.bool:
        return nothing
    shapes = [_shape(value, same) for value in values]
    return nothing if op_name(node) == "masked_select" and shapes[0] != shapes[1] else (x, mask)


def _is_of_tokens(mask: Tensor, counts: Collection[Any]) -> bool:
    return any(expression(size).free_symbols & {*counts} for size in mask.shape)


def _is_again(a: Any, b: Any, written: Collection[Any]) -> bool:
    """True if two arguments are one, or are computed in the same way from memory that nothing writes into."""
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and a == b
    if a.op not in ("call_function", "call_method") or a.target != b.target or a.kwargs or b.kwargs:
        return False
    pure = not draws_random_numbers(a) and not any(memory_of(n) in written for n in (a, b, *a.all_input_nodes))
    alike = len(a.args) == len(b.args) and all(_is_again(x, y, written) for x, y in zip(a.args, b.args, strict=True))
    return pure and alike


@dataclass(frozen=True)
class _Sizes:
    """Makes the nodes that stand for one node, by `new`. mask: (B, T), or flat."""

    new: Callable[..., fx.Node]
    mask: fx.Node

    @property
    def rows(self) -> int:
        """How many dims stand in the place of the picked entries'."""
        return value_of(self.mask).ndim

    def chosen(self, x: fx.Node, number: float = 0) -> fx.Node:
        """All tokens of `x`, a number for those that the mask doesn't pick."""
        held, mask = value_of(x), self.mask
        if held.ndim > self.rows:
            mask = self.new("reshape", mask, (*self.sizes, *[1] * (held.ndim - self.rows)))
        if isinstance(number, float) and not held.is_floating_point():
            number = torch.iinfo(held.dtype).max if number > 0 else torch.iinfo(held.dtype).min
        return self.new(torch.where, mask, x, bool(number) if held.dtype is torch.bool else number)

    @property
    def sizes(self) -> list[fx.Node]:
        return [self.new("size", self.mask, dim) for dim in range(self.rows)]

    def count(self) -> fx.Node:
        """() float64: how many tokens are picked."""
        return self.new("double", self.new(torch.sum, self.mask))


class _Wholes:
    """Rewrites what follows from the picks of one mask.

    Args:
        picks: the node of a pick -> the tensor that it picks from.
        written: memory that nodes write into. kept: nodes that are read beside the graph.
    """

    def __init__(
        self,
        graph: fx.Graph,
        mask: fx.Node,
        picks: Mapping[fx.Node, fx.Node],
        mode: FakeTensorMode,
        written: Collection[Any],
        kept: Collection[fx.Node],
    ) -> None:
        self.graph, self.mask, self.picks, self.mode = graph, mask, picks, mode
        self.written, self.kept = written, kept
        sizes = [expression(value_of(pick).shape[0]) for pick in picks]
        self.same = {size: sizes[0] for size in sizes if size.is_symbol}
        """How many are picked, once more -> the first time."""
        self.whole: dict[fx.Node, fx.Node | list[fx.Node]] = {}
        """A node of picked rows -> the same of all tokens; of one that gives several tensors, for each."""
        self.numbers: dict[fx.Node, fx.Node] = {}
        """A number made from how many there are -> the tensor of no dims."""
        self.asserted: dict[fx.Node, None] = {}
        """Nodes that only say that such a number is one that sizes may have."""

    def rewrite(self) -> None:
        for node in [*self.graph.nodes]:
            made = self._whole(node)
            if made is not None:
                self.whole[node] = made
            elif not self._number(node):
                self._end(node)
        self._erase()

    def _at(self, node: fx.Node) -> _Sizes:
        return _Sizes(maker(node, self.mode), self.mask)

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a node that are picked rows."""
        return [n for n in node.all_input_nodes if n in self.whole]

    def _shape(self, value: Any) -> list[Any]:
        return _shape(value, self.same)

    def _size(self, value: Any) -> Any:
        """How many entries the first dim has; None: there is no dim."""
        return self._shape(value)[0] if isinstance(value, Tensor) and value.ndim else None

    def _of(self, node: fx.Node) -> Any:
        return self.whole.get(node, self.numbers.get(node, node))

    def _erase(self) -> None:
        """Take out what nothing reads any more."""
        mine = {*self.whole, *self.numbers, *self.asserted}
        for node in reversed([*self.graph.nodes]):
            if node in mine and not node.users and node not in self.kept:
                self.graph.erase_node(node)

    # -- what gives picked rows ----------------------------------------------------------------------------

    def _whole(self, node: fx.Node) -> fx.Node | list[fx.Node] | None:
        """A node of picked rows, on all tokens; None: it is none, or is not followed."""
        if node in self.picks:
            return self._at(node).chosen(node.args[0])  # another one than before, where a write has put it there
        known = self._read(node)
        if not known or node in self.kept or node.op not in ("call_function", "call_method"):
            return None
        name, first = op_name(node), node.args[0] if node.args else None
        if name == "getitem" and isinstance(value_of(first), list | tuple):
            return self.whole[first][node.args[1]]  # type: ignore[index]
        values = tree_leaves(value_of(node))
        if any(isinstance(self.whole[n], list) for n in known):
            return None
        rows = self._size(value_of(known[0]))
        if not all(isinstance(x, Tensor) and self._size(x) == rows for x in values) or self._is_written(node, known):
            return None
        if node.target in (*_LOSSES, *_ENTROPIES):
            return self._losses(node) if bind(node)["reduction"] == "none" else None
        for way in (self._of_each, self._over_features, self._of_rows):
            found = way(node, name, known)
            if found is not None:
                return found
        return None

    def _is_written(self, node: fx.Node, known: Sequence[fx.Node]) -> bool:
        """True if a node writes, or reads or gives memory that something else writes into."""
        return bool(written_nodes(node)) or any(memory_of(n) in self.written for n in (node, *known))

    def _of_each(self, node: fx.Node, name: str, known: Sequence[fx.Node]) -> fx.Node | None:
        """An op of each number."""
        of_two = name in ("min", "max") and len(node.all_input_nodes) == 2
        if not (of_two or name in _OF_EACH or name in _FINITE_AT) or not self._alike(node, known):
            return None
        numbers = _FINITE_AT.get(name, ())
        if name == "pow":
            power = bind(node, ("input", "exponent")).get("exponent")
            numbers = () if isinstance(power, int) and power >= 0 else numbers
        if len(numbers) > 1 and not isinstance(bind(node, ("input", "other")).get("other"), fx.Node):
            numbers = ()  # by a number
        return self._run(node, numbers)

    def _alike(self, node: fx.Node, known: Sequence[fx.Node]) -> bool:
        """True if picked rows meet row by row, and no other operand has more than one row."""
        ndim = value_of(node).ndim
        others = [value_of(n) for n in node.all_input_nodes if n not in known and n not in self.numbers]
        if any(value_of(n).ndim != ndim for n in known) or not all(isinstance(x, Tensor) for x in others):
            return False
        return all(x.ndim < ndim or self._size(x) == 1 for x in others)

    def _over_features(self, node: fx.Node, name: str, known: Sequence[fx.Node]) -> fx.Node | list[fx.Node] | None:
        """An op over dims behind the picked entries'."""
        name = name.removeprefix("linalg_")
        names = _WITH_DIM.get(name)
        if (
            names is None
            or len(node.args) > len(names)
            or len(known) < len(node.all_input_nodes)
            or any(n not in self.whole for n in known)
        ):
            return None
        given = bind(node, names)
        more = 1 if name in ("unsqueeze", "stack") else 0
        dims = _from_behind(given.get("dim", given.get("axis", _DIMS.get(name))), value_of(known[0]).ndim + more)
        ranks = {value_of(n).ndim for n in known}
        if dims is None or len(ranks) > 1 or given.keys() - {*names, "axis", "dtype", "_stacklevel"}:
            return None
        if name in _PARTS:
            return self._parts(node, given["input"], dims)
        tensors = [given[key] for key in names if key in ("input", "other", "tensors")]
        rest = {key: value for key, value in given.items() if key not in ("input", "other", "tensors", "axis", "dim")}
        return self._run(node, _FINITE_OVER.get(name, ()), tensors, {**rest, "dim": dims})

    def _parts(self, node: fx.Node, x: fx.Node, dim: Any) -> list[fx.Node] | None:
        new, whole, begin = self._at(node).new, self.whole[x], 0
        if op_name(node) == "unbind":
            return [new("select", whole, dim, i) for i in range(len(value_of(node)))]
        sizes = [value.shape[dim] for value in value_of(node)]
        if not all(isinstance(size, int) for size in sizes):
            return None
        found: list[fx.Node] = []
        for size in sizes:
            found.append(new("narrow", whole, dim, begin, size))
            begin += size
        return found

    def _of_rows(self, node: fx.Node, name: str, known: Sequence[fx.Node]) -> fx.Node | None:
        """An op of each row, or of what rows hold."""
        first: Any = node.args[0] if node.args else None
        rows = self._at(node).rows
        if name == "dropout" and known == [first]:
            given = bind(node, ("input", "p", "training"))
            return self.whole[first] if given.get("p") == 0 or given.get("training") is False else None  # type: ignore
        if name in ("transpose", "permute") and known == [first]:
            dims = node.args[1] if isinstance(node.args[1], Sequence) else node.args[1:]
            dims = [dim % value_of(first).ndim for dim in dims if isinstance(dim, int)]
            if name == "transpose" and len(dims) == 2 and 0 not in dims:
                return self._at(node).new("transpose", self.whole[first], *(d - value_of(first).ndim for d in dims))
            if name == "permute" and dims[:1] == [0]:
                return self._at(node).new(
                    "permute", self.whole[first], [*range(rows), *(d + rows - 1 for d in dims[1:])]
                )
            return None
        if name in _SAME and known == [first]:
            at, behind = self._at(node), value_of(node).shape[1:]
            if self._shape(value_of(node)) == self._shape(value_of(first)):
                return self.whole[first]  # type: ignore[return-value]
            if all(isinstance(size, int) for size in behind):
                return at.new("reshape", self.whole[first], (*at.sizes, *behind))
        if name == "getitem":
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            if known == [first] and _of_features(index):
                places = index if index[0] is Ellipsis else (*[slice(None)] * rows, *index[1:])
                return self._at(node).new(operator.getitem, self.whole[first], places)
            if first not in self.whole and index == (known[0],) and value_of(known[0]).dtype is not torch.bool:
                return self._at(node).chosen(self._run(node))
            if first in self.whole and len(index) == 2 and index[1] in known and self._counts_rows(index[0]):
                if value_of(first).ndim == 2 and value_of(index[1]).ndim == 1:
                    new = self._at(node).new
                    place = new("unsqueeze", self.whole[index[1]], -1)
                    return new("squeeze", new(torch.gather, self.whole[first], -1, place), -1)
        if name == "embedding" and known == [bind(node)["input"]]:
            return self._at(node).chosen(self._run(node))  # other rows of the table may hold nan
        if name not in _OF_LAST or known != [first] or (name != "one_hot" and value_of(first).ndim < 2):
            return None
        if name in _OF_NORMS:
            eps = bind(node, _OF_NORMS[name]).get("eps")
            return self._run(node) if eps is None or (isinstance(eps, float) and eps >= _SMALLEST_EPS) else None
        if name == "matmul" and value_of(node.args[1]).ndim > 2:  # type: ignore[arg-type]
            return None
        if name == "glu" and _from_behind(bind(node, ("input", "dim")).get("dim", -1), value_of(first).ndim) != -1:
            return None
        return self._run(node)

    def _counts_rows(self, index: Any) -> bool:
        """True if a node is arange(N), N the number of rows that are picked."""
        return (
            isinstance(index, fx.Node)
            and index.target is torch.arange
            and index.args[:1] in [(n,) for n in self.numbers if n.target is _aten.sym_size.int]
        )

    def _run(
        self, node: fx.Node, numbers: Sequence[float] = (), args: Any = None, kwargs: Mapping[str, Any] | None = None
    ) -> fx.Node:
        """A node on all tokens. numbers: at which it is finite, of its operands in turn. args, kwargs: others than it
        has."""
        at = self._at(node)
        given: Any = (node.args, node.kwargs) if args is None else (tuple(args), kwargs)
        operands = dict.fromkeys(n for n in tree_leaves(given) if isinstance(n, fx.Node))
        safe: dict[fx.Node, fx.Node] = {}
        for place, operand in enumerate(operands):
            if numbers and operand in self.whole:
                safe[operand] = at.chosen(self._of(operand), numbers[min(place, len(numbers) - 1)])
        args, kwargs = fx.map_arg(given, lambda n: safe.get(n) or self._of(n))
        return self._like(at.new(node.target, *args, **kwargs), node)

    def _like(self, made: fx.Node, node: fx.Node) -> Any:
        """A new node whose results have the dtypes of an old one's, on which autocast decided; a node for each of
        several results."""
        value = value_of(made)
        if not isinstance(value, list | tuple):
            return _like(made, node, self.mode)
        return [self._at(node).new(operator.getitem, made, i) for i in range(len(value))]

    # -- how many there are --------------------------------------------------------------------------------

    def _number(self, node: fx.Node) -> bool:
        """True if a node makes a number of how many tokens are picked, or asserts something of it; notes such nodes."""
        read: list[Any] = [n for n in node.all_input_nodes if n in self.numbers]
        if node.target is _aten._assert_scalar.default and node.args[0] in self.asserted:
            self.asserted[node] = None
            return True
        if not isinstance(value_of(node), SymInt | SymFloat | SymBool):
            return False
        name, at = op_name(node), self._at(node)
        if node.target is _aten.sym_size.int and node.args[0] in self.whole and node.args[1] == 0:
            self.numbers[node] = at.count()
        elif node.target is _aten.sym_numel.default and node.args[0] in self.whole:
            sizes = value_of(node.args[0]).shape[1:]
            if not all(isinstance(size, int) for size in sizes):
                return False
            self.numbers[node] = at.new("mul", at.count(), math.prod(sizes))
        elif read and name in _OF_NUMBERS and not node.kwargs:
            tensors = [
                at.new(torch.full, (), n, dtype=torch.float64) if not self._is_number(n) else self._of(n)
                for n in node.args
            ]
            self.numbers[node] = at.new(getattr(torch, _OF_NUMBERS[name]), *tensors)
        elif not read and not self.asserted.keys() & {*node.all_input_nodes}:
            return False
        self.asserted[node] = None
        return True

    def _is_number(self, x: Any) -> bool:
        return isinstance(x, fx.Node) and x in self.numbers

    # -- what reads picked rows, and gives none ------------------------------------------------------------

    def _end(self, node: fx.Node) -> None:
        """Let a sum, a loss, a write, or what is divided by how many there are, read all tokens."""
        known = self._read(node)
        if node in self.kept or any(isinstance(self.whole[n], list) for n in known):
            return
        if node.target is operator.setitem or node.target in (
            "masked_scatter",
            "masked_scatter_",
            torch.masked_scatter,
        ):
            return self._write(node, known)
        if not isinstance(value_of(node), Tensor) or written_nodes(node) or memory_of(node) in self.written:
            return None
        if any(memory_of(n) in self.written for n in known):
            return None
        x, mask = _indexed(node, self.same)
        if x in self.whole and mask in self.whole:
            # Written anew, as its sizes are those of others; of all tokens, it is a pick of another mask.
            node.op, node.target = "call_function", operator.getitem
            node.args = (self.whole[x], self._at(node).chosen(self.whole[mask]))  # type: ignore[arg-type]
            return None
        if known and node.target in (*_LOSSES, *_ENTROPIES):
            made = self._loss(node)
        elif known:
            made = self._reduced(node, known)
        elif any(n in self.numbers for n in node.all_input_nodes) and op_name(node) in (
            "div",
            "truediv",
            "mul",
            "add",
            "sub",
        ):
            new = self._at(node).new
            args = fx.map_arg(node.args, self._of)
            made = None if node.kwargs else new(node.target, *args)
        else:
            return None
        if made is not None:
            if (dtype := value_of(node).dtype) != value_of(made).dtype:
                made = self._at(node).new("to", made, dtype)
            node.replace_all_uses_with(made)
            self.graph.erase_node(node)
        return None

    def _loss(self, node: fx.Node) -> fx.Node | None:
        """A loss with reduction: a sum of losses of tokens, divided by how many they are."""
        given, at = bind(node), self._at(node)
        kind = given["reduction"]
        if (given.get("size_average"), given.get("reduce")) != (None, None) or kind not in ("mean", "sum", "batchmean"):
            return None  # older words for the reduction
        if node.target in _ENTROPIES and not value_of(given["target"]).is_floating_point():
            return self._losses(node, kind)
        each = self._losses(node)
        entries = None if each is None else [1] if kind == "batchmean" else value_of(each).shape[at.rows :]
        if each is None or entries is None or not all(isinstance(size, int) for size in entries):
            return None
        total = at.new(torch.sum, at.chosen(each))
        if kind != "sum":
            total = at.new(torch.div, total, at.new("mul", at.count(), math.prod(entries)))
        return total

    def _losses(self, node: fx.Node, reduction: str = "none") -> fx.Node | None:
        """Losses, of all tokens; or reduced, where tokens that are not picked have a label that is ignored."""
        given, at = dict(bind(node)), self._at(node)
        known = {name: x for name, x in given.items() if isinstance(x, fx.Node) and x in self.whole}
        shapes = [self._shape(value_of(x)) for x in known.values()]
        if node.target not in _ENTROPIES:
            others = [value_of(x) for x in given.values() if isinstance(x, fx.Node) and x not in known.values()]
            if any(shape != shapes[0] for shape in shapes) or any(x.ndim >= len(shapes[0]) for x in others):
                return None
            numbers = _LOSSES[node.target]
            given |= {n: at.chosen(self._of(x), numbers[0]) if numbers else self._of(x) for n, x in known.items()}
            return _like(at.new(node.target, **given | {"reduction": reduction}), node, self.mode)
        if known.keys() != {"input", "target"}:
            return None
        scores, targets, flat = self._of(known["input"]), self._of(known["target"]), at.rows - 1
        soft = value_of(targets).is_floating_point()
        if len(shapes[0]) != 2 or len(shapes[1]) != (2 if soft else 1):
            return None
        targets = targets if soft else at.chosen(targets, given["ignore_index"])
        scores, targets = (at.new("flatten", x, 0, flat) if flat else x for x in (scores, targets))
        made = at.new(node.target, **given | {"input": scores, "target": targets, "reduction": reduction})
        return _like(at.new("reshape", made, tuple(at.sizes)) if reduction == "none" else made, node, self.mode)

    def _reduced(self, node: fx.Node, known: Sequence[fx.Node]) -> fx.Node | None:
        """A reduction over the picked entries, and perhaps over more dims."""
        name, at = op_name(node), self._at(node)
        name = "norm" if name in ("vector_norm", "linalg_vector_norm") else name
        names = ("input", "p", "dim", "keepdim") if name == "norm" else ("input", "dim", "keepdim")
        given, deviates = bind(node, names), name in ("var", "std")
        power = given.pop("ord", given.pop("p", 2))
        more = {"mean": {"dtype"}, "var": {"correction", "unbiased"}, "std": {"correction", "unbiased"}}
        if name not in _NEUTRAL or known != [given.get("input")] or given.keys() - {*names, *more.get(name, ())}:
            return None
        if len(node.args) > (2 if deviates else len(names)) or isinstance(given.get("dim"), bool):
            return None
        dims = _reduced_dims(given.get("dim"), value_of(known[0]).ndim)
        named = given.get("dim") is not None
        if dims is None or (named and name in ("max", "min", "prod")):
            return None
        x, entries = self._of(known[0]), [value_of(known[0]).shape[dim] for dim in dims[1:]]
        over = [*range(at.rows), *(dim + at.rows - 1 for dim in dims[1:])]
        if name == "norm":
            if not isinstance(power, int | float) or power < 1:
                return None
            found = at.new(torch.linalg.vector_norm, at.chosen(x), power, over, True)
        elif name in more:
            if not all(isinstance(size, int) for size in entries):
                return None
            found = self._mean(at, x, over, entries, name, given)
        else:
            found = at.chosen(x, _NEUTRAL[name])
            op = {"max": torch.amax, "min": torch.amin}.get(name) or getattr(torch, name)
            if name in ("any", "all"):
                for dim in over:
                    found = at.new(op, found, dim, True)
            elif name in ("prod", "count_nonzero"):
                return None if given.get("keepdim") else at.new(op, found, *([] if name == "prod" else [over]))
            else:
                found = at.new(op, found, over, True)
        if not given.get("keepdim"):
            return at.new("squeeze", found, tuple(over))
        return at.new("flatten", found, 0, at.rows - 1) if at.rows > 1 else found

    def _mean(
        self, at: _Sizes, x: fx.Node, over: list[int], entries: Sequence[int], name: str, given: Mapping[str, Any]
    ) -> fx.Node:
        """The mean, variance or deviation, with dims of 1 entry."""
        new, value = at.new, value_of(x)
        dtype = given.get("dtype") or value.dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        count = new("mul", at.count(), math.prod(entries))
        mean = new("to", new(torch.div, new(torch.sum, at.chosen(x), over, True, dtype=wide), count), wide)
        if name == "mean":
            return mean
        away = at.chosen(new(torch.sub, x, mean))
        less = given.get("correction", 1 if given.get("unbiased", True) else 0)
        squares = new(torch.sum, new(torch.square, away), over, True)
        found = new("to", new(torch.div, squares, new("clamp", new("sub", count, less), 0)), wide)
        if name == "var":
            return found
        zero = new(torch.eq, found, 0)  # where the gradient of the root is 0, as that of torch's
        return new(torch.where, zero, 0.0, new(torch.sqrt, new(torch.where, zero, 1.0, found)))

    def _write(self, node: fx.Node, known: Sequence[fx.Node]) -> None:
        """h[mask] = f(x[mask]), h.masked_scatter(mask, f(x[mask]))."""
        if node.target is operator.setitem:
            h, mask, value = node.args
        else:
            h, mask, value = (bind(node, ("input", "mask", "source")).get(key) for key in ("input", "mask", "source"))
        if (
            known != [value]
            or not isinstance(h, fx.Node)
            or mask in known
            or not _is_again(self.mask, mask, self.written)
        ):
            return
        at, held, whole = self._at(node), value_of(h), value_of(self.whole[value])  # type: ignore[index]
        if self._shape(whole) != self._shape(held) or whole.dtype != held.dtype:
            return
        behind = held.ndim - at.rows
        told = at.new("reshape", self.mask, (*at.sizes, *[1] * behind)) if behind else self.mask
        told = at.new("expand_as", told, h)  # in the symbols of its sizes
        new = at.new(torch.where, told, self.whole[value], h)  # type: ignore[index]
        if written_nodes(node):
            if replace_written(node, h, new, self.mode):
                self.graph.erase_node(node)
            else:
                self.graph.erase_node(new)
        else:
            node.replace_all_uses_with(new)
            self.graph.erase_node(node)


def _like(made: fx.Node, node: fx.Node, mode: FakeTensorMode) -> fx.Node:
    """A new node whose result has the dtype of an old one's: autocast decided on it."""
    given: Any = value_of(made)
    with mode, torch.no_grad():
        made.meta["example_value"] = given.to(value_of(node).dtype).requires_grad_(given.requires_grad)
    return made


def _shape(value: Tensor, same: Mapping[Any, Any] | None = None) -> list[Any]:
    """A tensor's sizes. same: what stands for some of them."""
    return [expression(size).xreplace(same or {}) for size in value.shape]


def _of_features(index: Any) -> bool:
    """True if an index takes all rows, and numbers or slices of what is behind them."""
    plain = all(each is Ellipsis or each is None or isinstance(each, int | slice) for each in index)
    return plain and index[:1] in ((Ellipsis,), (slice(None),))


def _from_behind(given: Any, ndim: int) -> list[int] | int | None:
    """Dims counted from the last; None: the picked entries' is among them, or none is named."""
    dims = [given] if isinstance(given, int) else given
    if not isinstance(dims, Sequence) or not dims or not all(isinstance(dim, int) and dim % ndim for dim in dims):
        return None
    behind = [dim % ndim - ndim for dim in dims]
    return behind[0] if isinstance(given, int) else behind


def _reduced_dims(given: Any, ndim: int) -> list[int] | None:
    """The dims that are reduced; None where the picked entries' is not among them."""
    dims = [given] if isinstance(given, int) else range(ndim) if given is None else given
    found = sorted(dim % ndim for dim in dims) if all(isinstance(dim, int) for dim in dims) else []
    return found if found[:1] == [0] else None
