"""Tests by numbers that an op treats each token alone: what it gives for some tokens is what it gives for all, cut.

x (6, C)                  op(x)            a b c d e f
tokens 4 0 2 of x         op(x[4, 0, 2])   e a c          tokens 5 1 3     f b d

token_dims    compares some tokens with others, and finds the token dim of each result
SpotCheck     looks so at ops that `Sharding(local_ops=…)` names, when a graph is first called
check_op      tells along which dims an op treats tokens alone, before it is named there
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from cp_rewrite.batch.active import is_captured
from cp_rewrite.passes.graph.nodes import graph_modules
from cp_rewrite.passes.locality.rules.rule import vouched_calls
from cp_rewrite.passes.values.state import State
from cp_rewrite.torch_internals import (
    HigherOrderOperator,  # pyright: ignore
    TorchDispatchMode,  # pyright: ignore
)

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative norm error by dtype: kernels add up in other orders on other sizes."""
FEWEST_DIGITS = 0.1
"""The same limit for dtypes of fewer digits."""


class MixesTokens(Exception):
    """The op does more to tokens than treat each alone; the text says what."""


def token_dims(
    op: Callable[..., Any], args: Any, dims: Sequence[int | None], parts: Sequence[Tensor], whole: Any = None
) -> list[int]:
    """The token dim of each result of an op that treats tokens alone.

    Args:
        args: (positional, by name), which the op is given. dims: the token dim of each tensor among them.
        parts: (n,) int64 each: tokens, which the op is given without the others.
        whole: its results for all tokens, if known.
    Raises:
        MixesTokens: it does not treat them alone. Whatever the op raises.
    """
    wholes = tensors_of(run(op, args) if whole is None else whole)
    found: list[int | None] = [None] * len(wholes)
    for index in parts:
        cut = tensors_of(run(op, taken(args, dims, index)))
        if len(cut) != len(wholes):
            raise MixesTokens(f"gives {len(cut)} tensors for {len(index)} tokens, {len(wholes)} for all")
        for i, (part, result) in enumerate(zip(cut, wholes, strict=True)):
            dim = _token_dim(part, result, index)
            error = difference(part, result.index_select(dim, index))
            if error > limit_of([*wholes, *tensors_of(args)]):
                raise MixesTokens(
                    f"result {i} of {len(index)} tokens differs from that of all by {error:.1e} of its norm"
                )
            if found[i] not in (None, dim):
                raise MixesTokens(f"result {i} has its tokens in other dims for other tokens")
            found[i] = dim
    if not wholes:
        raise MixesTokens("gives no tensor")
    return [dim for dim in found if dim is not None]


def taken(args: Any, dims: Sequence[int | None], index: Tensor) -> Any:
    """Arguments of some of the tokens."""
    leaves, spec = tree_flatten(args)
    given = iter(dims)
    chosen = [next(given) if isinstance(leaf, Tensor) else None for leaf in leaves]
    cut = [x if dim is None else x.index_select(dim, index) for x, dim in zip(leaves, chosen, strict=True)]
    return tree_unflatten(cut, spec)


def halves(tokens: int, most: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two parts of up to `most` of so many tokens, in an order of their own."""
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[:most].to(device)
    return order[: len(order) // 2], order[len(order) // 2 :]


def difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm. Infinite where whole numbers differ, and where only one of two is NaN;
    entries that are equal, both NaN or both the same infinity, count as 0."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(actual, expected) else float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (x.detach().to(wide) for x in (actual, expected))
    unlike = ~((a == b) & a.isinf() | a.isnan() & b.isnan())
    error = float((a - b)[unlike].norm() / b[unlike].norm().clamp(min=1e-12))
    return error if error == error else float("inf")


def limit_of(tensors: Sequence[Tensor]) -> float:
    """The largest difference that is no mixing: that of the dtype of the fewest digits."""
    found = [LIMITS.get(x.real.dtype if x.is_complex() else x.dtype, FEWEST_DIGITS) for x in tensors if _inexact(x)]
    return max(found, default=0.0)


def _inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _token_dim(part: Tensor, whole: Tensor, index: Tensor) -> int:
    """The dim in which the result of all tokens has more entries than that of some."""
    if part.ndim == whole.ndim:
        other = [dim for dim in range(whole.ndim) if part.shape[dim] != whole.shape[dim]]
        if len(other) == 1 and part.shape[other[0]] == len(index):
            return other[0]
        if not other:
            raise MixesTokens(f"a result of shape {tuple(whole.shape)} has no token dim")
    raise MixesTokens(f"a result of shape {tuple(whole.shape)} has shape {tuple(part.shape)} for {len(index)} tokens")


def run(op: Callable[..., Any], args: Any) -> Any:
    """An op's results. args: (positional, by name)."""
    positional, named = args
    return op(*positional, **named)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


TOKENS = 256
"""At most so many are looked at: two blocks of most kernels."""


class SpotCheck(TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """Looks at each vouched op (`Sharding.local_ops`) the first time that it runs inside, in a graph's first call: what
    it gives for some of the tokens is what it gives for these and others, or the call raises.

    Not looked at are ops that write or draw random numbers, and those that raise on a part of the tokens.

    Args:
        calls: name of an op -> the token dim of each tensor that it is given, None of those without tokens.
    """

    def __init__(self, calls: Mapping[str, Sequence[int | None]]) -> None:
        super().__init__()
        self.calls = dict(calls)
        self.found: list[str] = []

    @staticmethod
    def of(state: State) -> SpotCheck:
        """A check of a rewritten graph. Nothing is looked at with `check_batches=False`."""
        sharding, modules = state.sharding, graph_modules(state.graph_module)
        nodes = [node for module in modules for node in module.graph.nodes]
        # Run one by one, such ops ask each mode for a rule of its own.
        higher = sharding.inner == "eager" and any(isinstance(n.target, HigherOrderOperator) for n in nodes)
        looks = sharding.local_ops and sharding.check_batches and not higher
        return SpotCheck(vouched_calls(nodes, state.locality.states, sharding.local_ops) if looks else {})

    def call(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Results of a compiled graph; its first call is looked at.

        Raises:
            RuntimeError: a vouched op mixes tokens.
        """
        if not self.calls or is_captured():
            return compiled(*args)
        with self:
            out = compiled(*args)
        self.calls.clear()
        if self.found:
            raise RuntimeError(
                f"{'; '.join(self.found)}. cp_rewrite.check_op says more; with check_batches=False no op is looked at"
            )
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        dims = self.calls.pop(func._schema.name, None)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if dims is not None and not func._schema.is_mutable and not seeded:
            try:
                with torch.no_grad():
                    _look(func, (args, kwargs), dims)
            except MixesTokens as mixes:
                self.found.append(f"{func._schema.name}, named in local_ops, does not treat tokens alone: {mixes}")
            except Exception:
                pass  # it does not take so few tokens
        return out


def _look(func: Any, args: Any, dims: Sequence[int | None]) -> None:
    """Compare a few tokens with one half and the other.

    Raises:
        MixesTokens: they differ.
    """
    tensors = tensors_of(args)
    sizes = {x.shape[dim] for x, dim in zip(tensors, dims, strict=True) if dim is not None}
    if len(sizes) != 1 or (tokens := sizes.pop()) < 2:
        return
    device = tensors[0].device
    few = taken(args, dims, torch.cat(halves(tokens, TOKENS, device)))
    whole, again = run(func, few), run(func, few)
    if all(torch.equal(a, b) for a, b in zip(tensors_of(again), tensors_of(whole), strict=True)):  # it has no state
        token_dims(func, few, dims, torch.arange(min(tokens, TOKENS), device=device).tensor_split(2), whole)


SEEDS = 3
"""Cuts that are tried."""
MOST = 64
"""Choices of dims that are tried for each length."""


@dataclass(frozen=True)
class TokenDims:
    """The finding on tokens in some dims of an op's arguments.

    Args:
        tokens: argument (its place, or its name; `0[1]` of a list's second tensor) -> its token dim.
        results: the token dim of each result; empty where tokens are not alone.
        why: what the op does to tokens; "" where it treats them alone.
    """

    tokens: Mapping[str, int]
    results: tuple[int, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        given = ", ".join(f"dim {dim} of argument {name}" for name, dim in self.tokens.items())
        if self.why:
            return f"mixed   {given}: {self.why}"
        results = ", ".join(f"dim {dim} of result {i}" for i, dim in enumerate(self.results))
        return f"alone   {given} -> {results}"


@dataclass(frozen=True)
class OpReport:
    """Result of `check_op`: true where the op treats tokens alone in the dims asked for, or, where none were, in some.

    Args:
        op: its name. ways: the dims that were tried. asked: they were named.
    """

    op: str
    ways: tuple[TokenDims, ...]
    asked: bool

    @property
    def alone(self) -> tuple[TokenDims, ...]:
        """Dims in which tokens are alone."""
        return tuple(way for way in self.ways if not way.why)

    def __bool__(self) -> bool:
        return bool(self.alone) and (not self.asked or len(self.alone) == len(self.ways))

    def __str__(self) -> str:
        return "\n".join([f"{self.op} treats tokens", *(f"  {way}" for way in self.ways)])


def check_op(
    op: Callable[..., Any], *args: Any, tokens: Mapping[int | str, int] | None = None, **kwargs: Any
) -> OpReport:
    """Run an op on some tokens and on all, forward and backward, and tell along which dims it treats each token alone.

        report = cp.check_op(torch.ops.my.op, x, weight, tokens={0: 1})     # x (B, T, C)
        assert report, report

    Each of three cuts puts the tokens into two parts in an order of their own. Results of a part must be those of all,
    at these tokens; so must gradients of arguments with tokens, and gradients of the others must add up. What holds
    for these numbers need not hold for all: give it numbers like those of training, and some 16 tokens or more.

    Args:
        op: takes and gives tensors; it is called as `op(*args, **kwargs)`.
        tokens: argument, by place or name -> its token dim. None: every dim of two entries or more is tried, alone and
            with dims of as many entries of other arguments.
    Raises:
        KeyError, ValueError: tokens names no tensor of the arguments, a dim that it does not have, or dims of several
            lengths. Whatever the op raises on all tokens.
    """
    named = _named(args, kwargs)
    asked = None if tokens is None else _asked(named, tokens)
    watched = _Watched(op, (args, kwargs), [*named.values()])
    ways = [watched.way([*named], dims) for dims in ([asked] if asked else _every([*named.values()]))]
    return OpReport(_name(op), tuple(ways), asked is not None)


class _Watched:
    """An op with arguments that are never written. trouble: why no dims are right: random numbers, writes."""

    def __init__(self, op: Callable[..., Any], args: Any, tensors: Sequence[Tensor]) -> None:
        self.op, self.args = op, tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, args)
        copy = self.args_copied()
        with torch.no_grad():
            first, again = run(op, copy), run(op, self.args_copied())
        written = any(difference(a, b) for a, b in zip(tensors_of(copy), tensors, strict=True))
        drawn = any(difference(a, b) > limit_of([b]) for a, b in zip(tensors_of(again), tensors_of(first), strict=True))
        self.trouble = "it writes into its arguments" if written else "it gives others each time" if drawn else ""

    def args_copied(self) -> Any:
        """The arguments, to be written into."""
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.args)

    def way(self, names: Sequence[str], dims: Sequence[int | None]) -> TokenDims:
        """Try tokens in these dims."""
        given = {name: dim for name, dim in zip(names, dims, strict=True) if dim is not None}
        count = next(x.shape[d] for x, d in zip(tensors_of(self.args), dims, strict=True) if d is not None)
        device = tensors_of(self.args)[0].device
        try:
            if self.trouble:
                raise MixesTokens(self.trouble)
            parts = [half for seed in range(SEEDS) for half in halves(count, count, device, seed)]
            with torch.no_grad():
                results = token_dims(self.op, self.args, dims, parts)
            for i in range(0, len(parts), 2):
                self._backward(dims, results, parts[i : i + 2], count)
        except MixesTokens as mixes:
            return TokenDims(given, why=str(mixes))
        except Exception as error:
            return TokenDims(given, why=f"raises {type(error).__name__} on a part: {str(error).partition(chr(10))[0]}")
        return TokenDims(given, tuple(results))

    def _backward(
        self, dims: Sequence[int | None], results: Sequence[int], parts: Sequence[Tensor], count: int
    ) -> None:
        """Compare the gradients of two parts with those of all `count` tokens."""
        everything = torch.arange(count, device=parts[0].device)
        try:
            whole = self._gradients(self.args, results, everything)
        except RuntimeError:  # it has no backward
            return
        cut = [self._gradients(taken(self.args, dims, index), results, index) for index in parts]
        for i, (expected, dim) in enumerate(zip(whole, dims, strict=True)):
            if expected is None:
                continue
            one, other = (each[i] for each in cut)
            if one is None or other is None:
                raise MixesTokens(f"tensor {i} of the arguments has a gradient from all tokens, and none from some")
            found = one + other if dim is None else torch.cat([one, other], dim)
            error = difference(found, expected if dim is None else expected.index_select(dim, torch.cat([*parts])))
            if error > limit_of([expected]):
                raise MixesTokens(f"the gradient of tensor {i} of the arguments differs by {error:.1e} of its norm")

    def _gradients(self, args: Any, results: Sequence[int], index: Tensor) -> list[Tensor | None]:
        """Gradients of the tensors among arguments of the tokens `index`. A result's own is drawn, equal for all."""
        args = tree_map(lambda x: x.clone().requires_grad_(_inexact(x)) if isinstance(x, Tensor) else x, args)
        inputs = tensors_of(args)
        outs = [(x, dim) for x, dim in zip(tensors_of(run(self.op, args)), results, strict=True) if x.requires_grad]
        if not outs:
            return [None] * len(inputs)
        weights = [_weight(x, dim, index) for x, dim in outs]
        trained = [x for x in inputs if x.requires_grad]
        grads = iter(torch.autograd.grad([x for x, _ in outs], trained, weights, allow_unused=True))
        return [next(grads) if x.requires_grad else None for x in inputs]


def _weight(out: Tensor, dim: int, index: Tensor) -> Tensor:
    """A random gradient of a result whose tokens are `index`."""
    shape = [int(index.max()) + 1 if i == dim else size for i, size in enumerate(out.shape)]
    size = shape[:dim] + shape[dim + 1 :]
    rows = [torch.randn(size, generator=torch.Generator().manual_seed(int(i))) for i in index]
    return torch.stack(rows, dim).to(out.device, out.dtype)


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """An op's tensors by place or name; `0[1]`: the second tensor of a list."""
    found: dict[str, Tensor] = {}
    for name, value in (*enumerate(args), *kwargs.items()):
        tensors = tensors_of(value)
        single = isinstance(value, Tensor)
        found.update({str(name) if single else f"{name}[{i}]": x for i, x in enumerate(tensors)})
    return found


def _asked(named: Mapping[str, Tensor], tokens: Mapping[int | str, int]) -> list[int | None]:
    """The token dim of each tensor, as the caller says."""
    given = {str(name): dim for name, dim in tokens.items()}
    unknown = [name for name in given if name not in named]
    if unknown or not given:
        raise KeyError(f"tokens names {unknown or 'nothing'}; the tensors of the arguments are {sorted(named)}")
    bad = [name for name, dim in given.items() if not -named[name].ndim <= dim < named[name].ndim]
    if bad:
        raise ValueError(f"tokens[{bad[0]!r}] is dim {given[bad[0]]} of a tensor of shape {tuple(named[bad[0]].shape)}")
    counts = {name: named[name].shape[dim] for name, dim in given.items()}
    if len({*counts.values()}) > 1 or min(counts.values()) < 2:
        raise ValueError(f"token dims must have one length of 2 or more, got {counts}")
    return [given[name] % x.ndim if name in given else None for name, x in named.items()]


def _every(tensors: Sequence[Tensor]) -> Iterator[list[int | None]]:
    """Every choice of dims of one length, of no dim in some of the tensors."""
    for count in sorted({size for x in tensors for size in x.shape if size > 1}):
        choices = [[None, *(dim for dim, size in enumerate(x.shape) if size == count)] for x in tensors]
        for dims in itertools.islice(itertools.product(*choices), MOST):
            if any(dim is not None for dim in dims):
                yield list(dims)


def _name(op: Any) -> str:
    schema = getattr(op, "_schema", None)
    return schema.name if schema is not None else str(getattr(op, "_qualified_op_name", getattr(op, "__name__", op)))
