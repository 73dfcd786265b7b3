"""Hooks that a block has before FSDP shards it. The twin has copies of them, which are traced: where a segment of the
graph runs inside a call of the block, they must not run once more, on what crosses between segments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from cp_rewrite.refusal import BACKWARD_HOOKS

_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")


def skip_hooks(block: nn.Module, is_segment: Callable[[Any], bool]) -> None:
    """Let the hooks that a block has now pass over calls whose first argument is a segment.

    Raises:
        ValueError: it has hooks of the backward, which is the segments' own.
    """
    if any(getattr(block, kind) for kind in _BACKWARD):
        raise ValueError(
            f"a {type(block).__name__} has a hook of its backward, which would see the gradients of a segment of the "
            f"graph: {BACKWARD_HOOKS}"
        )

    def outside(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            return None if args and is_segment(args[0]) else hook(module, args, *rest)

        return run

    for kind in _FORWARD:
        hooks = getattr(block, kind)
        for number, hook in hooks.items():
            hooks[number] = outside(hook)
