"""Labels that a model shifts by leaving tokens out, written so that a tensor keeps one entry for each token.

    cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    cross_entropy(logits.flatten(0, 1), pad(labels, (0, 1), value=ignore_index)[:, 1:].flatten())

Both are the same sum, or mean: of the last token the target is ignored.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite.torch_internals import FakeTensorMode, fake_mode_of

from .new_nodes import fake_value
from .operands import op_name

_COPIES = frozenset("contiguous clone view reshape flatten float long to transpose permute".split())
"""Methods and functions of one tensor that keep its entries, whatever its number of tokens."""


def close_label_shifts(gm: fx.GraphModule) -> None:
    """Rewrite such losses in a graph and its nested regions."""
    mode = fake_mode_of(gm.graph.nodes)
    for module in gm.modules() if mode is not None else ():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=F.cross_entropy):
                _close(node, mode)


def _close(loss: fx.Node, mode: FakeTensorMode) -> None:
    given = inspect.signature(F.cross_entropy).bind(*loss.args, **loss.kwargs)
    given.apply_defaults()
    asked: dict[str, Any] = given.arguments
    plain = asked["size_average"] is None and asked["reduce"] is None and asked["reduction"] in ("mean", "sum")
    scores, labels = (_chain(asked[name]) for name in ("input", "target"))
    if not plain or not isinstance(asked["ignore_index"], int) or not scores or not labels:
        return
    a, b = scores[-1], labels[-1]
    if _cut(a, -2) != slice(None, -1) or _cut(b, -1) != slice(1, None) or _value(b).is_floating_point():
        return
    source: Any = b.args[0]
    with b.graph.inserting_before(b):
        padded = b.graph.call_function(F.pad, (source, (0, 1)), {"value": asked["ignore_index"]})
        shifted = b.graph.call_function(operator.getitem, (padded, (Ellipsis, slice(1, None, None))))
    for new in (padded, shifted):
        new.meta = {key: value for key, value in b.meta.items() if key != "example_value"}
    a.replace_all_uses_with(a.args[0])  # type: ignore[arg-type]
    b.replace_all_uses_with(shifted)
    for old in (a, b):
        old.graph.erase_node(old)
    for node in (padded, shifted, *reversed(scores[:-1]), *reversed(labels[:-1]), loss):
        _run(node, mode)


def _chain(node: Any) -> list[fx.Node]:
    """From a loss's operand back to a slice, by copies that nothing else reads; empty where there is no such way."""
    found: list[fx.Node] = []
    while isinstance(node, fx.Node) and len(node.users) == 1 and isinstance(node.meta.get("example_value"), Tensor):
        found.append(node)
        if node.target is operator.getitem:
            return found
        others = [n for n in node.all_input_nodes if n is not node.args[0]] if node.args else []
        numbers = all(isinstance(x, fx.Node | int | torch.dtype | torch.device) for x in _flat(node))
        if op_name(node) not in _COPIES or others or not numbers:
            return []
        node = node.args[0]
    return []


def _flat(node: fx.Node) -> Iterator[Any]:
    for x in (*node.args, *node.kwargs.values()):
        yield from x if isinstance(x, list | tuple) else (x,)


def _cut(node: fx.Node, dim: int) -> slice | None:
    """The slice that a node takes of one dim of a tensor, counted from the last; None where it takes another part."""
    source, index = node.args
    ndim = _value(source).ndim
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (ndim - len(index) + 1)
    index += [slice(None)] * (ndim - len(index))
    if len(index) != ndim or ndim + dim < 0 or not all(isinstance(i, slice) for i in index):
        return None
    taken: Any = index.pop(dim)
    parts = [taken.start, taken.stop, taken.step]
    if any(i != slice(None) for i in index) or not all(x is None or isinstance(x, int) for x in parts):
        return None
    start = None if taken.start == 0 else taken.start
    return slice(start, taken.stop) if taken.step in (None, 1) else None


def _value(node: Any) -> Tensor:
    return node.meta["example_value"]


def _run(node: fx.Node, mode: FakeTensorMode) -> None:
    """Give a node the example value of its new operands."""
    out = fake_value(node, mode)
    needed = any(x.meta["example_value"].requires_grad for x in node.all_input_nodes)
    node.meta["example_value"] = out.detach().requires_grad_(needed and out.is_floating_point())
