"""Test by numbers that an op treats each token alone: what it gives for some tokens is what it gives for all, cut.

x (6, C)                  op(x)            a b c d e f
tokens 4 0 2 of x         op(x[4, 0, 2])   e a c          tokens 5 1 3     f b d

Vouched ops (`Sharding.local_ops`) are looked at in a graph's first call: what they give for some of the tokens is what
they give for these and others, or the call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cp_rewrite.batch.active.current import is_captured
from cp_rewrite.passes.graph.regions import graph_modules
from cp_rewrite.passes.locality.rules.vouched import vouched_calls
from cp_rewrite.passes.values.state import State
from cp_rewrite.torch_internals import HigherOrderOperator, TorchDispatchMode  # pyright: ignore

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative norm error by dtype: kernels add up in other orders on other sizes."""
FEWEST_DIGITS = 0.1
"""The same limit for dtypes of fewer digits."""


class MixesTokens(Exception):
    """What an op does to tokens beside treating each alone."""


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
    """Where the result of all tokens has more entries than that of some."""
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
    """Looks at each vouched op the first time that it runs inside.

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
        """Of a rewritten graph. Nothing is looked at with `check_batches=False`."""
        sharding, modules = state.sharding, graph_modules(state.graph_module)
        nodes = [node for module in modules for node in module.graph.nodes]
        # Run one by one, such ops ask each mode for a rule of its own.
        higher = sharding.inner == "eager" and any(isinstance(n.target, HigherOrderOperator) for n in nodes)
        looks = sharding.local_ops and sharding.check_batches and not higher
        return SpotCheck(vouched_calls(nodes, state.locality.states, sharding.local_ops) if looks else {})

    def call(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What a compiled graph gives; its first call is looked at.

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
