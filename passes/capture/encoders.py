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

from cp_rewrite.batch.encoders import Result, drawn, encode, encoded, learned_of
from cp_rewrite.passes.graph.dynamo import inner_mode
from cp_rewrite.passes.graph.nodes import modes_of
from cp_rewrite.refusal import Refusal, source_line

ENCODED = "cp_rewrite_encoded"
"""In the meta of an input that no caller gives: the `Encoded` that does."""


@dataclass(frozen=True)
class _Input:
    """An argument of a call that is an input of the graph."""

    place: int


@dataclass(frozen=True)
class Encoded:
    """One result of a call of `encode`, with the call's arguments, and all results: all of a call have the same."""

    args: tuple[Any, ...]
    results: tuple[Result, ...]
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
            with gm.graph.inserting_after(inputs[-1]):
                new = gm.graph.placeholder(user.name)
            new.meta = {
                "example_value": user.meta["example_value"],
                ENCODED: Encoded(args, learned.results, user.args[1]),
            }
            inputs.append(new)
            user.replace_all_uses_with(new)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
    return tuple(refusals)


def encoded_arguments(gm: fx.GraphModule) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that gives the inputs that are results of `encode`, called with all others."""
    found = [node.meta[ENCODED] for node in gm.graph.find_nodes(op="placeholder") if ENCODED in node.meta]
    calls = {id(each.args): each for each in found}

    def run(args: Sequence[Any]) -> tuple[Any, ...]:
        results: dict[int, list[Any]] = {}
        for key, call in calls.items():
            given = encoded(*[args[x.place] if isinstance(x, _Input) else x for x in call.args])
            if (now := tuple(result for result, _ in given)) != call.results:
                raise RuntimeError(
                    f"{call.args[1]} gave {_told(now)}, and {_told(call.results)} when the model was traced: call "
                    "torch._dynamo.reset() after a change of what it returns"
                )
            results[key] = [x for _, x in given]
        return tuple(results[id(each.args)][each.item] for each in found)

    return run


def _told(results: Sequence[Result]) -> str:
    found: list[str] = []
    for x in results:
        place = "" if x.place is None else f"[{x.place}]"
        counted = f" ({x.each} for each image)" if x.each and x.counted else ""
        found.append(f"{x.name}{place}{counted} {x.dtype} (N, {', '.join(map(str, x.sizes))})")
    return ", ".join(found) or "nothing"


def encoded_examples(gm: fx.GraphModule) -> list[Any]:
    """Example tensors of the inputs that are results of `encode`, for a compiler."""
    values = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder") if ENCODED in n.meta]
    found: list[Any] = []
    for value in values:
        with inner_mode(value.fake_mode), torch.no_grad():
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        found.append(made.requires_grad_(value.requires_grad))
    return found
