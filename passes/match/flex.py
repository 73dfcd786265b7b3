"""Read attention operators that bring their mask in a form of their own: torch's `varlen_attn` and those of flash-attn,
by running sums of lengths; `flex_attention`, by functions and lists of blocks.

    Varlen, read_varlen, mask_of           operators without a mask
    flex_arguments, mask_function, …       flex_attention
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from cp_rewrite.masks import PackedMask
from cp_rewrite.packing import CuSeqlens, packing_args
from cp_rewrite.passes.capture.attention import is_flash_attn
from cp_rewrite.passes.graph.canonicalize import Canonical, CanonicalizeError
from cp_rewrite.passes.graph.dynamo import FLEX_OPERANDS, FlexBlocks
from cp_rewrite.passes.graph.nodes import (
    Scope,
    attribute_of,
    bind,
    constant,
    op_name,
    outputs_of,
    resolve,
    schema_of,
    shape_of,
    times_constant,
)
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression

from .prove_masks import Prover, reader_of

_OP = "torch_attn::_varlen_attn"
_NAMES = {
    "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k",
    "causal": "is_causal", "softmax_scale": "scale",
}  # fmt: skip
"""Names of arguments in flash-attn -> torch's other names for them."""
_DEFAULTS = {
    "cu_seq_q": None, "cu_seq_k": None, "is_causal": False, "scale": None, "window_size": None, "dropout_p": 0.0,
    "attn_mask": None, "softcap": 0.0,
}  # fmt: skip
_READ = _DEFAULTS.keys() | {"query", "key", "value", "enable_gqa"}
_NO_MATTER = frozenset(
    "max_q max_k max_seqlen_q max_seqlen_k num_splits backend return_softmax zero_tensors pack_gqa sm_margin "
    "rotary_interleaved".split()
)
"""Arguments that make no difference to the output. Versions have others, as for caches: those must be None or 0."""


@dataclass(frozen=True)
class Varlen:
    """Operands of an operator without a mask, by torch's names. form: "THD", documents of one packed row, or "BTHD",
    whole rows."""

    args: dict[str, Any]
    form: str
    softcap: float
    refusals: list[Refusal]


def is_varlen(node: fx.Node) -> bool:
    """True if a node is torch's or flash-attn's operator without a mask. It returns (out, logsumexp, …)."""
    if node.op != "call_function":
        return False
    schema = schema_of(node.target)
    return schema is not None and (schema.name == _OP or is_flash_attn(node))


def read_varlen(node: fx.Node) -> Varlen:
    """The arguments of such a node, and refusals of those that are not read."""
    given = {_NAMES.get(name, name): value for name, value in bind(node).items()}
    if "window_size_left" in given:
        given["window_size"] = [given.pop(f"window_size_{side}") for side in ("left", "right")]
    args = _DEFAULTS | given | {"enable_gqa": True}  # kernels take grouped heads anyway
    unread = [name for name, value in args.items() if name not in _READ | _NO_MATTER and value not in (None, 0)]
    refusals = [Refusal(Reason.KERNEL, f"{name} is given, which attention over a row has not", node) for name in unread]
    softcap = constant(args["softcap"])
    if softcap is None or softcap < 0:
        refusals.append(Refusal(Reason.KERNEL, "the soft cap is computed in the graph, or negative", node))
    return Varlen(args, "THD" if args["cu_seq_q"] is not None else "BTHD", softcap or 0.0, refusals)


def mask_of(scope: Scope, node: fx.Node, found: Varlen, prover: Prover) -> PackedMask | list[Refusal]:
    """The mask that a node without one means over its row, or refusals that say why it is not read.

    Documents are told apart by running sums of lengths, `cu_seqlens`, or rows are whole; `is_causal` and the window are
    the same as a PackedMask.
    """
    args = found.args
    if found.form == "THD" and (wrong := _other_documents(scope, node, args, prover)):
        return [wrong]
    window = [prover.number(scope, side) for side in args["window_size"] or (-1, -1)]
    if None in window or not isinstance(args["is_causal"], bool):
        return [Refusal(Reason.MASK_OPAQUE, "is_causal or the window is computed in the graph", node)]
    left, right = (None if side < 0 else side for side in window)
    right = 0 if args["is_causal"] else right
    return PackedMask(causal=right == 0, window=(left, right), packed=found.form == "THD")


def _other_documents(scope: Scope, node: fx.Node, args: dict[str, Any], prover: Prover) -> Refusal | None:
    """A refusal unless documents of queries and keys are those that the packing tells."""
    packing = prover.sharding.packing
    given = [prover.argument(scope, args[key], node) for key in ("cu_seq_q", "cu_seq_k")]
    padded = isinstance(packing, CuSeqlens) and packing.padded_arg is not None
    known = isinstance(packing, CuSeqlens) and not padded and packing.arg in given
    if known and all(name == packing.arg or prover.must_equal(name) for name in given):
        return None
    told = "with padding" if padded else packing.arg
    names = " and ".join(sorted(set(given)))
    detail = f"documents of {_name(node)} are told apart by {names}, the packing is {type(packing).__name__} {told}"
    return Refusal(Reason.MASK_WRONG_SOURCE, detail, node)


def _name(node: fx.Node) -> str:
    return "varlen_attn" if schema_of(node.target).name == _OP else "flash-attn"


_INDICES = 4  # b, h, q, k


def is_flex(node: fx.Node) -> bool:
    """True if a node is the flex_attention higher-order op. It returns (out, logsumexp, max scores)."""
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
    """The mask function's body as a scope, the node of its result, and its index placeholders b, h, q, k.

    It is read as a mask tensor is, with these placeholders for the element's place. The lists of blocks must say the
    same (`check_blocks`), and the score function may be a soft cap (`softcap_of`).
    """
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
    """True if the lists of blocks are those of a block mask in the batch, which `shard` compared with the packing."""
    return all(resolve(scope, x)[1] in prover.tokens.masks for x in FlexBlocks.read(args["block_mask"]).lists)


def _dense_meaning(canonical: Canonical, node: fx.Node, shape: Sequence[Any], prover: Prover) -> Any:
    """The meaning of the dense mask, (B, H, T, T), of which a list of blocks is made; None where there is no such mask.

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
