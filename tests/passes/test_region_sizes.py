"""Sizes that a checkpoint is given once: the first of equal blocks is the same graph as the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_rewrite.passes.capture.capture import give_sizes_once
from cp_rewrite.passes.graph.nodes import region_calls


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
