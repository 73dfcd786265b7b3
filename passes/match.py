"""Find the attention nodes of a Dynamo graph and prove what their masks mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.masks import PackedMask
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding

from .canonicalize import CanonicalizeError, Scope, canonicalize, is_parameter, nested_scopes, resolve
from .grouped_heads import ungroup
from .locality_inputs import token_dims
from .match_flex import flex_arguments, is_flex, mask_function, output_of, softcap_of
from .predicate import prove
from .sites import Site

_SDPA: frozenset[Any] = frozenset(
    {
        torch._C._nn.scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)
# What these make depends on no element of their input.
_SHAPE_ONLY = frozenset(
    f"{name}{end}" for name in ("zeros", "ones", "full", "empty") for end in ("_like",)
) | frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "size", "dim"})
_DEFAULTS: dict[str, Any] = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
    "scale": None, "enable_gqa": False,
}  # fmt: skip


def match_sites(
    gm: fx.GraphModule, sharding: Sharding, source_of: Mapping[fx.Node, str]
) -> tuple[list[Site], list[Refusal]]:
    """The attention nodes of `gm` and of its nested regions, proven or refused.

    Args:
        gm: a Dynamo graph: nodes carry fake tensors in `meta["example_value"]`.
        sharding: the annotation; `tokens` and `packing` name arguments.
        source_of: placeholder -> argument name, from `sources.argument_names`.
    Returns:
        Sites in graph order, and every reason why another attention node is none.
    """
    matcher = _Matcher(gm, sharding, source_of)
    sites: dict[fx.Node, Site] = {}
    refusals: dict[tuple[Any, ...], Refusal] = {}
    for scope, node in _attention_nodes(Scope(gm), matcher):
        found = matcher.match(scope, node)
        if isinstance(found, Site) and sites.setdefault(node, found) != found:
            detail = f"calls of one region give its attention different masks: {sites[node].mask} and {found.mask}"
            found = [Refusal(Reason.NESTED_REGION, detail, node)]
        if not isinstance(found, Site):
            refusals |= {(r.reason, r.detail, r.node, node if r.node is None else None): r for r in found}
    refusals |= {(r.reason, r.detail, r.node): r for r in matcher.unreachable}
    return list(sites.values()), list(refusals.values())


def is_attention(node: fx.Node) -> bool:
    """Whether a node is scaled dot product attention, in any of its names."""
    return node.op == "call_function" and node.target in _SDPA


def _attention_nodes(scope: Scope, matcher: _Matcher) -> Iterator[tuple[Scope, fx.Node]]:
    calls = dict(nested_scopes(scope))
    for node in scope.gm.graph.nodes:
        if is_attention(node) or is_flex(node):
            yield scope, node
        elif node in calls:
            inner = calls[node]
            if inner is not None:
                yield from _attention_nodes(inner, matcher)
            elif _holds_attention(scope, node):
                detail = f"attention inside {node.target}, which is no plain call of a region"
                matcher.unreachable.append(Refusal(Reason.NESTED_REGION, detail, node))


def _holds_attention(scope: Scope, node: fx.Node) -> bool:
    modules = dict(scope.gm.named_modules())
    for arg in node.all_input_nodes:
        body = modules.get(str(arg.target)) if arg.op == "get_attr" else None
        for inner in body.modules() if body is not None else ():
            if isinstance(inner, fx.GraphModule) and any(map(is_attention, inner.graph.nodes)):
                return True
    return False


@dataclass
class _Matcher:
    gm: fx.GraphModule
    sharding: Sharding
    source_of: Mapping[fx.Node, str]
    unreachable: list[Refusal] = field(default_factory=list)
    _masks: dict[Any, PackedMask | list[Refusal]] = field(default_factory=dict)
    _heads: dict[Any, bool] = field(default_factory=dict)
    _weighed: dict[tuple[Scope, fx.Node], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the sizes that count local tokens: one, under as many symbols as Dynamo gave it."""
        first: tuple[str, Any] | None = None
        self.local_tokens: frozenset[sympy.Expr] = frozenset()
        for node, name in self.source_of.items():
            value, dim = node.meta.get("example_value"), token_dims(self.sharding).get(name)
            if not isinstance(value, Tensor) or dim is None:
                continue
            if dim >= value.ndim:
                detail = f"{name!r} has {value.ndim} dims, the annotation says that dim {dim} counts tokens"
                self.unreachable.append(Refusal(Reason.TOKEN_INPUT, detail, node))
                continue
            size = value.shape[dim]
            first = first or (name, size)
            if not _equal(size, first[1]):
                detail = f"{name!r} has {size} tokens in dim {dim}, {first[0]!r} has {first[1]}"
                self.unreachable.append(Refusal(Reason.TOKEN_INPUT, detail, node))
            self.local_tokens |= {expression(size)}

    def match(self, scope: Scope, node: fx.Node) -> Site | list[Refusal]:
        return self._match_flex(scope, node) if is_flex(node) else self._match_sdpa(scope, node)

    def _match_flex(self, scope: Scope, node: fx.Node) -> Site | list[Refusal]:
        args = flex_arguments(node)
        output, softcap = output_of(node), softcap_of(scope, node, args, constant)
        refusals = [*self._check_operands(node, args), *self._check_options(node, args)]
        refusals += [r for r in (output, softcap) if isinstance(r, Refusal)]
        shape, mask = shape_of(args["query"]), None
        if shape is not None and len(shape) == 4:
            body, result, indices = mask_function(scope, node, args)
            found = self._prove(body, result, node, shape, indices)
            mask = found if isinstance(found, PackedMask) else refusals.extend(found)
        if refusals or mask is None or isinstance(output, Refusal) or isinstance(softcap, Refusal):
            return refusals
        key, value = ungroup(scope.gm, args["query"], args["key"], args["value"], self._heads)
        scale = constant(args["scale"])
        return Site(output, scope.gm, args["query"], key, value, mask, None, scale, softcap)

    def _match_sdpa(self, scope: Scope, node: fx.Node) -> Site | list[Refusal]:
        args = _arguments(node)
        refusals = [*self._check_operands(node, args), *self._check_options(node, args)]
        mask, assumed = self._mask(scope, node, args)
        if isinstance(mask, list):
            refusals += mask
        if refusals or isinstance(mask, list):
            return refusals
        key, value = ungroup(scope.gm, args["query"], args["key"], args["value"], self._heads)
        return Site(
            node=node,
            graph_module=scope.gm,
            query=args["query"],
            key=key,
            value=value,
            mask=mask,
            mask_node=args["attn_mask"],
            scale=constant(args["scale"]),
            assumed=assumed,
        )

    def _check_operands(self, node: fx.Node, args: dict[str, Any]) -> list[Refusal]:
        found: list[Refusal] = []
        shapes = {name: shape_of(args[name]) for name in ("query", "key", "value")}
        for name, shape in shapes.items():
            if shape is None or len(shape) != 4:
                sizes = "no tensor" if shape is None else f"{len(shape)}-d"
                found.append(
                    Refusal(Reason.SHAPE, f"{name} is {sizes}; (batch, heads, tokens, head dim) is read", node)
                )
            elif expression(shape[2]) not in self.local_tokens:
                counted = ", ".join(map(str, self.local_tokens)) or "no annotated input found"
                detail = f"{name} has {shape[2]} tokens in dim 2, the annotated inputs have {counted}"
                found.append(Refusal(Reason.QK_LENGTH, detail, node))
        if not found:
            found += _check_heads(node, args, *(s for s in shapes.values() if s is not None))
        return found

    def _check_options(self, node: fx.Node, args: dict[str, Any]) -> list[Refusal]:
        found: list[Refusal] = []
        dropout = constant(args["dropout_p"])
        if dropout is None or dropout > 0:
            what = "is computed in the graph" if dropout is None else f"is {dropout:g}"
            found.append(Refusal(Reason.DROPOUT, f"dropout_p {what}", node))
        if args["scale"] is not None and constant(args["scale"]) is None:
            found.append(Refusal(Reason.KERNEL, "the softmax scale is computed in the graph", node))
        if not isinstance(args["is_causal"], bool):
            found.append(Refusal(Reason.MASK_OPAQUE, "is_causal is computed in the graph", node))
        if args["is_causal"] and args["attn_mask"] is not None:
            found.append(Refusal(Reason.MASK_NOT_PACKED, "attn_mask and is_causal=True exclude each other", node))
        return found

    def _mask(self, scope: Scope, node: fx.Node, args: dict[str, Any]) -> tuple[PackedMask | list[Refusal], bool]:
        mask = args["attn_mask"]
        if mask is None:
            return PackedMask(causal=bool(args["is_causal"]), packed=False), False
        shape = shape_of(args["query"])
        if shape is None or len(shape) != 4:
            return [], False
        found = self._prove(scope, mask, node, shape)
        opaque = isinstance(found, list) and all(r.reason is Reason.MASK_OPAQUE for r in found)
        if opaque and self.sharding.assume_mask is not None:
            return self.sharding.assume_mask, True
        return found, False

    def _prove(
        self, scope: Scope, mask: fx.Node, node: fx.Node, shape: Any, indices: Sequence[fx.Node] = ()
    ) -> PackedMask | list[Refusal]:
        # One mask feeds all layers, often through the regions of many checkpointed calls.
        outer, source = resolve(scope, mask)
        if not isinstance(source, fx.Node):
            return [Refusal(Reason.MASK_OPAQUE, f"the mask is {source!r}", node)]
        key = (outer, source, tuple(str(s) for s in shape[:3]))
        if key in self._masks:
            return self._masks[key]
        while scope is not outer and scope.call is not None and scope.parent is not None:
            scope, node = scope.parent, scope.call
        try:
            canonical = canonicalize(outer, source, self._holds_weights, before=node)
        except CanonicalizeError as error:
            detail = f"the mask's computation can't be traced: {error}"
            return [Refusal(Reason.MASK_UNSUPPORTED_OP, detail, error.node)]
        found = prove(canonical, source, shape, self.sharding, self._name, self.local_tokens, indices)
        if not canonical.updated:  # else it says another thing to another reader
            self._masks[key] = found
        return found

    def _name(self, node: fx.Node) -> str:
        # A value inside the model may be called like an argument: only arguments go by their plain name.
        return self.source_of.get(node, f"%{node.name}")

    def _holds_weights(self, scope: Scope, node: fx.Node) -> bool:
        """Whether a node's value comes from weights: no mask does, and tracing stops there."""
        scope, node = resolve(scope, node)
        if not isinstance(node, fx.Node):
            return False
        key = (scope, node)
        if key not in self._weighed:
            for n in scope.gm.graph.nodes:
                value = n.meta.get("example_value")
                self._weighed[scope, n] = is_parameter(value) or (
                    getattr(n.target, "__name__", n.target) not in _SHAPE_ONLY
                    and any(self._holds_weights(scope, arg) for arg in n.all_input_nodes if arg.op != "get_attr")
                )
                if n is node:
                    break
        return self._weighed[key]


def _arguments(node: fx.Node) -> dict[str, Any]:
    named = dict(zip(_DEFAULTS, node.args, strict=False))
    return {**_DEFAULTS, **named, **node.kwargs}


def _check_heads(node: fx.Node, args: dict[str, Any], query: Any, key: Any, value: Any) -> list[Refusal]:
    q, k, v = (expression(shape[1]) for shape in (query, key, value))
    rows = {expression(shape[0]) for shape in (query, key, value)}
    found: list[Refusal] = []
    if len(rows) != 1:
        found.append(Refusal(Reason.SHAPE, f"query, key and value have {sorted(map(str, rows))} batch rows", node))
    grouped = bool(args["enable_gqa"])
    if k != v or (q != k and not grouped) or (grouped and not (q / k).is_integer):
        found.append(Refusal(Reason.SHAPE, f"{q} query heads do not fit {k} key and {v} value heads", node))
    return found


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """The fake shape of a node's tensor."""
    value: Any = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def expression(size: Any) -> sympy.Expr:
    """An int or SymInt as the shape environment knows it now."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _equal(size: Any, other: Any) -> bool:
    """Equal sizes; where two symbols happen to be equal, a guard makes sure that they stay so."""
    if expression(size) == expression(other):
        return True
    hints = [s.node.hint if isinstance(s, torch.SymInt) else s for s in (size, other)]
    return None not in hints and hints[0] == hints[1] and bool(size == other)


def constant(value: Any) -> float | None:
    """A number that the graph fixes, or can be made to fix by a guard; None for anything else."""
    if isinstance(value, fx.Node):
        value = value.meta.get("example_value")
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return float(value) if value.node.has_hint() else None
    return float(value) if isinstance(value, int | float) else None
