"""Which segments of a graph are compiled once: equal blocks are, and none that differ in what a compiler reads."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_rewrite.passes.graph.nodes import graph_modules, written_memory
from cp_rewrite.segments.compiled import description
from cp_rewrite.segments.cut import cut_graph

D = 4


class Block(nn.Module):
    """`body(block, x)`: what it computes; `option`: what may differ from block to block."""

    def __init__(self, option: Any, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.option, self.body = option, body
        self.weight = nn.Parameter(torch.randn(D, D))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = x * x.square().mean(-1, keepdim=True).rsqrt()
        return residual + self.body(self, F.linear(x, self.weight))


class Net(nn.Module):
    def __init__(self, options: tuple[Any, ...], body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(option, body) for option in options)
        self.start, self.end = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.start
        for block in self.blocks:
            x = block(x)
        return (x * x.square().mean(-1, keepdim=True).rsqrt()) * self.end


def count(net: Net) -> int:
    """How many of the blocks' segments are compiled. The graph runs on those alone, and gives what the net gives."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, _: list[Any]) -> Any:
        found.append((gm, [node.meta["grapharg"].example for node in gm.graph.find_nodes(op="placeholder")]))
        return gm.forward

    torch._dynamo.reset()
    x = torch.randn(2, 3, D)
    torch.manual_seed(0)
    torch.compile(net, backend=backend, fullgraph=True)(x)
    for number, body in enumerate(graph_modules(found[0][0])[1:]):
        for node in body.graph.nodes:
            node.meta["ac_graph_id"] = number  # as torch 2.11 marks a checkpoint's nodes where it runs
    (gm, inputs), units = found[0], {id(w): i for i, b in enumerate(net.blocks, 1) for w in b.parameters()}
    values: dict[fx.Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    classes: dict[Any, Any] = {}
    described: list[Any] = []
    placed = {node: units.get(id(value), 0) for node, value in values.items() if isinstance(value, nn.Parameter)}
    assert [s.unit for s in cut_graph(gm, placed)] == [0, *range(1, len(net.blocks) + 1), 0]
    torch.manual_seed(0)
    for segment in cut_graph(gm, placed):
        given = [values[node] if node in values else node.meta["example_value"] for node in segment.inputs]
        examples = [node.meta["example_value"] for node in segment.inputs]
        described.append(description(segment, examples, written_memory(gm)))
        shared = classes.setdefault(described[-1], segment.graph_module)
        values.update(zip(segment.outputs, shared(*given), strict=True))
    torch.manual_seed(0)
    torch.testing.assert_close(values[gm.graph.output_node().args[0][0]], net(x))  # type: ignore[index]
    return len(set(described[1:-1]))


def mutated(block: Any, x: Tensor) -> Tensor:
    block.seen.add_(block.option)
    return x


def counted(block: Any, x: Tensor) -> Tensor:
    return x + torch.ones(block.option).sum()


def in_dtype(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", block.option):
        return F.linear(x, block.weight).float()


BODIES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any, Any]] = {
    "factor": (lambda block, x: x * block.option, 2.0, 3.0),
    "sign of zero": (lambda block, x: torch.atan2(x, torch.full_like(x, block.option)), 0.0, -0.0),
    "number of another type": (lambda block, x: x.softmax(-1) ** block.option, 2, 2.0),
    "function": (lambda block, x: getattr(torch, block.option)(x), "sin", "cos"),
    "method": (lambda block, x: getattr(x, block.option)(), "sin", "cos"),
    "keyword": (lambda block, x: F.gelu(x, approximate=block.option), "none", "tanh"),
    "slice": (lambda block, x: F.pad(x[..., block.option :], (block.option, 0)), 1, 2),
    "dropout": (lambda block, x: F.dropout(x, block.option), 0.1, 0.2),
    "constant tensor": (lambda block, x: x * torch.tensor([block.option] * D), 2.0, 3.0),
    "dtype of a constant": (lambda block, x: x.to(torch.ones(1, dtype=block.option)).float(), torch.half, torch.double),
    "autocast": (in_dtype, torch.bfloat16, torch.float16),
    "in a checkpoint": (
        lambda block, x: checkpoint(lambda x: (x * block.option).sin(), x, use_reentrant=False), 2.0, 3.0,
    ),
    "shape": (counted, 2, 3),
    "a buffer that is written": (mutated, 1.0, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_blocks_that_differ_are_classes_of_their_own(name: str) -> None:
    body, one, other = BODIES[name]
    assert count(Net((one, one, one), body)) == 1
    assert count(Net((one, other, one, other), body)) == 2


def test_what_is_not_of_the_code_counts_too() -> None:
    """A frozen weight, its dtype, its strides, and one weight in the place of two."""
    net = Net((None,) * 5, lambda block, x: x @ block.weight if block.option is None else x @ block.option)
    blocks: Any = net.blocks
    blocks[1].weight.requires_grad_(False)
    blocks[2].weight = nn.Parameter(torch.randn(D, D).t())
    blocks[3].option = nn.Parameter(torch.randn(D, D))  # linear and matmul of one weight in the others
    assert count(net) == 4


def test_constants_of_a_graph_are_compared_where_nothing_writes_them() -> None:
    """As modules hold them that Dynamo did not make inputs."""

    def classes(first: Any, second: Any, body: Any) -> int:
        root, graph = nn.Module(), fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.ones(D)
        values: list[Any] = [x]
        for i, constant in enumerate((first, second)):
            weight = graph.placeholder(f"weight_{i}")
            weight.meta["example_value"] = nn.Parameter(torch.ones(D))
            setattr(root, f"constant_{i}", constant)
            held = graph.get_attr(f"constant_{i}")
            held.meta["example_value"] = constant
            product = graph.call_function(torch.mul, (values[-1], weight))
            values.append(graph.call_function(body, (held, product)))
            product.meta["example_value"] = values[-1].meta["example_value"] = torch.ones(D, requires_grad=True)
        graph.output((values[-1],))
        gm = fx.GraphModule(root, graph)
        weights = gm.graph.find_nodes(op="placeholder")[1:]
        segments = cut_graph(gm, {node: i for i, node in enumerate(weights, 1)})
        assert len(segments) == 2
        examples = [[node.meta["example_value"].detach() for node in segment.inputs] for segment in segments]
        written = written_memory(gm)
        return len({description(s, e, written) for s, e in zip(segments, examples, strict=True)})

    one = torch.arange(D)
    assert classes(one, one.clone(), torch.add) == 1
    assert classes(one, one + 1, torch.add) == 2
    assert classes(one, one.int(), torch.add) == 2
    assert classes(torch.zeros(0), torch.zeros(0), torch.add) == 1
    assert classes(torch.zeros(9999), torch.zeros(9999), torch.add) == 2, "large ones are told apart by memory"
    assert classes(one, one.clone(), operator.iadd) == 2, "each is written"
