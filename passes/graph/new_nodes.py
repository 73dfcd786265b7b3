"""Nodes that passes add to a graph, with the fake values that Dynamo would have given them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cp_rewrite.torch_internals import FakeTensorMode, enable_python_dispatcher

_POSITION = ("stack_trace", "nn_module_stack", "source_fn_stack")


def call(node: fx.Node, values: Callable[[fx.Node], Any]) -> Any:
    """Run a node's function or method on other values of its operands."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values)
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def fake_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What a node gives on the fake values of its operands; it asks for no gradient."""
    # As Dynamo runs ops: without the dispatcher, `pad` would fix the token count to the example's.
    with mode, enable_python_dispatcher(), torch.no_grad():
        return call(node, lambda n: n.meta["example_value"])


def insert(before: fx.Node, emit: Callable[[], fx.Proxy], mode: FakeTensorMode, why: str) -> fx.Node:
    """Run `emit` on proxies in front of a node; the new nodes get its source position and fake values."""
    last = before.prev
    with before.graph.inserting_before(before):
        result = emit().node
    node = last.next
    while node is not before:
        node.meta.update(position_of(before), cp_rewrite=why)
        node.meta["example_value"] = fake_value(node, mode)
        node = node.next
    return result


def place_by(new: fx.Node, like: fx.Node, mode: FakeTensorMode, needs_gradient: bool) -> None:
    """Give a new node what `like` says of its place in the source, and the fake value of its own operands."""
    new.meta = {key: value for key, value in like.meta.items() if key != "example_value"}
    with tracing(mode):
        value = fake_value(new, mode)
    new.meta["example_value"] = value.detach().requires_grad_(needs_gradient) if isinstance(value, Tensor) else value


@contextmanager
def autocasts_open(autocasts: Iterable[Sequence[Any]]) -> Generator[None]:
    """Inside of autocast regions, which decide on dtypes. Args: autocasts: the arguments of those that a node stands
    in."""
    with ExitStack() as stack:
        for autocast in autocasts:
            entered = torch.amp.autocast_mode._enter_autocast(*autocast)
            stack.callback(torch.amp.autocast_mode._exit_autocast, entered)
        yield


def position_of(node: fx.Node) -> dict[str, Any]:
    """The part of a node's `meta` that says where in the model's source it comes from."""
    return {key: node.meta[key] for key in _POSITION if key in node.meta}


@contextmanager
def tracing(mode: FakeTensorMode) -> Generator[None]:
    """Run ops on fake tensors: no autograd, no new guards, since the shapes are those that Dynamo saw already."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.callback(setattr, mode, "allow_non_fake_inputs", mode.allow_non_fake_inputs)
        mode.allow_non_fake_inputs = True
        yield


def traced(run: Callable[..., Any], values: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """The ATen ops that `run` calls on values, among them fake tensors of `mode`.

    A detach is kept: torch from 2.15 on drops it unless a table of decompositions, here an empty one, is given, and
    gradients would flow where the function stops them.
    """
    with tracing(mode), mode, enable_python_dispatcher():
        return make_fx(run, decomposition_table={})(*(v.detach() if isinstance(v, Tensor) else v for v in values))
