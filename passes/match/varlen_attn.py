"""Read operators that have no mask: torch's `varlen_attn`, and those of flash-attn, which libraries call.

Documents are told apart by running sums of lengths, `cu_seqlens`, or rows are whole; `is_causal` and the window are the
same as a PackedMask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from cp_rewrite.masks import PackedMask
from cp_rewrite.packing import CuSeqlens
from cp_rewrite.passes.capture.flash_attn import is_flash_attn
from cp_rewrite.passes.graph.nodes import bind, constant, schema_of
from cp_rewrite.passes.graph.regions import Scope
from cp_rewrite.refusal import Reason, Refusal

from .prove_masks import Prover

_OP = "torch_attn::_varlen_attn"
_NAMES = {
    "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k",
    "causal": "is_causal", "softmax_scale": "scale",
}  # fmt: skip
"""What flash-attn calls what torch has another name for."""
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
    """Such a node's operands by torch's names. form: "THD", documents of one packed row, or "BTHD", whole rows."""

    args: dict[str, Any]
    form: str
    softcap: float
    refusals: list[Refusal]


def is_varlen(node: fx.Node) -> bool:
    """Whether a node is such an operator. It returns (out, logsumexp, …)."""
    if node.op != "call_function":
        return False
    schema = schema_of(node.target)
    return schema is not None and (schema.name == _OP or is_flash_attn(node))


def read_varlen(node: fx.Node) -> Varlen:
    """What such a node is called with, and why that is not read."""
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
    """What such a node means over its row, or why it is not read."""
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
