"""Read `torch.nn.attention.varlen.varlen_attn`, whose `cu_seqlens` tell documents apart.

It has no mask: documents, `is_causal` and `window_size` are the same as a PackedMask.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from cp_rewrite.masks import PackedMask
from cp_rewrite.packing import CuSeqlens
from cp_rewrite.passes.graph.operands import check_operands, check_options, constant
from cp_rewrite.passes.graph.regions import Scope
from cp_rewrite.passes.values.site import Site
from cp_rewrite.refusal import Reason, Refusal

from .flex import output_of
from .prove_masks import Prover

_OP = "torch_attn::_varlen_attn"
_DEFAULTS = {"is_causal": False, "scale": None, "window_size": None, "dropout_p": 0.0, "attn_mask": None}
_READ = (
    frozenset("query key value cu_seq_q cu_seq_k max_q max_k enable_gqa num_splits backend".split()) | _DEFAULTS.keys()
)
"""Arguments that are read, or make no difference. Versions of torch have others, as for caches: those must be None."""


def is_varlen(node: fx.Node) -> bool:
    """Whether a node is variable-length attention. It returns (out, logsumexp, random state)."""
    return node.op == "call_function" and _schema(node) is not None


def match_varlen(scope: Scope, node: fx.Node, prover: Prover) -> Site | list[Refusal]:
    """The node as a Site of rows: (T, heads, D) operands of one packed row."""
    args = _arguments(node)
    output, mask = output_of(node), _mask(scope, node, args, prover)
    refusals = check_operands(node, args, prover.local_tokens, form="THD") + check_options(node, args)
    refusals += [
        Refusal(Reason.KERNEL, f"{name} is given: context parallelism is for self-attention over a row", node)
        for name, value in args.items()
        if name not in _READ and value is not None
    ]
    if refusals or isinstance(output, Refusal) or isinstance(mask, Refusal):
        return refusals + [r for r in (output, mask) if isinstance(r, Refusal)]
    operands = (args["query"], args["key"], args["value"])
    return Site(output, scope.gm, *operands, mask, scale=constant(args["scale"]), form="THD")


def _schema(node: fx.Node) -> Any:
    schema = getattr(getattr(node.target, "default", node.target), "_schema", None)
    return schema if schema is not None and schema.name == _OP else None


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Operands by name; versions of torch order them differently."""
    declared = _schema(node).arguments
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in declared), node.args, strict=False)) | node.kwargs
    return _DEFAULTS | given | {"enable_gqa": True}  # its kernels take grouped heads anyway


def _mask(scope: Scope, node: fx.Node, args: dict[str, Any], prover: Prover) -> PackedMask | Refusal:
    packing = prover.sharding.packing
    named = {prover.argument(scope, args[key], node) for key in ("cu_seq_q", "cu_seq_k")}
    if not isinstance(packing, CuSeqlens) or packing.padded_arg is not None or named != {packing.arg}:
        names = " and ".join(sorted(map(str, named)))
        told = packing.arg if not isinstance(packing, CuSeqlens) or packing.padded_arg is None else "with padding"
        detail = f"documents of varlen_attn are told apart by {names}, the packing is {type(packing).__name__} {told}"
        return Refusal(Reason.MASK_WRONG_SOURCE, detail, node)
    window: list[Any] = list(args["window_size"] or (-1, -1))
    if not all(isinstance(side, int) for side in window) or not isinstance(args["is_causal"], bool):
        return Refusal(Reason.MASK_OPAQUE, "is_causal or the window is computed in the graph", node)
    left, right = (None if side < 0 else side for side in window)
    right = 0 if args["is_causal"] else right
    return PackedMask(causal=right == 0, window=(left, right), packed=True)
