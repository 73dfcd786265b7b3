"""Which argument of the user's function each placeholder of a Dynamo graph is."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
import torch.fx as fx
from torch import nn

from .dynamo_frame import wrapped_names
from .dynamo_internals import is_of_module, is_size, source_name, source_of

_COMPONENT = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|(-?\d+))\]|\.([A-Za-z_]\w*)""")


def argument_names(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Placeholder -> the name under which the caller passed it: the last component of its Dynamo source.

        L['input_ids']            -> input_ids
        L['kwargs']['input_ids']  -> input_ids
        L['batch'].doc_ids        -> doc_ids
        L['args'][0]              -> args[0]; behind a decorator of forward the name that forward has for it

    Weights, buffers and sizes are left out. When two arguments end alike, the one nearer to the signature keeps the
    short name and the others get their whole source; on a draw all of them do.
    """
    found: dict[str, list[tuple[int, str, fx.Node]]] = defaultdict(list)
    wrapped = wrapped_names()
    for node in gm.graph.nodes:
        if node.op != "placeholder" or not _is_data(node):
            continue
        source = source_of(node)
        if source is None or is_of_module(source):
            continue
        full = source_name(source)
        short, depth = (wrapped[full], 1) if full in wrapped else _last_component(full)
        found[short].append((depth, full, node))
    names: dict[fx.Node, str] = {}
    for short, entries in found.items():
        nearest = min(depth for depth, _, _ in entries)
        unique = sum(depth == nearest for depth, _, _ in entries) == 1
        for depth, full, node in entries:
            names[node] = short if unique and depth == nearest else full
    return names


def module_numbers(gm: fx.GraphModule) -> list[torch.SymInt | torch.SymFloat]:
    """Numbers that a module holds, and sizes of its weights, where Dynamo made symbols of them."""
    values = [(n.meta.get("example_value"), source_of(n)) for n in gm.graph.find_nodes(op="placeholder")]
    return [v for v, source in values if isinstance(v, torch.SymInt | torch.SymFloat) and is_of_module(source)]


def weight_places(gm: fx.GraphModule) -> dict[str, int]:
    """Where a graph's inputs are weights and buffers of modules: their names -> places."""
    places: dict[str, int] = {}
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = source_of(node)
        if isinstance(node.meta.get("example_value"), torch.Tensor) and source is not None and is_of_module(source):
            places[source_name(source)] = place
    return places


def number_places(gm: fx.GraphModule) -> dict[str, int]:
    """Where a graph's inputs are numbers that a caller passed, and no sizes of tensors: their names -> places."""
    places: dict[str, int] = {}
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = source_of(node)
        number = isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat) and source is not None
        if number and not is_of_module(source) and not is_size(source):
            places[_last_component(source_name(source))[0]] = place
    return places


def passed_numbers(gm: fx.GraphModule) -> list[torch.SymInt | torch.SymFloat]:
    """Those numbers."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [inputs[place].meta["example_value"] for place in number_places(gm).values()]


def _is_data(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return value is None or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


def _last_component(full: str) -> tuple[str, int]:
    parts = list(_COMPONENT.finditer(full))
    if not parts:
        return full, 0
    last = parts[-1]
    if last[3] is not None:
        base = _last_component(full[: last.start()])[0]
        return f"{base}[{last[3]}]", len(parts)
    return last[1] or last[2] or last[4], len(parts)
