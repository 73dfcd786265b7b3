"""A look at vouched ops (`Sharding.local_ops`) in a graph's first call: what they give for some of the tokens is what
they give for these and others, or the call raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cp_rewrite.batch.active.current import is_captured
from cp_rewrite.passes.graph.regions import graph_modules
from cp_rewrite.passes.locality.rules.vouched import vouched_calls
from cp_rewrite.passes.values.state import State
from cp_rewrite.torch_internals import HigherOrderOperator, TorchDispatchMode  # pyright: ignore

from .tokens_alone import MixesTokens, halves, run, taken, tensors_of, token_dims

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
