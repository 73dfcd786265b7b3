"""Encoders that run before the graph: their results become its inputs.

encode(id, "get_image_features", …, pixel_values, image_grid_thw)    features: an input behind the others
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from cp_rewrite.batch.encoders import drawn, encode, learned_of
from cp_rewrite.passes.graph.dynamo import inner_mode
from cp_rewrite.passes.graph.nodes import bind, modes_of
from cp_rewrite.refusal import Reason, Refusal, source_line

ENCODED = "cp_rewrite_encoded"
"""In the meta of an input that no caller gives: the `Encoded` that does."""


@dataclass(frozen=True)
class _Input:
    """An argument of a call that is an input of the graph."""

    place: int


@dataclass(frozen=True)
class Encoded:
    """One result of a call of `encode`, with the call's arguments: all its results have the same."""

    args: tuple[Any, ...]
    item: int


def take_out_encoders(gm: fx.GraphModule) -> tuple[Refusal, ...]:
    """Make the results of such nodes inputs of a graph. Those under another mode than the graph starts with stay, and
    no rule knows them. What can't run on all ranks alike is refused."""
    refusals: list[Refusal] = []
    inputs = gm.graph.find_nodes(op="placeholder")
    place, modes = {node: i for i, node in enumerate(inputs)}, modes_of(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=encode):
        method, learned = str(node.args[1]), learned_of(*node.args)
        if learned.drew:
            refusals.append(drawn(method, source_line(node)))
        if modes[node] != modes[inputs[0]]:
            continue
        args = fx.map_arg(node.args, lambda read: _Input(place[read]))
        for user in [*node.users]:
            assert user.target is operator.getitem, "encode gives a list"
            if learned.results[user.args[1]].joined and not all(map(_joins, user.users)):
                refusals.append(Refusal(Reason.SHAPE, _EACH.format(method), line=source_line(node)))
            with gm.graph.inserting_after(inputs[-1]):
                new = gm.graph.placeholder(user.name)
            new.meta = {"example_value": user.meta["example_value"], ENCODED: Encoded(args, user.args[1])}
            inputs.append(new)
            user.replace_all_uses_with(new)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
    return tuple(refusals)


_EACH = "{} gives a tensor for each image: torch.cat(…, dim=0) of them is all that is read of them"


def _joins(node: fx.Node) -> bool:
    """True of a node that joins the tensors of all images, or asks how many rows they have."""
    if node.target is torch.cat:
        given = bind(node, ("tensors", "dim"), dim=0)
        return len(given["tensors"]) == 1 and given["dim"] == 0
    return node.target is torch.ops.aten.sym_size.int


def encoded_arguments(gm: fx.GraphModule) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What gives such inputs, called with all others."""
    nodes = [node for node in gm.graph.find_nodes(op="placeholder") if ENCODED in node.meta]
    found = [node.meta[ENCODED] for node in nodes]
    like = [(x.dtype, x.shape[1:]) for node in nodes for x in [node.meta["example_value"]]]
    calls = {id(each.args): each.args for each in found}

    def run(args: Sequence[Any]) -> tuple[Any, ...]:
        results = {
            key: encode(*[args[x.place] if isinstance(x, _Input) else x for x in call]) for key, call in calls.items()
        }
        given = tuple(results[id(each.args)][each.item] for each in found)
        for each, x, (dtype, sizes) in zip(found, given, like, strict=True):
            if x.dtype != dtype or x.shape[1:] != sizes:
                raise RuntimeError(
                    f"{each.args[1]} gave {x.dtype} (N, {', '.join(map(str, x.shape[1:]))}), and {dtype} (N, "
                    f"{', '.join(map(str, sizes))}) when the model was traced: call torch._dynamo.reset() after a "
                    "change of what it returns"
                )
        return given

    return run


def encoded_examples(gm: fx.GraphModule) -> list[Any]:
    """What a compiler is given of them."""
    values = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder") if ENCODED in n.meta]
    found: list[Any] = []
    for value in values:
        with inner_mode(value.fake_mode), torch.no_grad():
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        found.append(made.requires_grad_(value.requires_grad))
    return found
