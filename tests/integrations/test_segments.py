"""Where a graph is cut between the blocks of a model; the twin that is traced in its place."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from cp_rewrite.integrations.parallelize import check_shared_weights, drop_checkpoint_hooks
from cp_rewrite.integrations.sharded_forward import shard_weights, skip_hooks
from cp_rewrite.integrations.twin import Twin
from cp_rewrite.segments.blocks import find_blocks
from cp_rewrite.segments.cut import Segment, cut_graph
from tests.helpers.models import build_model


class Net(nn.Module):
    """`order`: the block that is used at each turn; 0 is the root's weight."""

    def __init__(self, order: str, blocks: int = 2) -> None:
        super().__init__()
        self.order = order
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(blocks + 1))

    def forward(self, x: Tensor) -> Tensor:
        for block in map(int, self.order):
            residual = x
            x = x * x.square().mean(-1, keepdim=True)
            x = x * self.weights[block]
            x = x.sin() + residual
        return x


def captured(net: Net, x: Tensor) -> tuple[fx.GraphModule, dict[fx.Node, int], list[Any]]:
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        places = gm.graph.find_nodes(op="placeholder")
        found.append((gm, [node.meta["grapharg"].example for node in places]))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(net, backend=backend, fullgraph=True)(x)
    gm, inputs = found[0]
    places = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    units = {n: i for n, value in places.items() for i, w in enumerate(net.weights) if value is w}
    return gm, units, inputs


def run(gm: fx.GraphModule, segments: list[Segment], inputs: list[Any]) -> Any:
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for segment in segments:
        out = segment.graph_module(*(values[node] for node in segment.inputs))
        values.update(zip(segment.outputs, out, strict=True))
    returned: Any = gm.graph.output_node().args[0]
    return values[returned[0]]


@pytest.mark.parametrize(
    ("order", "units"),
    [("12", [1, 2]), ("0120", [0, 1, 2, 0]), ("0102", [0, 1, 0, 2]), ("1121", None), ("11022", [1, 0, 2]), ("0", [0])],
)
def test_cuts_between_blocks(order: str, units: list[int] | None) -> None:
    net, x = Net(order), torch.randn(2, 3)
    gm, places, inputs = captured(net, x)
    if units is None:
        with pytest.raises(ValueError, match="in turns"):
            cut_graph(gm, places)
        return
    segments = cut_graph(gm, places)
    assert [segment.unit for segment in segments] == units
    for segment in segments:
        assert len(segment.outputs) == 1, "the hidden states alone cross"
        assert {places[node] for node in segment.inputs if node in places} == {segment.unit}
    assert torch.equal(run(gm, segments, inputs), net(x))


def test_weights_of_two_blocks_are_named() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "blocks": nn.ModuleList(nn.Linear(3, 4) for _ in range(2))})
    first, last = blocks = find_blocks(model)
    check_shared_weights(model, blocks)
    last.bias = first.bias
    with pytest.raises(ValueError, match=r"blocks.0.bias and blocks.1.bias are one weight"):
        check_shared_weights(model, blocks)
    check_shared_weights(model, ())
    first.weight = model["embed"].weight
    with pytest.raises(ValueError, match=r"embed.weight and blocks.0.weight are one weight"):
        check_shared_weights(model, blocks[:1])


def test_no_cut_inside_of_autocast() -> None:
    class Inside(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    gm, places, _ = captured(Inside("12"), torch.randn(2, 3))
    with pytest.raises(ValueError, match="enter autocast outside of the model"):
        cut_graph(gm, places)


def test_a_twin_has_no_memory_and_follows_its_model() -> None:
    model = build_model("llama")
    twin = Twin(model, torch.device("cpu"), torch.bfloat16)
    for name, stand_in in twin.module.named_parameters():
        weight = model.get_parameter(name)
        assert stand_in.shape == weight.shape
        assert (stand_in.dtype, stand_in.untyped_storage().nbytes()) == (torch.bfloat16, 0)
        _, module, own = twin.owners[id(stand_in)]
        assert module._parameters[own] is weight
    assert all(map(operator.is_, twin.module.buffers(), model.buffers()))
    model.eval().lm_head.requires_grad_(False)  # type: ignore[operator]
    twin.follow()
    assert not twin.module.training
    assert not twin.module.get_parameter("lm_head.weight").requires_grad
    assert twin.module.get_parameter("model.norm.weight").requires_grad


def test_a_twin_follows_attributes_that_are_numbers_and_words() -> None:
    """PEFT switches adapters on and off by such."""
    model: Any = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))
    model[1].names = ["default"]
    twin: Any = Twin(model, torch.device("cpu"), None)
    copied, model[0].p, model[1].off = twin.module[1].forward, 0.2, True
    model[1].names.append("other")
    model[1].forward = lambda x: x  # what stands in a model's own place is not the twin's
    model[1].register_forward_hook(lambda *_: None)
    model[1]._is_fsdp_managed_module = True
    twin.follow()
    assert (twin.module[0].p, twin.module[1].off, twin.module[1].names) == (0.2, True, ["default", "other"])
    assert twin.module[1].forward == copied
    assert not twin.module[1]._forward_hooks
    assert not hasattr(twin.module[1], "_is_fsdp_managed_module")


def test_weights_with_hooks_are_not_sharded() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ValueError, match="weight has a hook"):
        shard_weights(model, (), None, MixedPrecisionPolicy(), True, 1.0)  # type: ignore[arg-type]


def test_checkpoint_hooks_stay_away() -> None:
    """As often as checkpointing is switched on: a graph is guarded by the number of hooks."""
    model: Any = build_model("llama")
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_enable()
    assert model.get_input_embeddings()._forward_hooks
    drop_checkpoint_hooks(model)
    model.gradient_checkpointing_enable()
    assert not model.get_input_embeddings()._forward_hooks


def test_blocks_are_the_entries_of_lists_of_modules() -> None:
    model: Any = build_model("mixtral")
    assert find_blocks(model) == list(model.model.layers)
    assert find_blocks(nn.Linear(2, 2)) == []


def test_hooks_of_a_block_pass_over_its_segments() -> None:
    """They are traced with the twin: on what crosses between segments they would run once more."""
    seen: list[Any] = []
    block = nn.Linear(2, 2)
    block.register_forward_pre_hook(lambda module, args: seen.append(args))
    block.register_forward_hook(lambda module, args, kwargs, out: seen.append((kwargs, out)), with_kwargs=True)
    block.forward = lambda *args, **kwargs: args[0]
    skip_hooks(block, lambda value: value == "segment")
    assert block("segment", 1) == "segment"
    assert not seen
    assert block("hidden", scale=2) == "hidden"
    assert seen == [("hidden",), ({"scale": 2}, "hidden")]
    block.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"a Linear has a hook of its backward.*by a torch\.autograd\.Function"):
        skip_hooks(block, bool)
