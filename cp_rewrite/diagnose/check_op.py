"""Tell by numbers whether an op treats each token alone, before it is named in `Sharding(local_ops=…)`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from cp_rewrite.calls.tokens_alone import MixesTokens, difference, halves, limit_of, run, taken, tensors_of, token_dims

SEEDS = 3
"""Cuts that are tried."""
MOST = 64
"""Choices of dims that are tried for each length."""


@dataclass(frozen=True)
class TokenDims:
    """What came of tokens in some dims of an op's arguments.

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
    """What `check_op` found: true where the op treats tokens alone in the dims asked for, or, where none were, in some.

    Args:
        op: its name. ways: the dims that were tried. asked: they were named.
    """

    op: str
    ways: tuple[TokenDims, ...]
    asked: bool

    @property
    def alone(self) -> tuple[TokenDims, ...]:
        """Those in which tokens are alone."""
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
        """What comes of tokens in these dims."""
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
        """Of each tensor among arguments of the tokens `index`. A result's own is drawn, for each token the same."""
        args = tree_map(lambda x: x.clone().requires_grad_(_trains(x)) if isinstance(x, Tensor) else x, args)
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
    rows = [torch.randn(shape[:dim] + shape[dim + 1 :], generator=_generator(int(i))) for i in index]
    return torch.stack(rows, dim).to(out.device, out.dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _trains(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """By place or name; `0[1]`: the second tensor of a list."""
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
