"""The segments of a model whose weights are no sharded ones: blocks are told by where its weights are held.

L['self']._modules['layers']._modules['0']._modules['mlp']._parameters['weight']     a weight of block 0
L['self']._modules['layers']._modules['1']._modules['mlp']._parameters['weight']     of block 1
L['self']._modules['head']._parameters['weight']                                     of none
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch.fx as fx
from torch import nn

from cp_rewrite.passes.graph.dynamo_internals import source_name, source_of
from cp_rewrite.passes.graph.nodes import needs_gradient, value_of
from cp_rewrite.passes.graph.writes import memory_of

from .compiled import Described, described
from .cut import ROOT, Segment, cut_graph

_ENTRY = re.compile(r"_modules\['\d+'\]")
"""An entry of a list of modules."""


def equal_blocks(gm: fx.GraphModule, example_inputs: Sequence[Any], written: Collection[int]) -> list[Described] | None:
    """A graph's segments, where some of them are equal; None: it is compiled as one. `written`: memory that it writes
    into."""
    units = block_weights(gm)
    if len({*units.values()} - {ROOT}) < 2:
        return None
    try:
        segments = cut_graph(gm, units)
    except ValueError:  # blocks share weights, or there is no place to cut
        return None
    if _writes_across(gm, segments, written):
        return None
    parts = described(gm, segments, example_inputs, written)
    return parts if len({part.kind for part in parts}) < len(parts) else None


def block_weights(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Placeholder of a weight -> the number of its block: of the first entry of a list of modules on the way to it."""
    blocks: dict[str, int] = {}
    units: dict[fx.Node, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if isinstance(value_of(node), nn.Parameter):
            name = source_name(source_of(node))
            entry = _ENTRY.search(name)
            units[node] = ROOT if entry is None else blocks.setdefault(name[: entry.end()], len(blocks) + 1)
    return units


def _writes_across(gm: fx.GraphModule, segments: Sequence[Segment], written: Collection[int]) -> bool:
    """True if memory that crosses from segment to segment is written in place: a compiler of one sees no views that
    another has of it."""
    crossing = {node for segment in segments for node in segment.inputs if node.op != "placeholder"}
    crossing |= {node for node in gm.graph.find_nodes(op="placeholder") if needs_gradient(node)}
    return any(memory_of(node) in written for node in crossing)
