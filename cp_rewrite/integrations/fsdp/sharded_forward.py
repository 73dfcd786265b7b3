"""The forward of a model whose weights FSDP shards, block by block: one proven graph, run in segments.

    Dynamo traces the twin ─ passes prove and rewrite the whole graph ─ cut_graph ─ each segment is compiled

    root.forward ─ root's segment ─ block 0(segment) ─ block 1(segment) ─ … ─ root's segment

Each segment of a block runs inside a call of the block, so that FSDP's hooks gather its weights before and drop them
after it, in the backward too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cp_rewrite.backend import Backend
from cp_rewrite.calls import observe
from cp_rewrite.calls.progress import progress
from cp_rewrite.passes.graph.dynamo_internals import inner_mode, input_value
from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.graph.regions import outputs_of
from cp_rewrite.passes.graph.writes import written_memory
from cp_rewrite.passes.rewrite.snapshots import take_snapshots
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import fake_mode_of

from .block_hooks import skip_hooks
from .equal_segments import description
from .segments import ROOT, Segment, cut_graph, examples_of
from .twin import Twin


def shard_weights(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    divide_by: float,
) -> nn.Module:
    """`fully_shard` of blocks and of the model, over a mesh of one dim. The sums of gradients are divided by
    `divide_by`."""
    for name, weight in model.named_parameters():
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise ValueError(f"{name} has a hook, which FSDP would lose with the tensor: put it on the sharded weight")
    # What crosses from block to block has the dtype that the model gave it.
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, None, cast_forward_inputs=False)
    for block in blocks:
        skip_hooks(block, lambda value: isinstance(value, _Call))
        fully_shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=reshard_after_forward)
        _run_segments_in(block)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in (model, *blocks):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(divide_by)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def compile_segments(
    call: Callable[..., Any], twin: Twin, blocks: Sequence[nn.Module], sharding: Sharding
) -> Callable[..., Any]:
    """`call` of the twin or of a module of it, compiled to run on the weights of the model that `blocks` are of."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    compiled = torch.compile(traced, backend=SegmentBackend(sharding, twin, blocks), fullgraph=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        twin.follow()
        return compiled(*args, **kwargs)

    return run


class SegmentBackend(Backend):
    """The backend of a twin. Its graphs run on the weights of the model, in the calls of the model's blocks."""

    def __init__(self, sharding: Sharding, twin: Twin, blocks: Sequence[nn.Module]) -> None:
        super().__init__(sharding)
        self.twin, self.blocks = twin, tuple(blocks)
        # 0 is the root. Of a weight that two blocks share FSDP makes the root's.
        self._units = {module: i for i, block in enumerate(blocks, 1) for module in block.modules()}

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _inner(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]
    ) -> Callable[..., Any]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        weights = {node: self._owner(node) for node in placeholders if isinstance(value_of(node), nn.Parameter)}
        segments = cut_graph(gm, {node: self._units.get(owner, ROOT) for node, (owner, _) in weights.items()})
        given, fakes = dict(zip(placeholders, example_inputs, strict=True)), fake_mode_of(gm.graph.nodes)
        assert fakes is not None, "a graph of a model has tensors"
        inner, written = inner_mode(fakes), written_memory(gm)
        outputs = outputs_of(gm)
        returned = {*outputs}
        calls: list[_Call] = []
        classes: dict[Hashable, tuple[Callable[..., Any], list[Any]]] = {}  # examples stay: descriptions have ids
        last_use = {node: i for i, segment in enumerate(segments) for node in segment.inputs}
        for i, segment in enumerate(segments):
            take_snapshots(segment.graph_module, written)
            examples = examples_of(segment, given, inner)
            described = description(segment, examples, written)
            with progress("compile", i + 1, len(segments)):
                if described not in classes:
                    classes[described] = self._compiled(segment.graph_module, examples, patches), examples
            done = {node for node in segment.inputs if last_use[node] == i and node not in returned}
            calls.append(_Call(segment, classes[described][0], weights, done))
        observe.count_segments(len(segments), len(classes))

        def run(*args: Any) -> list[Any]:
            values = {node: value for node, value in zip(placeholders, args, strict=True) if node not in weights}
            for call in calls:
                inputs = [values[node] for node in call.inputs]
                for node in call.done:
                    del values[node]
                out = call(*inputs) if call.unit == ROOT else self.blocks[call.unit - 1](call, *inputs)
                values.update(zip(call.outputs, out, strict=True))
            return [values[node] if isinstance(node, fx.Node) else node for node in outputs]

        return run

    def _owner(self, node: fx.Node) -> tuple[nn.Module, str]:
        """The module of the model that holds a weight of the twin, and the weight's name there."""
        value = input_value(node)
        if id(value) not in self.twin.owners:
            raise ValueError(
                f"{node.name} is a weight that no module of the model holds: make it a parameter of a module before "
                "parallelize"
            )
        return self.twin.owners[id(value)][1:]


class _Call:
    """A compiled segment. Called with its inputs but for weights, which it reads off the model's modules itself.

    `inputs`: those. `done`: those of them that nothing behind it reads.
    """

    def __init__(
        self,
        segment: Segment,
        compiled: Callable[..., Any],
        weights: Mapping[fx.Node, tuple[nn.Module, str]],
        done: Collection[fx.Node],
    ) -> None:
        self.unit, self.outputs, self._compiled = segment.unit, segment.outputs, compiled
        self._weights = [weights.get(node) for node in segment.inputs]
        self.inputs = [node for node in segment.inputs if node not in weights]
        self.done = [node for node in self.inputs if node in done]

    def __call__(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        return self._compiled(*(w[0]._parameters[w[1]] if w is not None else next(rest) for w in self._weights))


def _run_segments_in(block: nn.Module) -> None:
    """Let a block run what it is called with, where that is a segment."""
    plain = block.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return args[0](*args[1:]) if args and isinstance(args[0], _Call) else plain(*args, **kwargs)

    block.forward = forward
