"""Sizes that a checkpoint is given once, so that the first of equal blocks is the same graph as the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_rewrite.passes.capture.capture import give_sizes_once
from cp_rewrite.passes.graph.new_nodes import give_sizes
from cp_rewrite.passes.graph.nodes import region_calls, value_of
from cp_rewrite.torch_internals import expression, fake_mode_of, is_parameter
from tests.helpers.canary import captured, tensors_of


def layer(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).sin() * scale.shape[1]


def layers(x: Tensor, scale: Tensor) -> Tensor:
    for _ in range(3):
        x = checkpoint(layer, x, scale, use_reentrant=False)  # type: ignore[assignment]
    return x


def test_sizes_that_are_one_are_given_once() -> None:
    """In the first layer torch learns that both rows are of one length: until then it hands on two."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: list[Any]) -> Any:
        found.append(gm)
        return lambda *args: gm(*args)

    torch._dynamo.reset()
    x, scale = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 5, 1)
    for given in (x, scale):
        torch._dynamo.mark_dynamic(given, 1)
    run = torch.compile(layers, backend=backend, fullgraph=True)
    run(x, scale)
    (gm,) = found

    def inputs() -> list[int]:
        return [len(graph.find_nodes(op="placeholder")) for graph in region_calls(gm)]

    assert inputs() == [4, 3, 3]
    give_sizes_once(gm)
    assert inputs() == [3, 3, 3]
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
            module.recompile()
    x, scale = torch.randn(2, 7, 3, requires_grad=True), torch.randn(2, 7, 1)
    expected, out = layers(x, scale), run(x, scale)
    assert len(found) == 1
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (out, expected)))


def test_a_weight_stays_one_where_a_view_of_it_gets_other_sizes() -> None:
    """One that a model expands over its tokens: FSDP's are told by it, and it was handed on without memory."""
    weight = nn.Parameter(torch.randn(3))
    gm = captured(lambda x: x * weight.expand(x.shape[0], 3), torch.randn(5, 3), dynamic=(0,))
    (before,) = [node for node in tensors_of(gm) if is_parameter(value_of(node))]
    (tokens,) = [expression(value_of(node).shape[0]) for node in tensors_of(gm) if node is not before]
    (view,) = before.users
    give_sizes([*gm.graph.nodes], {tokens: 2 * tokens}, fake_mode_of(gm.graph.nodes))
    assert expression(value_of(view).shape[0]) == 2 * tokens
    assert is_parameter(value_of(before))
