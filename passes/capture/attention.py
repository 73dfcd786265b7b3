"""Attention that is a node with more in it, in parts that matching knows.

part_flash_attn    flash-attn's autograd functions become the operators that they call
part_multihead     `nn.MultiheadAttention` becomes projections around `scaled_dot_product_attention`
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_map_only

from cp_rewrite.passes.graph.new_nodes import insert, place_by
from cp_rewrite.passes.graph.nodes import (
    bind,
    constant,
    graph_modules,
    is_function,
    nested_graphs,
    op_name,
    outputs_of,
    reached,
    schema_of,
)
from cp_rewrite.torch_internals import FakeTensorMode, fake_mode_of

_PADDING_OPS = frozenset("getitem pad empty_like contiguous size sym_size item set_grad_enabled mod sub".split())
"""Other ops of its functions: they pad, cut and allocate."""


_NUMBERS = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "dropout_p")


def is_flash_attn(node: fx.Node, direction: str = "forward") -> bool:
    """True if a node is flash-attn's operator in a direction: one of torch.library's ops, which have schemas."""
    schema = schema_of(node.target)
    if schema is None:
        return False
    namespace, _, name = schema.name.partition("::")
    return "flash_attn" in namespace and name in (f"_flash_attn_{direction}", f"_flash_attn_varlen_{direction}")


def part_flash_attn(gm: fx.GraphModule) -> None:
    """Put the operator in the place of each function of flash-attn, of a graph and of its nested regions.

    flash-attn (2 and 3, and builds of them in other namespaces) calls its operator inside of a
    `torch.autograd.Function`, which is a node with two graphs. In its place stand the nodes of the forward: head dims
    padded to what kernels take, the operator, and its output cut back. Their derivative is the Function's where its
    backward is the same operator's.
    """
    mode = fake_mode_of(gm.graph.nodes)
    for module in graph_modules(gm) if mode is not None else ():
        for node in [*module.graph.nodes]:
            if is_function(node) and _is_flash_function(node):
                _part_flash_attn(node, mode)


def _is_flash_function(node: fx.Node) -> bool:
    """True if both of a Function's graphs call flash-attn's operator once, with the same numbers, and nothing else that
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
        if len(ops) != 1 or any(op_name(n).partition(".")[0] not in _PADDING_OPS for n in calls if n is not ops[0]):
            return False
        args = bind(ops[0])  # versions of a library order them differently
        args.setdefault("causal", args.get("is_causal"))  # as the backward of 3 calls it
        numbers.append({name: constant(args.get(name)) for name in _NUMBERS})
    return numbers[0] == numbers[1]


def _part_flash_attn(node: fx.Node, mode: FakeTensorMode) -> None:
    body = next(iter(nested_graphs(node).values()))
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
    needed = reached((out for out in outputs_of(body)[0] if isinstance(out, fx.Node)), lambda n: n.all_input_nodes)
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


def part_multihead(gm: fx.GraphModule) -> None:
    """Rewrite nodes of `multi_head_attention_forward`, in which `nn.MultiheadAttention` joins projections and
    attention, in a graph and its nested regions: but those whose weights something reads, and those under autocast,
    whose dtypes are not known here. Masks of such a node hide keys where they are true.
    """
    mode = fake_mode_of(gm.graph.nodes)
    for module in graph_modules(gm) if mode is not None else ():
        for node in module.graph.find_nodes(op="call_function", target=F.multi_head_attention_forward):
            _part_multihead(node, mode)


def _part_multihead(node: fx.Node, mode: FakeTensorMode) -> None:
    asked = bind(node)
    read = [user for user in node.users if user.target is not operator.getitem or user.users]
    others = [asked[name] for name in ("bias_k", "bias_v", "static_k", "static_v")]
    if len(read) != 1 or read[0].args != (node, 0) or asked["add_zero_attn"] or others != [None] * 4:
        return
    (out,) = read
    old, tracer = {*node.graph.nodes}, GraphAppendingTracer(node.graph)
    proxied = {name: fx.Proxy(x, tracer) if isinstance(x, fx.Node) else x for name, x in asked.items()}
    last = insert(node, lambda: _attention(proxied), mode, "part_multihead")
    added = [new for new in node.graph.nodes if new not in old]
    if _value(last).dtype != _value(out).dtype:  # autocast
        for new in reversed(added):
            node.graph.erase_node(new)
        return
    for new in added if _value(out).requires_grad else ():
        if any(_value(x).requires_grad for x in new.all_input_nodes if isinstance(_value(x), Tensor)):
            new.meta["example_value"] = tree_map_only(Tensor, Tensor.requires_grad_, _value(new))
    # The node of the output stays, as others may know it.
    out.op, out.target, out.args, out.kwargs = last.op, last.target, last.args, last.kwargs
    for dead in (last, *node.users, node):
        node.graph.erase_node(dead)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _attention(asked: dict[str, Any]) -> fx.Proxy:
    """The output, (T, B, E), or (T, E) of one row."""
    x = [asked[name] for name in ("query", "key", "value")]
    batched = _value(x[0].node).ndim == 3
    if not batched:
        x = [y.unsqueeze(1) for y in x]
    heads, head_dim = asked["num_heads"], asked["embed_dim_to_check"] // asked["num_heads"]
    q, k, v = (y.unflatten(-1, (heads, head_dim)).permute(1, 2, 0, 3) for y in _projected(x, asked))
    causal = asked["is_causal"] and asked["key_padding_mask"] is None and not asked["need_weights"]
    dropout = asked["dropout_p"] if asked["training"] else 0.0
    mask = _mask(None if causal else asked["attn_mask"], asked["key_padding_mask"], heads, asked["query"])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)  # type: ignore[arg-type]
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), asked["out_proj_weight"], asked["out_proj_bias"])  # type: ignore[arg-type]
    return out if batched else out.squeeze(1)  # type: ignore[return-value]


def _projected(x: list[Any], asked: dict[str, Any]) -> list[Any]:
    """Queries, keys and values, (T, B, E)."""
    weight, bias = asked["in_proj_weight"], asked["in_proj_bias"]
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if asked["use_separate_proj_weight"]:
        weights = [asked[f"{name}_proj_weight"] for name in "qkv"]
    elif asked["query"].node is asked["key"].node is asked["value"].node:
        joined: Any = F.linear(x[0], weight, bias)
        return [joined.chunk(3, -1)[i] for i in range(3)]
    else:
        weights = [weight.chunk(3)[i] for i in range(3)]
    return [F.linear(y, weights[i], biases[i]) for i, y in enumerate(x)]


def _mask(attn: Any, padding: Any, heads: int, query: fx.Proxy) -> Any:
    """A mask of `scaled_dot_product_attention`, true where a key is seen, or added to logits."""
    if attn is not None and _value(attn.node).ndim == 3:
        attn = attn.unflatten(0, (-1, heads))
    if padding is not None:
        padding = padding.unsqueeze(-2).unsqueeze(-2)
    masks = [mask for mask in (attn, padding) if mask is not None]
    if not masks:
        return None
    flags = [_is_flag(mask) for mask in masks]
    if all(flags):
        seen = [mask.logical_not() for mask in masks]
        return seen[0] if len(seen) == 1 else seen[0].logical_and(seen[1])
    dtype = _value(query.node).dtype
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf) if flag else mask
        for mask, flag in zip(masks, flags, strict=True)
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _is_flag(mask: fx.Proxy) -> bool:
    """True if a mask holds flags. Nodes that were made here have no example yet: their first operand tells."""
    node = mask.node
    while _value(node) is None:
        node = node.all_input_nodes[0]
    return _value(node).dtype is torch.bool
