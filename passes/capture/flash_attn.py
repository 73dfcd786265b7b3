"""flash-attn's operators, and its autograd functions written as the operators that they call.

flash-attn (2 and 3, and builds of them in other namespaces) calls its operator inside of a `torch.autograd.Function`,
which is a node with two graphs. In its place stand the nodes of the forward: head dims padded to what kernels take, the
operator, and its output cut back. Their derivative is the Function's where its backward is the same operator's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from cp_rewrite.passes.graph.new_nodes import place_by
from cp_rewrite.passes.graph.nodes import bind, constant, op_name, schema_of
from cp_rewrite.passes.graph.regions import graph_modules, is_function, nested_graphs, outputs_of
from cp_rewrite.torch_internals import FakeTensorMode, fake_mode_of

_PLAIN = frozenset("getitem pad empty_like contiguous size sym_size item set_grad_enabled mod sub".split())
"""Other ops of its functions: they pad, cut and allocate."""
_NUMBERS = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "dropout_p")


def is_flash_attn(node: fx.Node, direction: str = "forward") -> bool:
    """Whether a node is flash-attn's operator; one of torch.library's ops, which has a schema."""
    schema = schema_of(node.target)
    if schema is None:
        return False
    namespace, _, name = schema.name.partition("::")
    return "flash_attn" in namespace and name in (f"_flash_attn_{direction}", f"_flash_attn_varlen_{direction}")


def part_flash_attn(gm: fx.GraphModule) -> None:
    """Put the operator in the place of each such Function of a graph and of its nested regions."""
    mode = fake_mode_of(gm.graph.nodes)
    for module in graph_modules(gm) if mode is not None else ():
        for node in [*module.graph.nodes]:
            if is_function(node) and _is_flash_function(node):
                _part(node, mode)


def _is_flash_function(node: fx.Node) -> bool:
    """Whether both of a Function's graphs call flash-attn's operator once, with the same numbers, and nothing else that
    computes."""
    bodies = [*nested_graphs(node).values()]
    if any(user.target is not operator.getitem for user in node.users):
        return False
    if len(bodies) != 2 or len(bodies[0].graph.find_nodes(op="placeholder")) != len(node.args) - 2:
        return False
    numbers: list[dict[str, float | None]] = []
    for body, direction in zip(bodies, ("forward", "backward"), strict=True):
        calls = [n for n in body.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
        ops = [n for n in calls if is_flash_attn(n, direction)]
        if len(ops) != 1 or any(op_name(n).partition(".")[0] not in _PLAIN for n in calls if n is not ops[0]):
            return False
        args = bind(ops[0])  # versions of a library order them differently
        args.setdefault("causal", args.get("is_causal"))  # as the backward of 3 calls it
        numbers.append({name: constant(args.get(name)) for name in _NUMBERS})
    return numbers[0] == numbers[1]


def _part(node: fx.Node, mode: FakeTensorMode) -> None:
    body = next(iter(nested_graphs(node).values()))
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
    needed = _ancestors([out for out in outputs_of(body)[0] if isinstance(out, fx.Node)])
    for inner in [n for n in body.graph.nodes if n in needed and n not in copies]:
        with node.graph.inserting_before(node):
            copies[inner] = new = node.graph.node_copy(inner, lambda n: copies[n])
        place_by(new, node, mode)
        new.meta["cp_rewrite"] = "part_flash_attn"
    for out in [*node.users]:  # these nodes stay, as others may know them
        new = copies[outputs_of(body)[0][out.args[1]]]
        out.op, out.target, out.args, out.kwargs = new.op, new.target, new.args, new.kwargs
        new.replace_all_uses_with(out)
        node.graph.erase_node(new)
    node.graph.erase_node(node)


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        found.add(node)
        nodes += [n for n in node.all_input_nodes if n not in found]
    return found
