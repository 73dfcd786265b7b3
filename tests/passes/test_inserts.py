"""Nodes that a rewrite puts between a node and its operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite import passes, torch_internals
from cp_rewrite.batch.active import active_plan
from cp_rewrite.passes.capture.capture import capture
from cp_rewrite.passes.graph import new_nodes
from cp_rewrite.passes.graph.diff import graph_diff, graph_lines
from cp_rewrite.passes.graph.new_nodes import FakeValues, fake_value
from cp_rewrite.passes.values.edits import Insert
from cp_rewrite.planning.plan_input import ROW_INDEX
from cp_rewrite.torch_internals import expression, fake_mode_of, memory_id
from tests.helpers.packed_model import capture as captured


def twice(x: Tensor, doc: Tensor) -> Tensor:
    """Attention, read by two nodes: one of them stands in a checkpoint."""
    mask = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
    x = x.unflatten(-1, (2, 8)).transpose(1, 2)
    out = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    return out.cos() + checkpoint(torch.sin, out, use_reentrant=False)


def times_index(x: Tensor, index: Tensor) -> Tensor:
    return x * index[:, None]


def test_one_reader_gets_another_operand() -> None:
    sharding = cp.Sharding(2, {"x": 1, "doc": 1}, cp.DocumentIds("doc"))
    batch = {"x": torch.randn(1, 6, 16), "doc": torch.tensor([[0, 0, 0, 1, 1, 1]])}
    before: list[str] = []
    after: list[str] = []

    def look(gm: fx.GraphModule) -> None:
        state = capture(gm, sharding, active_plan(sharding))
        for find in passes.FIND:
            state = find(state)
        assert not state.refusals
        graphs = [m.graph for m in state.graph_module.modules() if isinstance(m, fx.GraphModule)]
        readers = [node for graph in graphs for node in graph.nodes if node.name in ("cos", "sin")]
        inserts = [Insert(n, n.all_input_nodes[0], times_index, "to be seen", (ROW_INDEX,)) for n in readers]
        before.extend(graph_lines(state.graph_module))
        for change in passes.CHANGE:
            state = change(replace(state, locality=replace(state.locality, inserts=tuple(inserts))))
        after.extend(graph_lines(state.graph_module))

    with sharding.shard(batch) as local:
        captured(twice, local, look, {"x": 1, "doc": 1})
    added = [line.partition(" = ")[2] for line in graph_diff(before, after).splitlines() if line[0] == "+"]
    for line in ("mul(out, getitem_3)", "mul.cos()", "mul(out, getitem)", "sin(mul)"):
        assert line in added, added
    assert sum("tag_activation_checkpoint" in line and "cp_row_index" in line for line in added) == 1


def test_padded_heads_leave_the_token_count_open() -> None:
    """Two heads for four ranks: all_to_all pads heads of zeros, whose fakes must not pin the graph to one length."""
    sharding = cp.Sharding(4, {"x": 1, "doc": 1}, cp.DocumentIds("doc"), exchange="a2a")
    batch = {"x": torch.randn(1, 24, 16), "doc": torch.zeros(1, 24, dtype=torch.long)}

    def look(gm: fx.GraphModule) -> list[object]:
        state = capture(gm, sharding, active_plan(sharding))
        for run_pass in (*passes.FIND, *passes.CHANGE):
            state = run_pass(state)
        assert not state.refusals
        assert any("pad" in line for line in graph_lines(state.graph_module))
        return [expression(found.tokens) for found in state.tokens.inputs]

    with sharding.shard(batch) as local:
        assert not any(size.is_number for size in captured(twice, local, look, {"x": 1, "doc": 1}))


class Layers(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Attention in layers that are alike, but for one whose values are wider."""

    def forward(self, x: Tensor, doc: Tensor) -> Tensor:
        mask = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
        for width in (8, 8, 16, 8):
            q = x.unflatten(-1, (2, 8)).transpose(1, 2)
            v = q if width == 8 else torch.cat((q, q), -1)
            x = F.scaled_dot_product_attention(q, q, v, attn_mask=mask)[..., :8].transpose(1, 2).flatten(2)
        return x


def test_a_remembered_fake_value_is_what_the_op_gives() -> None:
    sharding = cp.Sharding(2, {"x": 1, "doc": 1}, cp.DocumentIds("doc"))
    batch = {"x": torch.randn(1, 24, 16), "doc": torch.zeros(1, 24, dtype=torch.long)}

    def told(value: Any, operands: list[Tensor]) -> list[object]:
        """All that can be told of an op's value: the geometry, and whose memory it has."""
        memory = [memory_id(x) for x in operands]
        return [
            (
                x.dtype,
                *map(expression, (*x.shape, *x.stride(), x.storage_offset())),
                [memory_id(x) == m for m in memory],
            )
            for x in tree_leaves(value)
        ]

    def look(gm: fx.GraphModule) -> int:
        state = capture(gm, sharding, active_plan(sharding))
        for run_pass in passes.PIPELINE:
            state = run_pass(state)
        nodes = [n for n in state.graph_module.graph.nodes if n.meta.get("cp_rewrite") and n.op != "placeholder"]
        mode = fake_mode_of(nodes)
        for node in nodes:
            operands = [x for n in node.all_input_nodes for x in tree_leaves(n.meta["example_value"])]
            tensors = [x for x in operands if isinstance(x, Tensor)]
            assert told(node.meta["example_value"], tensors) == told(fake_value(node, mode), tensors), (
                node.format_node()
            )
        return len(nodes)

    with sharding.shard(batch) as local:
        assert captured(Layers(), local, look, {"x": 1, "doc": 1}) > 40


@pytest.mark.parametrize(
    ("run", "ops"),
    [
        (lambda x, y: x.flatten(0, 1), 1),
        (lambda x, y: x + y, 1),
        (lambda x, y: x.view(torch.int32), 2),
        (lambda x, y: torch.complex(x, y).conj(), 4),
        (lambda x, y: x.split(2), 2),
        (lambda x, y: torch.ops.aten.expand_as.default(x, y), 2),
        (lambda x, y: x.nonzero(), 2),
    ],
    ids=["view", "new", "other dtype", "conj", "several views", "view of one of two", "size of its own"],
)
def test_what_is_remembered_of_ops(run: Callable[..., fx.Proxy], ops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op runs again unless it gives new memory, or a view of the only operand."""
    mode = torch_internals.FakeTensorMode(shape_env=ShapeEnv())
    ran: list[fx.Node] = []
    monkeypatch.setattr(new_nodes, "fake_value", lambda node, mode: (ran.append(node), fake_value(node, mode))[1])
    known = FakeValues(mode)
    for _ in range(2):
        graph = fx.symbolic_trace(run).graph
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["example_value"] = mode.from_tensor(torch.randn(4, 6))
            elif node.op != "output":
                node.meta["example_value"] = known.of(node)
    assert len(ran) == ops
