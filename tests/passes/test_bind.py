"""Arguments by name, however a node gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F

from cp_rewrite.passes.graph.nodes import bind, bind_op

_SPELLINGS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "by place": (torch.amax, (-1, True), {}),
    "by name": (torch.amax, (), {"dim": -1, "keepdim": True}),
    "by numpy's names": (torch.amax, (), {"axis": -1, "keepdims": True}),
    "a method's": ("amax", (-1,), {"keepdim": True}),
}


def node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    add = graph.call_method if isinstance(target, str) else graph.call_function
    return add(target, (graph.placeholder("x"), *args), kwargs)


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_an_argument_has_one_name(spelling: str) -> None:
    target, args, kwargs = _SPELLINGS[spelling]
    found = bind(node(target, *args, **kwargs), ("input", "dim", "keepdim"), dim=None, keepdim=False)
    assert (str(found.pop("input")), found) == ("x", {"dim": -1, "keepdim": True})


def test_a_function_and_an_op_tell_names_and_defaults_themselves() -> None:
    loss = bind(node(F.cross_entropy, "labels", None, reduction="sum"))
    assert (loss["target"], loss["reduction"], loss["ignore_index"]) == ("labels", "sum", -100)
    softmax = torch.ops.aten._softmax.default
    assert bind(node(softmax, -1, False))["half_to_float"] is False
    clamp = bind_op(torch.ops.aten.clamp.default, ("x",), {"max": 3})
    assert clamp == {"self": "x", "min": None, "max": 3}


def test_a_function_in_c_tells_none() -> None:
    assert bind(node(torch.amax, -1, keepdim=True)) == {"keepdim": True}
