"""For tests of private parts of torch: what they say when torch changed one, and graphs as Dynamo hands them over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor


def canary(theirs: str, dependent: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test: its error says that torch changed `theirs`, a part on which `dependent`, ours, relies."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                raise AssertionError(f"torch {torch.__version__} changed {theirs}; {dependent} relies on it") from error

        return run

    return decorate


def captured(model: Callable[..., Any], *args: Any, dynamic: tuple[int, ...] = ()) -> fx.GraphModule:
    """The graph of a call. `dynamic`: places of arguments whose dim 0 is symbolic."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    for place in dynamic:
        torch._dynamo.mark_dynamic(args[place], 0)
    torch.compile(model, backend=backend, fullgraph=True)(*args)
    return graphs[0]


def tensors_of(gm: fx.GraphModule) -> list[fx.Node]:
    nodes = gm.graph.find_nodes(op="placeholder")
    return [node for node in nodes if isinstance(node.meta["example_value"], Tensor)]
