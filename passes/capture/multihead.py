"""`nn.MultiheadAttention` written as projections around `scaled_dot_product_attention`.

It joins both in one function, `multi_head_attention_forward`. Its masks hide keys where they are true.
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

from cp_rewrite.passes.graph.new_nodes import insert
from cp_rewrite.passes.graph.nodes import bind
from cp_rewrite.passes.graph.regions import graph_modules
from cp_rewrite.torch_internals import FakeTensorMode, fake_mode_of


def part_multihead(gm: fx.GraphModule) -> None:
    """Rewrite such nodes in a graph and its nested regions, but those whose weights something reads, and those under
    autocast, whose dtypes are not known here."""
    mode = fake_mode_of(gm.graph.nodes)
    for module in graph_modules(gm) if mode is not None else ():
        for node in module.graph.find_nodes(op="call_function", target=F.multi_head_attention_forward):
            _part(node, mode)


def _part(node: fx.Node, mode: FakeTensorMode) -> None:
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
    """Whether a mask holds flags. What was made here has no example yet, and the dtype of what it was made of."""
    node = mask.node
    while _value(node) is None:
        node = node.all_input_nodes[0]
    return _value(node).dtype is torch.bool
