"""Snapshots of inputs that a graph writes, so that its backward computes with what the forward read.

idx = (g + bias).argmax(-1)        the backward of torch's compilers may compute idx again, from g and bias
bias.add_(step)                    and bias holds other numbers by then

bias.copy_(snapshot(bias))         in front of all: what is read of bias afterwards is made of the snapshot, which no
                                   compiler makes again, and `bias` itself is needed no more
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from cp_rewrite.passes.graph.nodes import needs_gradient, value_of
from cp_rewrite.passes.graph.regions import graph_modules
from cp_rewrite.passes.graph.writes import memory_of
from cp_rewrite.torch_internals import FakeTensorMode, fake_mode_of

_ops: Any = torch.ops.cp_rewrite
_WHY = "the graph writes it, and the backward may read it once more"


def take_snapshots(gm: fx.GraphModule, written: Collection[int]) -> None:
    """Take one of each input of a graph, and of its regions, whose memory is among `written`; nothing without grad."""
    mode = fake_mode_of(gm.graph.nodes)
    if not torch.is_grad_enabled() or mode is None:
        return
    for module in graph_modules(gm):
        inputs = [n for n in module.graph.find_nodes(op="placeholder") if isinstance(value_of(n), Tensor)]
        # A region may stand where gradients are off, and can't tell.
        changed = [n for n in inputs if memory_of(n) in written and (module is gm or not needs_gradient(n))]
        if changed:
            _begin_with_snapshots(module, changed, mode)


def _begin_with_snapshots(module: fx.GraphModule, inputs: Sequence[fx.Node], mode: FakeTensorMode) -> None:
    graph, weights = module.graph, any(needs_gradient(node) for node in inputs)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first), mode:
        if weights:
            graph.call_function(torch._C._set_grad_enabled, (False,))
        for node in inputs:
            copy = graph.call_function(_ops.snapshot.default, (node,))
            back = graph.call_method("copy_", (node, copy))
            value: Any = value_of(node)
            copy.meta = {"example_value": torch.empty_like(value), "recompute": CheckpointPolicy.MUST_SAVE}
            back.meta = {"example_value": value}
            copy.meta["cp_rewrite"] = back.meta["cp_rewrite"] = _WHY
        if weights:
            graph.call_function(torch._C._set_grad_enabled, (True,))
    module.recompile()
