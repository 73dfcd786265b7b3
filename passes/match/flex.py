"""Read `flex_attention`: what its mask function, its lists of blocks and its score function say.

The mask function is read as a mask tensor is, with index placeholders b, h, q, k for the element's place. The lists of
blocks must say the same, and the score function may be a soft cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from cp_rewrite.masks import PackedMask
from cp_rewrite.packing import packing_args
from cp_rewrite.passes.graph.canonicalize import Canonical, CanonicalizeError
from cp_rewrite.passes.graph.dynamo_internals import FLEX_OPERANDS, FlexBlocks
from cp_rewrite.passes.graph.nodes import bind, op_name, shape_of, times_constant
from cp_rewrite.passes.graph.regions import Scope, attribute_of, outputs_of, resolve
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression

from .prove_masks import Prover, reader_of

_INDICES = 4  # b, h, q, k


def is_flex(node: fx.Node) -> bool:
    """Whether a node is the flex_attention higher-order op. It returns (out, logsumexp, max scores)."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention


def flex_arguments(node: fx.Node) -> dict[str, Any]:
    """The op's operands by name, and those of attention in general that flex always has."""
    always = {"enable_gqa": True, "dropout_p": 0.0, "is_causal": False, "attn_mask": None}
    return bind(node, FLEX_OPERANDS, **dict.fromkeys(FLEX_OPERANDS), **always)


def output_of(node: fx.Node) -> fx.Node | Refusal:
    """The node of the attention output, when nothing else of the op is read."""
    used = {user.args[1]: user for user in node.users if user.users}
    if set(used) != {0}:
        return Refusal(Reason.KERNEL, "flex_attention's logsumexp or max scores are used", node)
    return used[0]


def mask_function(scope: Scope, node: fx.Node, args: dict[str, Any]) -> tuple[Scope, fx.Node, list[fx.Node]]:
    """The mask function's body as a scope, the node of its result, and its index placeholders b, h, q, k."""
    body: fx.GraphModule = attribute_of(FlexBlocks.read(args["block_mask"]).mask_mod)
    placeholders = body.graph.find_nodes(op="placeholder")
    captured = dict(zip(placeholders[_INDICES:], args["mask_mod_other_buffers"] or (), strict=True))
    return Scope(body, scope, node, captured), outputs_of(body)[0], placeholders[:_INDICES]


def check_blocks(scope: Scope, node: fx.Node, args: dict[str, Any], prover: Prover, mask: PackedMask) -> list[Refusal]:
    """A refusal unless the lists of blocks are made as `create_block_mask` makes them of the mask function.

    That is: in this graph, of what tells documents apart and nothing else, by way of a dense mask whose meaning is the
    mask function's, `mask`. The lists themselves are compared on the first call.
    """
    if _stands_in(scope, args, prover):
        return []
    known = {*prover.sharding.tokens, *packing_args(prover.sharding.packing)}
    for outer, source in (resolve(scope, x) for x in FlexBlocks.read(args["block_mask"]).lists):
        try:
            canonical = prover.trace(outer, source, before=reader_of(scope, node, outer))
        except CanonicalizeError as error:
            return [Refusal(Reason.MASK_UNSUPPORTED_OP, f"the block mask can't be traced: {error}", error.node)]
        strange = [n for n in canonical.leaves if n.op != "get_attr" and prover.tokens.names.get(n) not in known]
        if strange:
            detail = f"the block mask is made of {strange[0].name}: make it in the model, by create_block_mask"
            return [Refusal(Reason.MASK_OPAQUE, detail, node)]
        says = _dense_meaning(canonical, source, shape_of(args["query"]) or (), prover)
        if says != mask:
            said = f"'{says}'" if isinstance(says, PackedMask) else "something else"
            detail = f"the block mask is made of {said}, the mask function says '{mask}'"
            return [Refusal(Reason.MASK_NOT_PACKED, detail, node)]
    return []


def _stands_in(scope: Scope, args: dict[str, Any], prover: Prover) -> bool:
    """Whether the lists of blocks are of a block mask of the batch, which `shard` compared with the packing."""
    return all(resolve(scope, x)[1] in prover.tokens.masks for x in FlexBlocks.read(args["block_mask"]).lists)


def _dense_meaning(canonical: Canonical, node: fx.Node, shape: Sequence[Any], prover: Prover) -> Any:
    """What the dense mask, (B, H, T, T), means of which a list of blocks is made; None where there is none.

    A list of one block that is made of nothing means no mask.
    """
    sizes = shape_of(node) or ()
    if not canonical.leaves and all(size == 1 for size in sizes):
        return PackedMask(causal=False, packed=False)
    for last, call in reversed(list(enumerate(canonical.calls))):
        out = call.outputs[0]
        if out is None or out.dtype is not torch.bool or len(out.shape) != 4:
            continue
        if all(expression(size) in prover.local_tokens for size in out.shape[2:]):
            return prover.meaning(replace(canonical, calls=canonical.calls[: last + 1], output=out), node, shape)
    return None


def softcap_of(node: fx.Node, args: dict[str, Any]) -> float | Refusal:
    """c where the score function is c * tanh(score / c), 0.0 where it is the score itself; else a Refusal."""
    body: fx.GraphModule = attribute_of(args["score_mod"])
    score = body.graph.find_nodes(op="placeholder")[0]
    output = outputs_of(body)[0]
    if output is score:
        return 0.0
    outer, tanh = times_constant(output)
    if tanh is not None and op_name(tanh) == "tanh":
        inner, argument = times_constant(tanh.args[0])
        if argument is score and outer is not None and inner is not None and abs(outer * inner - 1) < 1e-6:
            return outer
    return Refusal(Reason.KERNEL, "the score function is neither the score nor a soft cap c * tanh(score / c)", node)
