"""Indexing that takes slices and more at once, as two nodes: x[:, 1:, None] is x[:, 1:] and then [:, :, None].

So what moves tokens does nothing else.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.torch_internals import fake_mode_of

from .new_nodes import place_by

_ALL = slice(None)


def split_slices(gm: fx.GraphModule) -> None:
    """Do so in a graph and its nested regions."""
    mode = fake_mode_of(gm.graph.nodes)
    if mode is None:
        return
    for module in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        for node in module.graph.find_nodes(op="call_function", target=operator.getitem):
            source, index = node.args
            parts = _parts(index) if isinstance(source.meta.get("example_value"), Tensor) else None
            if parts is None:
                continue
            with module.graph.inserting_before(node):
                sliced = module.graph.call_function(operator.getitem, (source, parts[0]))
            place_by(sliced, node, mode, source.meta["example_value"].requires_grad)
            node.args = (sliced, parts[1])


def _parts(index: Any) -> tuple[Any, Any] | None:
    """(the slices, the rest) of an index; None where it has but one of them, or is no basic one."""
    entries = list(index) if isinstance(index, tuple) else [index]
    basic = all(i is None or i is Ellipsis or isinstance(i, slice) or type(i) is int for i in entries)
    slices = [i for i in entries if isinstance(i, slice) and i != _ALL]
    if not basic or not slices or not any(i is None or isinstance(i, int) for i in entries):
        return None
    first = tuple(_ALL if isinstance(i, int) else i for i in entries if i is not None)
    return first, tuple(_ALL if isinstance(i, slice) else i for i in entries)
